"""Figures of supervised runs: of each step, and their totals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from megascend.apps.train.run_log import EMPTY, MetricsRecord
from megascend.config import RunConfig
from megascend.training.batch.metrics import Metric


@dataclass
class TrainCounts:
    """Totals of a run, including the steps before it was resumed.

    Attributes:
        tokens: input tokens of all ranks.
        skipped: steps that all ranks skipped.
        seconds: time spent in steps, on this rank.
        validation_loss: the last one that was measured.
        best_value, best_step: the best value of ``validation.metric`` so far, and its step; None before the first measurement.
        stale: measurements since then.
        measure: digest of what the best value depends on; None without a metric, or in a checkpoint of an earlier version.
        measurement_due: a signal stopped what was to be measured after the last step.
    """

    tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    validation_loss: float | None = None
    best_value: float | None = None
    best_step: int | None = None
    stale: int = 0
    measure: str | None = None
    measurement_due: bool = False

    def add_measurement(self, value: float, *, step: int, min_delta: float, higher_is_better: bool = False) -> None:
        """Record a value of ``validation.metric``. One that is not finite is no improvement."""
        sign = -1 if higher_is_better else 1
        if math.isfinite(value) and (self.best_value is None or sign * (value - self.best_value) < -min_delta):
            self.best_value, self.best_step, self.stale = value, step, 0
        else:
            self.stale += 1


@dataclass(frozen=True)
class StepRecord(MetricsRecord):
    """A step of supervised training. ``loss`` and ``grad_norm`` are null where they are not finite.

    Attributes:
        metrics: further metrics of the loss, by name, and ``validation_NAME`` of those measured on held-out pairs;
            ``LOSS_METRICS`` declares those of built-in losses.
    """

    loss: Annotated[
        float, Metric("nats", "mean loss per trained token (of preference losses: per pair or labelled sample)")
    ]
    grad_norm: Annotated[float, Metric("", "global gradient norm before clipping")]
    lr: Annotated[float, Metric("", "learning rate of the update")]
    tokens: Annotated[int, Metric("tokens", "tokens of the step that carry loss, over all ranks")]
    total_tokens: Annotated[int, Metric("tokens", "input tokens of the step, over all ranks")]
    tokens_per_s: Annotated[float, Metric("tokens/s", "total_tokens divided by step_seconds")]
    epoch: Annotated[float, Metric("epochs", "passes over the data after this step")]
    peak_memory_bytes: Annotated[
        int, Metric("bytes", "peak device memory of rank 0 since the run began; 0 if the platform does not report it")
    ]
    step_seconds: Annotated[float, Metric("s", "duration of the step on rank 0")]
    dispatch_seconds: Annotated[
        float,
        Metric(
            "s",
            "part of step_seconds in which rank 0 issued the forward and backward passes. On a GPU or NPU, a "
            "value near step_seconds means that the device waits for Python; on a CPU it is the work itself",
        ),
    ]
    mfu: Annotated[
        float | None,
        Metric(
            "", "model FLOPs utilisation: model FLOP/s divided by the devices' bf16 peak; null if either is unknown"
        ),
    ] = None
    shared_tokens: Annotated[
        int, Metric("tokens", "of total_tokens, those of prefixes that were computed once for several samples")
    ] = 0
    validation_loss: Annotated[
        float | None, Metric("as loss", "loss on the held-out samples after the step; null where it was not measured")
    ] = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    at_intervals = ("validation_loss",)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values, with each of ``metrics`` under its own name."""
        values = super().to_dict()
        return values | values.pop("metrics")

    def progress(self) -> str:
        return f"epoch {self.epoch:.2f}  "

    def summary(self, earlier: Mapping[str, tuple[int, float]] = EMPTY) -> str:
        figures = [
            f"loss {self.loss:.4f}",
            f"accuracy {self.metrics['accuracy']:.3f}" if "accuracy" in self.metrics else "",
            self.last_measured("validation_loss", "validation", 4, earlier),
            f"grad norm {self.grad_norm:.3f}",
            f"{self.tokens_per_s:,.0f} tokens/s",
            "" if self.mfu is None else f"MFU {self.mfu:.1%}",
            "SKIPPED" if self.skipped else "",
        ]
        return "  ".join(filter(None, figures))


def end_line(config: RunConfig, counts: TrainCounts, steps: int | None = None) -> str:
    """Return a one-line summary of the run.

    Args:
        steps: the last step; default: all of them are done.
    """
    skipped = f", {counts.skipped} of them skipped (non-finite gradients)" if counts.skipped else ""
    validated = f", validation loss {counts.validation_loss:.4f}" if counts.validation_loss is not None else ""
    steps, early = config.steps if steps is None else steps, ""
    if steps < config.steps and counts.best_value is not None:
        metric = "loss" if config.validation is None else config.validation.metric
        measured = "validation losses" if metric == "loss" else f"measurements of {metric}"
        early = (
            f" (of {config.steps}: the last {counts.stale} {measured} were no improvement on step {counts.best_step}'s "
            f"{counts.best_value:.4f})"
        )
    length = f"{steps} step{'s' if steps != 1 else ''}{early} in {counts.seconds:.0f} s"
    return f"{length}{skipped}, last loss {counts.loss:.4f}{validated}; see {config.output}"
