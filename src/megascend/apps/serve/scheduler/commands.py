"""Commands that rank 0 broadcasts to all ranks, each for one model. They are pickled, and never leave the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megascend.apps.sampling.request import SampleRequest
from megascend.apps.serve.samples import RequestSamples
from megascend.config import Adam, Lora
from megascend.training.batch.loss import Loss
from megascend.training.batch.sample import Sample


# Compared by identity: samples have no equality, and two clients may send the same request.
@dataclass(frozen=True, eq=False)
class Command:
    """Base class of all commands.

    Attributes:
        number: number of the future that waits for the outcome.
        adapter: adapter name on the backend.
    """

    number: int
    adapter: str

    @property
    def tokens(self) -> int:
        return 0


@dataclass(frozen=True, eq=False)
class Create(Command):
    """Create an adapter, newly initialized or loaded from a directory.

    Attributes:
        path: directory to load from, or None.
        optimizer: load the optimizer state, too.
    """

    lora: Lora | None
    path: str | None = None
    optimizer: bool = False


@dataclass(frozen=True, eq=False)
class Load(Command):
    """Replace the adapter with the one in a directory."""

    path: str
    optimizer: bool


@dataclass(frozen=True, eq=False)
class Save(Command):
    """Write the adapter to a directory."""

    path: str
    optimizer: bool


@dataclass(frozen=True, eq=False)
class Remove(Command):
    """Remove the adapter at once, ahead of its waiting commands, which fail."""


@dataclass(frozen=True, eq=False)
class ForwardBackward(Command):
    """Accumulate gradients of a loss summed over samples.

    Attributes:
        problem: error that left no samples; it fails the optimizer step that this request belongs to.
    """

    samples: Sequence[Sample]
    loss: Loss | None
    problem: str | None = None

    @cached_property
    def tokens(self) -> int:  # type: ignore[override]
        return int(lengths_of(self.samples).sum())


@dataclass(frozen=True, eq=False)
class Forward(Command):
    """Compute log-probabilities of samples.

    Attributes:
        loss: loss to evaluate, too; then the value is an AdapterLoss.
    """

    samples: Sequence[Sample]
    loss: Loss | None = None

    @cached_property
    def tokens(self) -> int:  # type: ignore[override]
        return int(lengths_of(self.samples).sum())


def lengths_of(samples: Sequence[Sample]) -> np.ndarray:
    """Return the number of tokens of each sample, without building those of a request."""
    return (
        samples.lengths if isinstance(samples, RequestSamples) else np.array([len(sample) for sample in samples], int)
    )


@dataclass(frozen=True, eq=False)
class OptimizerStep(Command):
    """Take one optimizer step.

    Attributes:
        problem: error that prevents the step; accumulated gradients are dropped.
    """

    adam: Adam
    problem: str | None = None


@dataclass(frozen=True, eq=False)
class Respond(Command):
    """Sample responses to a prompt.

    Attributes:
        tenant: tenant that the request is scheduled for.
    """

    request: SampleRequest
    tenant: str = ""


@dataclass(frozen=True, eq=False)
class Cancel(Command):
    """Cancel the sampling request with this ``number``, at once."""


# A value and not the queue's AdapterFuture: it crosses from the ranks' thread to the event loop, and also comes from vLLM.
@dataclass(frozen=True)
class Outcome:
    """The result of a command: a value or an error.

    Attributes:
        batch_adapters: number of adapters in the batch that it ran in; 0 if it ran in none.
        wait_units: units of work between becoming the first command of its model and running; None if not counted.
        wait_seconds: the same in seconds of rank 0's clock.
    """

    number: int
    value: Any = None
    error: Exception | None = None
    batch_adapters: int = 0
    wait_units: int | None = None
    wait_seconds: float = 0.0
