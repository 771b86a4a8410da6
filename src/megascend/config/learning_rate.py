"""Learning rates as a pure function of the step."""

from __future__ import annotations

import math

from megascend.config import Schedule
from megascend.errors import ConfigError


def learning_rate(schedule: Schedule, peak: float, step: int) -> float:
    """Learning rate of optimizer step ``step`` (the first is 0).

    Warm-up is linear: step ``s`` of ``w`` warm-up steps has ``peak * (s + 1) / w``. After it, ``linear`` and ``cosine``
    go from ``peak`` to ``min_lr``, reached at ``total_steps``, and stay there.

    Raises:
        ConfigError: the schedule needs an end and names none.
    """
    if schedule.kind != "constant" and not schedule.total_steps:
        raise ConfigError(f"schedule {schedule.kind} needs total_steps, the step at which it reaches min_lr")
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    progress = min(1.0, (step - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps))
    remaining = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return schedule.min_lr + (peak - schedule.min_lr) * remaining
