"""Communicators of NCCL and HCCL outlive an update: making one takes longer than sending a model over it.

A group is of one update, and so is a transport. What the transport has connected is kept, one communicator for each
kind and device, and used again when the next group has the same processes in the same places. All of its members must
have kept the same one, and have begun as many broadcasts on it; otherwise, as after any failure, a new one is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weightwire.transports.base import Setup
from weightwire.transports.device_work import wait_until


@dataclass
class Communicator:
    """Something connected.

    Attributes:
        handle: the library's.
        members: who is connected, by rank.
        made_in: name of the group that made it; names are used once.
        broadcasts: how many have begun on it here.
    """

    handle: Any
    members: tuple[str, ...]
    made_in: str
    broadcasts: int = 0

    @property
    def state(self) -> str:
        """Equal on all members that can go on with it."""
        return f"{self.made_in} {self.broadcasts}"


class Communicators:
    """Those of one kind that this process keeps.

    Args:
        make: connects the members of a group; called on all of them.
        end: takes one apart on which nothing is under way, or which has failed, without other members.
    """

    def __init__(self, name: str, make: Callable[[Setup], Any], end: Callable[[Any], None]) -> None:
        self._name, self._make, self._end = name, make, end
        self._kept: dict[str, Communicator] = {}
        self._lock = threading.Lock()

    def connect(self, setup: Setup) -> Communicator:
        """The communicator for a group: the one that all of its members have kept, or a new one.

        Raises:
            DeadlineError, PeerLostError: members did not say what they have kept.
        """
        members = tuple(map(repr, setup.group.identities))
        with self._lock:
            kept = self._kept.pop(str(setup.device), None)
        if kept is not None and kept.members != members:
            self._end(kept.handle)
            kept = None
        shared = False
        try:
            shared = self._others_have(kept, setup)
        finally:
            if kept is not None and not shared:
                self._end(kept.handle)
        if kept is not None and shared:
            return kept
        return Communicator(self._make(setup), members, setup.group.name)

    def keep(self, communicator: Communicator, device: Any) -> None:
        """Put one aside whose broadcasts have all ended well."""
        with self._lock:
            before = self._kept.pop(str(device), None)
            self._kept[str(device)] = communicator
        if before is not None:
            self._end(before.handle)

    def discard(self, communicator: Communicator) -> None:
        """Take one apart."""
        self._end(communicator.handle)

    def end_all(self) -> None:
        """Take apart what is kept."""
        with self._lock:
            kept = list(self._kept.values())
            self._kept.clear()
        for communicator in kept:
            self._end(communicator.handle)

    def _others_have(self, kept: Communicator | None, setup: Setup) -> bool:
        group = setup.group
        store = group.store("communicator", setup.timeout_s)
        keys = [str(rank) for rank in range(group.size)]
        store.set(keys[group.rank], "none" if kept is None else kept.state)
        what = f"{self._name}: not all members have said what they are connected by"
        wait_until(lambda: store.check(keys), group, setup.timeout_s, what)
        return {store.get(key).decode() for key in keys} == ({"none"} if kept is None else {kept.state}) != {"none"}
