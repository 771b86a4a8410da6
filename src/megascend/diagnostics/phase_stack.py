"""A thread's position: the phases that it has entered and not left, and its current line of Python."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Protocol


class PhaseOwner(Protocol):
    """Observer of phases; implemented by :class:`megascend.diagnostics.hang_monitor.HangMonitor`."""

    def enter(self, phase: Phase, *, skippable: bool) -> bool:
        """Enter ``phase`` on this thread; return True if its body is to be skipped."""
        ...

    def leave(self, phase: Phase, error: BaseException | None) -> None:
        """Leave ``phase`` on this thread; ``error`` is the exception that left it, if any."""
        ...


class Phase:
    """A named activity of a thread: a context manager.

    Attributes:
        name: identifier.
        label: name used in messages.
        since: time of entry (``time.monotonic``).
        entered: generation of its thread's stack at entry.
    """

    # Phases are created in every micro batch.
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
    """The phases that one thread is in.

    Attributes:
        thread: identifier of the thread.
        phases: the phases entered and not left, the outermost first.
        generation: counter of entries and exits; it changes whenever the thread makes progress.
        since: time of the last entry or exit (``time.monotonic``).
        last: label of the phase that was left last.
    """

    thread: int
    phases: list[Phase] = field(default_factory=list)
    generation: int = 0
    since: float = 0.0
    last: str = "start-up"

    def line(self) -> tuple[str, bool]:
        """Return the thread's innermost Python frame and whether it waits for other ranks there."""
        # The only way to another thread's frames. They may be stale by the time they are read, which is fine for a message.
        frame = sys._current_frames().get(self.thread)
        if frame is None:
            return "", False
        code = frame.f_code
        text = f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
        outer: FrameType | None = frame
        # torch.distributed wraps a collective in a few frames (logging, timing); deeper callers are not the wait itself.
        for _ in range(6):
            if outer is None:
                break
            if "/torch/distributed/" in outer.f_code.co_filename:
                return text, True
            outer = outer.f_back
        # Megatron itself waits on the handles of asynchronous collectives, outside torch.distributed's files.
        return text, ".wait(" in linecache.getline(code.co_filename, frame.f_lineno)
