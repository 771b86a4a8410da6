"""Where a thread is: the phases that it has entered and not left, and the line of Python that it stands at."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Protocol


class PhaseOwner(Protocol):
    """What is told of phases; :class:`megascend.diagnostics.hang_monitor.HangMonitor` is one."""

    def enter(self, phase: Phase, *, skippable: bool) -> bool:
        """Enter ``phase`` on this thread; return True if its body is to be skipped."""
        ...

    def leave(self, phase: Phase, error: BaseException | None) -> None:
        """Leave ``phase`` on this thread, with ``error`` or well."""
        ...


class Phase:
    """What a thread does for a while: a context manager.

    Attributes:
        name: what it is known by.
        label: what messages call it.
        since: when it was entered (``time.monotonic``).
        entered: generation of its thread's stack from its entry on.
    """

    __slots__ = ("_owner", "entered", "label", "name", "since")

    def __init__(self, owner: PhaseOwner, name: str, label: str) -> None:
        self._owner, self.name, self.label = owner, name, label
        self.since, self.entered = 0.0, 0

    def __enter__(self) -> None:
        self._owner.enter(self, skippable=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.leave(self, error)


@dataclass
class PhaseStack:
    """Where one thread is.

    Attributes:
        thread: its identifier.
        phases: those it is in, the outermost first.
        generation: counts entries and exits: it differs whenever the thread has moved on.
        since: when it last moved on (``time.monotonic``).
        last: label of the phase that it left last.
    """

    thread: int
    phases: list[Phase] = field(default_factory=list)
    generation: int = 0
    since: float = 0.0
    last: str = "start-up"

    def line(self) -> tuple[str, bool]:
        """Return the thread's innermost Python frame, and whether it waits for other ranks there."""
        frame = sys._current_frames().get(self.thread)
        if frame is None:
            return "", False
        code = frame.f_code
        text = f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
        outer: FrameType | None = frame
        for _ in range(6):
            if outer is None:
                break
            if "/torch/distributed/" in outer.f_code.co_filename:
                return text, True
            outer = outer.f_back
        # Megatron waits for the handles of asynchronous collectives itself.
        return text, ".wait(" in linecache.getline(code.co_filename, frame.f_lineno)
