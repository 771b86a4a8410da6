"""FullModel: training of all of a model's own parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megascend.config import Adam
from megascend.errors import ConfigError, DataError
from megascend.training.batch.micro_batch import MicroBatch
from megascend.training.batch.results import StepResult
from megascend.training.batch.sample import Sample


class ModelOptimizer(Protocol):
    """An engine's optimizer of the model's own parameters."""

    skipped_in_a_row: int

    def step(self, number: int, reduced: bool, lr: float | None) -> StepResult:
        """Update all parameters, or none; then clear the gradients. Collective.

        Args:
            number: previous steps, the position in the schedule.
            reduced: the gradients have already been summed over data parallel ranks.
            lr: learning rate of this step, in place of the schedule's.
        """
        ...

    def discard(self) -> None:
        """Drop all gradients, and the statistics accumulated with them."""
        ...

    def counters(self) -> dict[str, Any]:
        """Return the optimizer's state other than tensors, JSON."""
        ...

    def restore(self, counters: dict[str, Any]) -> None:
        """Restore :meth:`counters`, after moments have been loaded."""
        ...


class FullModel:
    """All of a model's own parameters as the :class:`megascend.engines.base.Trainable`.

    Args:
        optimizer: optimizer of the parameters.
        reduces_while_running: forward_backward already sums gradients over data parallel ranks.
    """

    frozen = False
    adapters: Mapping[str, Any] = MappingProxyType({})
    projections: Sequence[str] = ()

    def __init__(self, optimizer: ModelOptimizer, *, reduces_while_running: bool = False) -> None:
        self.step_count = 0
        self._optimizer, self._reduces = optimizer, reduces_while_running
        self._accumulated = False

    def describe(self) -> str:
        return ""

    def require_open(self) -> None:
        if self._accumulated and self._reduces:
            raise ConfigError(
                "forward_backward was called twice before optimizer_step, with optimizer.overlap_grad_reduce: true; pass all "
                "samples in one call, or set it to false"
            )

    def names(self, samples: Sequence[Sample], default: str | None, *, training: bool) -> list[str]:
        for index, sample in enumerate(samples):
            if name := sample.adapter or default:
                raise DataError(
                    f"sample {index} is for adapter {name!r}, but this backend trains the model itself; construct it with "
                    "adapters=megascend.Adapters()"
                )
        return [""] * len(samples)

    def prepare(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> None:
        pass

    def applying(self, names: Sequence[str]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def loss_scales(self, names: Sequence[str]) -> list[float]:
        return [1.0] * len(names)

    def collect(self) -> None:
        self._accumulated = True

    def abandon(self) -> None:
        self._optimizer.discard()  # gradients of the micro batches before the failed one
        self._accumulated = False

    def choose(self, names: str | Sequence[str] | None) -> list[str]:
        if names is not None:
            raise ConfigError("optimizer_step(adapters=...): this backend trains the model itself")
        # A step without gradients would still decay the weights and age Adam's moments.
        if not self._accumulated:
            raise ConfigError("optimizer_step: the model has no gradients; call forward_backward first")
        return [""]

    def step(
        self, names: Sequence[str], adam: Mapping[str, Adam] | None = None, *, lr: float | None = None
    ) -> StepResult:
        assert not adam, "settings of a step are by adapter, and this model has none"
        self._accumulated = False
        result = self._optimizer.step(self.step_count, self._reduces, lr)
        self.step_count += 1
        return result

    def with_gradients(self) -> list[str]:
        return [""] if self._accumulated else []

    def counters(self) -> dict[str, Any]:
        return self._optimizer.counters()

    def restore(self, step: int, counters: dict[str, Any] | None) -> None:
        assert counters is not None
        self._optimizer.restore(counters)
        # Gradients from before the load do not belong to the loaded parameters.
        self._optimizer.discard()
        self.step_count, self._accumulated = step, False

    def saved_adapters(self) -> dict[str, Any]:
        return {}

    def load_adapters(self, directories: Mapping[str, Path]) -> None:
        assert not directories, "the manifest was checked: a checkpoint of a model has no adapters"
