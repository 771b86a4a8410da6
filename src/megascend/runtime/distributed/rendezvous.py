"""Rendezvous of the ranks in the store, before there is a process group.

torchrun counts restarts on each host separately: a replaced host begins at 0, and a host whose ranks did not fail does not count.
The store may outlive the ranks. With several hosts the count therefore cannot identify a start, and the ranks agree on a name for
it instead, which prefixes their keys.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from megascend.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_S = 0.05
"""Seconds between two reads of the store while ranks agree."""
BRANCHES = 32
"""Branches of a node of the tree in which ranks are counted."""


class Arrivals:
    """Ranks that have announced themselves in the store, counted in a tree, so that no rank has to query every other one."""

    def __init__(self, store: Store, name: str, world_size: int) -> None:
        self._store, self._name, self._world_size = store, name, world_size
        spans = [1]
        while spans[-1] < world_size:
            spans.append(BRANCHES * spans[-1])
        self._spans = spans

    def announce(self, rank: int) -> None:
        """Count ``rank``, once."""
        if self._store.add(self._key(1, rank), 1) == 1:
            for span in self._spans[1:]:
                self._store.add(self._key(span, rank), 1)

    def count(self) -> int:
        """Return how many ranks have announced themselves."""
        return min(self._store.add(self._key(self._spans[-1], 0), 0), self._world_size)

    def missing(self) -> list[int]:
        """Return the ranks that have not announced themselves; takes a few requests for each of them, and few for all others."""
        return self._missing(0, len(self._spans) - 1)

    def _missing(self, first: int, level: int) -> list[int]:
        """Return the missing ones of the ``self._spans[level]`` ranks from ``first``."""
        ranks = range(first, min(first + self._spans[level], self._world_size))
        if self._store.add(self._key(self._spans[level], first), 0) >= len(ranks):
            return []
        if level == 0:
            return [first]
        parts = range(first, ranks.stop, self._spans[level - 1])
        return [rank for start in parts for rank in self._missing(start, level - 1)]

    def _key(self, span: int, rank: int) -> str:
        return f"{self._name}/{span}/{rank // span}"


def wait_for_all(store: Store, rank: int, world_size: int, timeout_s: float) -> list[int]:
    """Announce ``rank`` in the store, and wait for the others.

    Returns:
        The ranks that did not arrive within ``timeout_s``.
    """
    arrivals = Arrivals(store, "started", world_size)
    arrivals.announce(rank)
    deadline = time.monotonic() + timeout_s
    # Polling, because torch prints two warnings whenever Store.wait() times out.
    pause_s, longest_s = 0.002, _pause(world_size)
    while arrivals.count() < world_size:
        if time.monotonic() >= deadline:
            return arrivals.missing()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)
    return []


def _pause(world_size: int) -> float:
    """Return the seconds between two reads of a waiting rank, which bound the load of the store's server."""
    return max(POLL_S, world_size / 20_000)


def did_not_arrive(rank: int, label: str, missing: Sequence[int], expected: int, timeout_s: float) -> str:
    """Build the message of an error about ranks that did not arrive."""
    names = ", ".join(str(number) for number in missing)
    return (
        f"rank {rank}: {len(missing)} of {expected} ranks did not arrive at {label} within {timeout_s:g} s: "
        f"{'rank' if len(missing) == 1 else 'ranks'} {names}. Look at the first error in their logs; if they are only "
        "slow, raise timeout_s"
    )


def agree_on_start(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """Return a name for this start, the same on all ranks and different from that of any earlier start. Collective.

    Every rank stores a random number. Rank 0 proposes a name to each, together with the number it has read; a rank accepts a
    proposal that has its number; rank 0 confirms the name when all have accepted. A proposal with a number left over from an
    earlier start is never accepted by all, and is replaced as soon as the new number is stored.
    """
    number = secrets.token_hex(8)
    store.set(f"number/{rank}", number)
    arrivals = Arrivals(store, "numbered", world_size)
    arrivals.announce(rank)
    deadline = time.monotonic() + timeout_s
    decide = _Proposer(store, world_size).decide if rank == 0 else _Follower(store, rank, number).decide
    while (name := decide()) is None:
        if time.monotonic() >= deadline:
            missing = arrivals.missing()
            if not missing:
                # Every rank has a number, but some are of an earlier start, and this rank cannot know which.
                raise CollectiveTimeoutError(
                    f"rank {rank}: the ranks did not agree on a start within {timeout_s:g} s: a rank or host has not restarted; "
                    "look at torchrun's output on every host"
                )
            raise CollectiveTimeoutError(did_not_arrive(rank, "start-up", missing, world_size, timeout_s))
        time.sleep(_pause(world_size))
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
        # A rank has replaced the number of an earlier start: the old proposal can no longer be accepted by all.
        if numbers != self._numbers:
            self._numbers, self._name = numbers, secrets.token_hex(8)
            # One for each rank: a proposal for all would hold n numbers, and be read n times.
            self._store.multi_set(  # type: ignore[reportAttributeAccessIssue]  torch's stub lacks it
                [f"proposal/{rank}" for rank in range(self._world_size)],
                [f"{self._name} {number}" for number in numbers],
            )
        accepted = [f"accepted/{self._name}/{rank}" for rank in range(1, self._world_size)]
        if not self._store.check(accepted):
            return None
        self._store.set(f"confirmed/{self._name}", "")
        return self._name


class _Follower:
    """Every other rank's side of the agreement: accept a proposal that has its number."""

    def __init__(self, store: Store, rank: int, number: str) -> None:
        self._store, self._rank, self._number = store, rank, number

    def decide(self) -> str | None:
        proposal = f"proposal/{self._rank}"
        if not self._store.check([proposal]):
            return None
        name, number = self._store.get(proposal).decode().split()
        if number != self._number:
            return None  # the proposal is of an earlier start
        self._store.set(f"accepted/{name}/{self._rank}", "")
        return name if self._store.check([f"confirmed/{name}"]) else None


def gloo_problem(
    environment: Mapping[str, str],
    host: str,
    addresses: Callable[[str], Sequence[str]],
    interfaces: Callable[[], Mapping[str, Sequence[str]]],
) -> str | None:
    """Return why ranks on other hosts could not connect to Gloo on this one, and the setting to change; None if they can.

    Gloo listens on the first address that this host's name resolves to, or on the loopback interface if it does not resolve.
    """
    if environment.get("GLOO_SOCKET_IFNAME"):
        return None
    # Debian and Ubuntu map the host's own name to 127.0.1.1 in /etc/hosts, where Gloo would then listen.
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
    """Return the addresses that the system resolves a host's name to, in its order."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    # Without the scope of an IPv6 link-local address: fe80::1%eth0.
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
