"""Cache of NCCL and HCCL communicators across updates: creating one takes longer than sending a model over it.

A group serves one update, and so does a transport. Its communicator is cached, one for each kind and device, and reused
when the next group has the same processes at the same ranks. All members must have cached the same one, and have started
as many broadcasts on it; otherwise, as after any failure, a new one is created.
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
    """A connected communicator.

    Attributes:
        handle: the library's object.
        members: its processes, by rank.
        made_in: name of the group that created it; names are used once.
        broadcasts: number started on it by this process.
    """

    handle: Any
    members: tuple[str, ...]
    made_in: str
    broadcasts: int = 0

    @property
    def state(self) -> str:
        """Return a key that is equal on all members if they can reuse the communicator."""
        return f"{self.made_in} {self.broadcasts}"


class Communicators:
    """Communicators of one kind that this process has cached.

    Args:
        make: connects the members of a group; called on all of them.
        end: destroys a communicator that is idle or has failed, without the other members.
    """

    def __init__(self, name: str, make: Callable[[Setup], Any], end: Callable[[Any], None]) -> None:
        self._name, self._make, self._end = name, make, end
        self._cached: dict[str, Communicator] = {}
        self._lock = threading.Lock()

    def connect(self, setup: Setup) -> Communicator:
        """Return a communicator for a group: the one that all of its members have cached, or a new one."""
        members = tuple(map(repr, setup.group.identities))
        with self._lock:
            # Taken out while it is in use: two updates of one process must not share a communicator.
            cached = self._cached.pop(str(setup.device), None)
        # Engines were restarted, or others take part.
        if cached is not None and cached.members != members:
            self._end(cached.handle)
            cached = None
        shared = False
        try:
            shared = self._all_have(cached, setup)
        finally:
            # Whatever ended the exchange: a communicator that one member has given up cannot be used by the others.
            if cached is not None and not shared:
                self._end(cached.handle)
        if cached is not None and shared:
            return cached
        return Communicator(self._make(setup), members, setup.group.name)

    def keep(self, communicator: Communicator, device: Any) -> None:
        """Cache a communicator whose broadcasts have all succeeded."""
        with self._lock:
            before = self._cached.pop(str(device), None)
            self._cached[str(device)] = communicator
        if before is not None:
            self._end(before.handle)

    def discard(self, communicator: Communicator) -> None:
        """Destroy a communicator."""
        self._end(communicator.handle)

    def end_all(self) -> None:
        """Destroy all cached communicators."""
        with self._lock:
            cached = list(self._cached.values())
            self._cached.clear()
        for communicator in cached:
            self._end(communicator.handle)

    def _all_have(self, cached: Communicator | None, setup: Setup) -> bool:
        """Exchange what the members have cached, also if this one has nothing: the others wait for its report."""
        group = setup.group
        store = group.store("communicator", setup.timeout_s)
        keys = [str(rank) for rank in range(group.size)]
        # The number of broadcasts is a part of the state: a member that missed one would receive everything shifted.
        store.set(keys[group.rank], "none" if cached is None else cached.state)
        failure = f"{self._name}: not all members have reported their communicators"
        wait_until(lambda: store.check(keys), group, setup.timeout_s, failure)
        states = {store.get(key).decode() for key in keys}
        return cached is not None and states == {cached.state}
