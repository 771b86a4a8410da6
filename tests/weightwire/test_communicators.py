"""A communicator serves the next update if all members can reuse it; otherwise all create a new one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from wire_members import next_group, run_meeting

from weightwire.errors import DeadlineError
from weightwire.manifest import Manifest, TensorSpec
from weightwire.transports import Setup
from weightwire.transports.communicators import Communicators

MANIFEST = Manifest(1, (TensorSpec("a", "uint8", (1000,)),))


class Library:
    """Communicator library that counts creations and ends; a handle is a number."""

    def __init__(self) -> None:
        self.count, self.ended = 0, []
        self.communicators = Communicators("library", self.make, self.ended.append)

    def make(self, setup: Setup) -> int:
        self.count += 1
        return self.count

    def connect(self, group: Any, device: str = "cpu") -> Any:
        return self.communicators.connect(Setup(group, MANIFEST, torch.device(device), 20.0))


def test_communicator_is_reused_by_all_members_or_by_none() -> None:
    def on_member(meet: Any) -> list[Any]:
        library, group = Library(), meet()
        handles = []
        for case in ("first", "again", "again", "out of step", "one was lost", "again"):
            communicator = library.connect(group)
            handles.append((case, communicator.handle))
            communicator.broadcasts += 5
            if case == "again" and len(handles) == 3 and group.rank == 1:
                communicator.broadcasts += 1  # one broadcast that the others have not begun
            if case == "out of step" and group.rank == 2:
                library.communicators.discard(communicator)
            else:
                library.communicators.keep(communicator, torch.device("cpu"))
            following = next_group(group)
            group.close()
            group = following
        group.close()
        return [*handles, library.ended]

    cases = [("first", 1), ("again", 1), ("again", 1), ("out of step", 2), ("one was lost", 3), ("again", 3), [1, 2]]
    assert run_meeting(on_member, 3) == [cases] * 3


def test_devices_and_processes_have_separate_communicators() -> None:
    def on_member(meet: Any) -> list[int]:
        library, group = Library(), meet()
        second = next_group(group)
        first, other = library.connect(group), library.connect(second, "meta")
        library.communicators.keep(first, torch.device("cpu"))
        library.communicators.keep(other, torch.device("meta"))
        first.members = ("a process that has ended", *first.members[1:])
        third = next_group(second)
        last = library.connect(third).handle
        library.communicators.end_all()
        return [first.handle, other.handle, last, *library.ended]

    assert run_meeting(on_member, 2) == [[1, 2, 3, 1, 2]] * 2


def test_communicator_is_ended_when_members_do_not_answer() -> None:
    def on_member(meet: Any) -> list[Any]:
        library, group = Library(), meet()
        library.communicators.keep(library.connect(group), torch.device("cpu"))
        second = next_group(group)
        if group.rank == 0:
            with pytest.raises(DeadlineError, match="waiting for 'communicator' from receiver 1"):
                library.communicators.connect(Setup(second, MANIFEST, torch.device("cpu"), 1.5))
            group.store("over", 20.0).set("over", "1")
        else:
            group.store("over", 20.0).wait(["over"])  # rank 0 must time out on a silent member, not lose a closed one
        return library.ended

    assert run_meeting(on_member, 2) == [[1], []]
