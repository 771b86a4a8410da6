"""The time from the start of a process to the first step of a run."""

from __future__ import annotations

import time

import psutil


class StartPhases:
    """Durations of the consecutive phases from the start of this process to the first step.

    Attributes:
        seconds: wall-clock duration of each completed phase.
        processor_s: user and system time of this process's threads in it; for the rest of ``seconds`` the process waited.
    """

    def __init__(self) -> None:
        """Begin with the start of the process: phase ``Python`` ends here."""
        self.seconds: dict[str, float] = {}
        self.processor_s: dict[str, float] = {}
        # Two clocks: only the system clock has the start of the process, but it may be adjusted later.
        self._since = time.monotonic() - (time.time() - psutil.Process().create_time())
        self._since_processor = 0.0
        self.end("Python")

    def end(self, name: str) -> None:
        """End the phase that has lasted since the one before."""
        now, processor = time.monotonic(), time.process_time()
        self.seconds[name] = now - self._since
        self.processor_s[name] = processor - self._since_processor
        self._since, self._since_processor = now, processor

    def split_off(self, name: str, part_of: str, seconds: float) -> None:
        """Move ``seconds`` that phase ``part_of`` spent waiting to a separate phase."""
        self.seconds[part_of] -= seconds
        self.seconds[name] = seconds
        self.processor_s[name] = 0.0

    def record(self) -> dict[str, dict[str, float]]:
        names = {"seconds": self.seconds, "processor_s": self.processor_s}
        return {name: {phase: round(value, 3) for phase, value in values.items()} for name, values in names.items()}

    def __str__(self) -> str:
        """Return ``14.2 s: Python 0.3, torch 3.2, ...``; phases of less than 0.1 s are left out."""
        parts = [f"{name} {value:.1f}" for name, value in self.seconds.items() if value >= 0.05]
        return f"{sum(self.seconds.values()):.1f} s: {', '.join(parts)}"
