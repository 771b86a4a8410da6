"""How ranks meet in the store, before there is a process group: they wait for all, and agree on a start if hosts are several.

torchrun counts restarts on each host: a host that has come back begins at 0, and one whose ranks have not failed does not count.
Its store may outlive them. So ranks cannot tell by the count which keys in the store are of their start; they agree on a name.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from megascend.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_S = 0.05
"""Seconds between two looks at the store while ranks agree."""


def wait_for_all(store: Store, rank: int, world_size: int, timeout_s: float) -> list[int]:
    """Announce ``rank`` in the store, and wait for the others.

    Returns:
        The ranks that did not come within ``timeout_s``; none if all are there.
    """
    keys = [f"started/{number}" for number in range(world_size)]
    store.set(keys[rank], "")
    deadline = time.monotonic() + timeout_s
    # Asked again and again: a wait that ends before its time has torch write two warnings to the terminal, every time.
    pause_s, longest_s = 0.002, max(0.05, world_size / 2000)
    while not store.check(keys):
        if time.monotonic() >= deadline:
            return [number for number, key in enumerate(keys) if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)
    return []


def did_not_arrive(rank: int, label: str, missing: Sequence[int], expected: int, timeout_s: float) -> str:
    """Return the message of every error about ranks that did not arrive.

    Args:
        label: where to.
        missing: ranks that did not.
        expected: how many should have.
    """
    names = ", ".join(str(number) for number in missing)
    return (
        f"rank {rank}: {len(missing)} of {expected} ranks did not arrive at {label} within {timeout_s:g} s: "
        f"{'rank' if len(missing) == 1 else 'ranks'} {names}. Look at the first error in their logs; if they are only "
        "slow, raise timeout_s"
    )


def agree_on_start(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """Return a name that the ranks of this start share, and no earlier one has had. Collective.

    Every rank leaves a number of its own. Rank 0 proposes a name together with all numbers that it sees; a rank accepts a
    proposal that has its number; rank 0 confirms it when all have. A number that a rank of an earlier start has left is
    in a proposal that is never accepted by all, and replaced as soon as the new number is there.

    Raises:
        CollectiveTimeoutError: ranks did not arrive within ``timeout_s``; the message names them.
    """
    number = secrets.token_hex(8)
    store.set(f"number/{rank}", number)
    deadline = time.monotonic() + timeout_s
    decide = _Proposer(store, world_size).decide if rank == 0 else _Follower(store, rank, number).decide
    while (name := decide()) is None:
        if time.monotonic() >= deadline:
            missing = [other for other in range(world_size) if not store.check([f"number/{other}"])]
            if not missing:
                # All have left a number, but of an earlier start: who has not accepted cannot be told from here.
                raise CollectiveTimeoutError(
                    f"rank {rank}: the ranks did not agree on a start within {timeout_s:g} s, although each had left a word "
                    "in the store at some time: one of them, often all of a host, has not come back. Look at torchrun's "
                    "output on every host"
                )
            raise CollectiveTimeoutError(did_not_arrive(rank, "start-up", missing, world_size, timeout_s))
        time.sleep(POLL_S)
    return name


class _Proposer:
    """Rank 0's side of the agreement: propose and confirm a name."""

    def __init__(self, store: Store, world_size: int) -> None:
        self._store, self._world_size = store, world_size
        self._numbers: list[str] = []
        self._name = ""

    def decide(self) -> str | None:
        keys = [f"number/{rank}" for rank in range(self._world_size)]
        if not self._store.check(keys):
            return None
        numbers = [value.decode() for value in self._store.multi_get(keys)]
        if numbers != self._numbers:
            self._numbers, self._name = numbers, secrets.token_hex(8)
            self._store.set("proposal", json.dumps([self._name, numbers]))
        accepted = [f"accepted/{self._name}/{rank}" for rank in range(1, self._world_size)]
        if not self._store.check(accepted):
            return None
        self._store.set(f"confirmed/{self._name}", "")
        return self._name


class _Follower:
    """Side of every other rank: accept a proposal that holds its number."""

    def __init__(self, store: Store, rank: int, number: str) -> None:
        self._store, self._rank, self._number = store, rank, number

    def decide(self) -> str | None:
        if not self._store.check(["proposal"]):
            return None
        name, numbers = json.loads(self._store.get("proposal"))
        if self._rank >= len(numbers) or numbers[self._rank] != self._number:
            return None  # of an earlier start
        self._store.set(f"accepted/{name}/{self._rank}", "")
        return name if self._store.check([f"confirmed/{name}"]) else None


def gloo_problem(
    environment: Mapping[str, str],
    host: str,
    addresses: Callable[[str], Sequence[str]],
    interfaces: Callable[[], Mapping[str, Sequence[str]]],
) -> str | None:
    """Return why ranks of other hosts could not connect to Gloo on this one, and what to set; None if nothing is wrong.

    Gloo listens where this host's name leads to, or on the loopback interface if it leads nowhere.

    Args:
        addresses: those that a name leads to, the first one first; none if it leads nowhere.
        interfaces: IPv4 and IPv6 addresses of this host's interfaces.
    """
    if environment.get("GLOO_SOCKET_IFNAME"):
        return None
    host_addresses = addresses(host)
    if host_addresses and not ipaddress.ip_address(host_addresses[0]).is_loopback:
        return None
    reachable = [
        f"{name} ({', '.join(usable)})"
        for name, texts in sorted(interfaces().items())
        if (usable := [text for text in texts if not ipaddress.ip_address(text).is_loopback])
    ]
    has = ", ".join(reachable) or "none but the loopback interface"
    resolution = f"leads to {host_addresses[0]}" if host_addresses else "leads to no address"
    return (
        f"the name of this host, {host}, {resolution}, where Gloo would listen and no other host can connect. "
        f"Set GLOO_SOCKET_IFNAME to the interface that the hosts share; {host} has {has}"
    )


def addresses_of(name: str) -> list[str]:
    """Return the addresses that the system finds for a host's name, in its order."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in entries]


def interfaces_here() -> dict[str, list[str]]:
    """Return the IP addresses of this host's interfaces."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: texts for name, texts in addresses.items() if texts}
