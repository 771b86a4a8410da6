"""The work on micro batches of one shape: as usual the first time, then captured, then replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megascend.batch.micro_batch import MicroBatch
from megascend.batch.step_shapes import StepShape
from megascend.engines.megatron.capture import Capture
from megascend.engines.megatron.output_head import OutputHead
from megascend.engines.megatron.static_batch import StaticBatch
from megascend.lora.stacked_adapters import StackedAdapters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """What a step consists of, and what captures it.

    Attributes:
        hidden_states: the model on a micro batch, up to what ``head`` takes.
        mode: what the model runs in, by whether no backward pass follows.
        uncached: a context in which nothing that captured work reads comes from a cache of upstream's, whose memory may go.
        drop_unfinished: drops gradients that a backward pass has left on their way when it failed.
    """

    hidden_states: Callable[[MicroBatch], Tensor]
    head: OutputHead
    mode: Callable[[bool], AbstractContextManager[None]]
    uncached: Callable[[], AbstractContextManager[None]]
    drop_unfinished: Callable[[], None]
    capture: Capture


@dataclass
class Counts:
    """What became of micro batches; see :class:`megascend.engines.megatron.graphed_steps.GraphReport`."""

    captured: int = 0
    replayed: int = 0
    first: int = 0
    dropped: int = 0
    eager: dict[str, int] = field(default_factory=dict)

    def tell(self, problem: str) -> None:
        """Count a micro batch that runs without; the first one of a kind is logged."""
        if problem not in self.eager:
            logger.warning("not in a CUDA graph: %s", problem)
        self.eager[problem] = self.eager.get(problem, 0) + 1


class WithRoom(Protocol):
    """Calls work, and once more without captures if memory has no room beside them."""

    def __call__(self, work: Callable[[], tuple[Tensor, ...]], /) -> tuple[Tensor, ...]: ...


class CapturedStep:
    """One shape: its memory, and the work on it, captured or not yet.

    Attributes:
        static: inputs.
        stacked: the adapters that it reads, or None.
        captured: it is replayed.
    """

    def __init__(
        self,
        shape: StepShape,
        stacked: StackedAdapters | None,
        work: Work,
        counts: Counts,
        with_room: WithRoom,
        device: torch.device,
    ) -> None:
        self._shape, self.stacked = shape, stacked
        self._model, self._counts, self._with_room = work, counts, with_room
        self.static = StaticBatch(shape, device)
        self.captured = False
        self._seen = self._refused = False
        self._replay_forward: Callable[[], None] | None = None
        self._replay_backward: Callable[[], None] | None = None
        self._found: tuple[Tensor, ...] = ()

    def forward(self) -> tuple[Tensor, ...]:
        """Compute (hidden states, log-probabilities, entropies if wanted), as far as the kind goes, or of cross entropy
        log-probabilities and all gradients. They are valid until another micro batch runs."""
        if self._replay_forward is None and self._seen and not self._refused:
            self._try_to_capture()
        if self._replay_forward is not None:
            self._counts.replayed += 1
            self._replay_forward()
            return self._found
        if self._refused:
            self._counts.tell(f"micro batches of {self._shape}, which could not be captured")
        else:
            self._counts.first += 1
        self._seen = True
        found = self._back(self._with_room(self._ahead))
        if self._shape.kind == "logprobs":
            self._found = found  # with its graph, for the backward pass
        return tuple(of.detach() for of in found)

    def backward(self) -> None:
        """Add gradients, from the coefficients in ``static``."""
        if self._replay_backward is not None:
            self._replay_backward()
            return
        found, self._found = self._found, ()
        self._differentiate(found)

    def _work(self) -> tuple[Tensor, ...]:
        """What is captured."""
        return self._back(self._ahead())

    def _back(self, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of cross entropy the backward pass, which adds to gradients."""
        if self._shape.kind != "cross_entropy":
            return found
        loss, logprobs = found
        loss.backward()
        return (logprobs,)

    def _ahead(self) -> tuple[Tensor, ...]:
        """The forward pass; of cross entropy the loss and log-probabilities."""
        head, batch = self._model.head, self.static.batch
        with self._model.mode(self._shape.kind in ("forward", "hidden")):
            hidden = self._model.hidden_states(batch)
        if self._shape.kind == "hidden":
            return (hidden,)
        if self._shape.kind == "cross_entropy":
            return head.cross_entropy(hidden, batch.targets, self.static.coefficients, 1.0)
        logprobs, entropies = head.logprobs(hidden, batch.targets, self._shape.entropy)
        return (hidden, logprobs) if entropies is None else (hidden, logprobs, entropies)

    def _differentiate(self, found: tuple[Tensor, ...]) -> None:
        coefficients = (self.static.coefficients, self.static.entropy_coefficients)
        outputs = found[1:]
        torch.autograd.backward(outputs, coefficients[: len(outputs)])

    def _try_to_capture(self) -> None:
        capture = self._model.capture
        try:
            with self._model.uncached():
                forward, found = capture.capture(self._work)
                backward = None
                if self._shape.kind == "logprobs":
                    backward, _ = capture.capture(lambda: self._differentiate(found))
        except RuntimeError as error:
            logger.warning("%s could not be captured as a CUDA graph: %s", self._shape, error)
            self._model.drop_unfinished()  # memory of the capture, in which nothing was ever computed
            self._refused = True
            return
        self._found = tuple(of.detach() for of in found)  # lets go of autograd's graph
        self._replay_forward, self._replay_backward, self.captured = forward, backward, True
        self._counts.captured += 1
