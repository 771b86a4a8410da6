"""Where the time until a run's first step goes: on the clock, and of this process's processors."""

from __future__ import annotations

import time

import psutil


class StartPhases:
    """The phases between the start of this process and the first step, one after the other.

    Attributes:
        seconds: of each phase that has ended, on the clock.
        processor_s: user and system time of this process's threads in it; what is missing to ``seconds`` was waited for.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.processor_s: dict[str, float] = {}
        # Two clocks: that of the system knows when the process began, and may be set while it runs.
        self._since = time.monotonic() - (time.time() - psutil.Process().create_time())
        self._since_processor = 0.0

    def ended(self, name: str) -> None:
        """A phase has lasted from the end of the one before until now."""
        now, processor = time.monotonic(), time.process_time()
        self.seconds[name] = now - self._since
        self.processor_s[name] = processor - self._since_processor
        self._since, self._since_processor = now, processor

    def set_apart(self, name: str, part_of: str, seconds: float) -> None:
        """``seconds`` of phase ``part_of``, spent waiting, are a phase of their own."""
        self.seconds[part_of] -= seconds
        self.seconds[name] = seconds
        self.processor_s[name] = 0.0

    def record(self) -> dict[str, dict[str, float]]:
        """For a log."""
        names = {"seconds": self.seconds, "processor_s": self.processor_s}
        return {name: {phase: round(value, 3) for phase, value in values.items()} for name, values in names.items()}

    def __str__(self) -> str:
        """``14.2 s: Python 0.3, torch 3.2, ...``; phases of less than 0.1 s are left out."""
        parts = [f"{name} {value:.1f}" for name, value in self.seconds.items() if value >= 0.05]
        return f"{sum(self.seconds.values()):.1f} s: {', '.join(parts)}"
