"""What rank 0 tells all ranks to do for one model. Commands travel between the ranks of the job only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megascend.batch.losses import Loss
from megascend.batch.sample import Sample
from megascend.config import Adam, Lora
from megascend.sampling.request import SampleRequest


@dataclass(frozen=True, eq=False)
class Command:
    """Base of all.

    Attributes:
        number: of the future that waits for the outcome.
        adapter: name of the model's adapter on the backend.
    """

    number: int
    adapter: str

    @property
    def tokens(self) -> int:
        """Input tokens that the model will read."""
        return 0


@dataclass(frozen=True, eq=False)
class Create(Command):
    """A new adapter, from nothing or from a directory.

    Attributes:
        path: where to load it from.
        optimizer: load the optimizer's state, too.
    """

    lora: Lora | None
    path: str | None = None
    optimizer: bool = False


@dataclass(frozen=True, eq=False)
class Load(Command):
    """Put what a directory holds in the adapter's place."""

    path: str
    optimizer: bool


@dataclass(frozen=True, eq=False)
class Save(Command):
    """Write the adapter to a directory."""

    path: str
    optimizer: bool


@dataclass(frozen=True, eq=False)
class Remove(Command):
    """Forget the adapter. What of it still waits fails; it needs no turn."""


@dataclass(frozen=True, eq=False)
class ForwardBackward(Command):
    """Gradients of a sum over samples.

    Attributes:
        problem: why there are no samples; the step that this request belongs to fails then.
    """

    samples: Sequence[Sample]
    loss: Loss | None
    problem: str | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.samples))


@dataclass(frozen=True, eq=False)
class Forward(Command):
    """Log-probabilities of samples."""

    samples: Sequence[Sample]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.samples))


@dataclass(frozen=True, eq=False)
class OptimizerStep(Command):
    """One step with settings of its own.

    Attributes:
        problem: why it is not made; what the model has accumulated is dropped then.
    """

    adam: Adam
    problem: str | None = None


@dataclass(frozen=True, eq=False)
class Respond(Command):
    """Responses to a prompt.

    Attributes:
        tenant: whose turn it takes.
    """

    request: SampleRequest
    tenant: str = ""


@dataclass(frozen=True, eq=False)
class Cancel(Command):
    """Nobody waits any more for the request to sample of this ``number``. It needs no turn."""


@dataclass(frozen=True)
class Outcome:
    """What became of a command: a value, or an error.

    Attributes:
        together: how many adapters were in the batch that it ran in; 0 if it ran in none.
        waited: units of work that ran after it was the first of its model and before its own; None if that was not counted.
        waited_s: seconds of that time, of rank 0's clock.
    """

    number: int
    value: Any = None
    error: Exception | None = None
    together: int = 0
    waited: int | None = None
    waited_s: float = 0.0
