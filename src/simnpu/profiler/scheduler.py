"""Which steps are recorded: ``torch_npu.profiler.schedule``, the same cycle as ``torch.profiler.schedule``."""

from __future__ import annotations

from torch.profiler import ProfilerAction
from torch.profiler import schedule as torch_schedule

__all__ = ["ProfilerAction", "Schedule"]


class Schedule:
    """Skip ``skip_first`` steps; then ``wait``, ``warmup`` and ``active`` steps, ``repeat`` times (0: for ever).

    Raises:
        ValueError: a number is negative, or ``active`` is 0.
    """

    def __init__(
        self, wait: int, active: int, warmup: int = 0, repeat: int = 0, skip_first: int = 0, skip_first_wait: int = 0
    ) -> None:
        counts = {
            "wait": wait,
            "active": active,
            "warmup": warmup,
            "repeat": repeat,
            "skip_first": skip_first,
            "skip_first_wait": skip_first_wait,
        }
        for name, value in counts.items():
            if not isinstance(value, int) or value < (name == "active"):
                least = int(name == "active")
                raise ValueError(f"torch_npu.profiler.schedule: {name} must be {least} or more, found {value!r}")
        self.wait, self.active, self.warmup = wait, active, warmup
        self.repeat, self.skip_first, self.skip_first_wait = repeat, skip_first, skip_first_wait
        self._cycle = torch_schedule(**counts)

    def __call__(self, step: int) -> ProfilerAction:
        return self._cycle(step)
