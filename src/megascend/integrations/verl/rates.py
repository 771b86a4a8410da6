"""verl's learning rate scheduler, without the optimizer that it usually writes into."""

from __future__ import annotations

from typing import Any

from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler


class Rates:
    """The learning rate of each step, by Megatron-Core's scheduler with verl's settings.

    Attributes:
        steps: how often it has advanced.
    """

    def __init__(self, optimizer_config: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0, "weight_decay": 0.0}]  # what the scheduler writes into
        self.steps = 0
        self._scheduler = get_megatron_optimizer_param_scheduler(self, optimizer_config)

    @property
    def now(self) -> float:
        """Learning rate of the next step."""
        return float(self.param_groups[0]["lr"])

    def advance(self, steps: int = 1) -> float:
        """Go on by ``steps``; the rate then."""
        self._scheduler.step(steps)
        self.steps += steps
        return self.now
