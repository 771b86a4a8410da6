"""What a step, a checkpoint and the facade know of an engine, and of what it trains.

An engine owns a model, its groups, its schedule and its optimizer. Everything above it is the same for all engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megascend.batch.micro_batch import MicroBatch, SequenceLayout
from megascend.batch.results import StepResult
from megascend.batch.sample import Sample
from megascend.config import Adam, Batching, Lora, Precision
from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.hf_parts import HfParts
from megascend.huggingface.info import ModelInfo
from megascend.topology.topology import Topology
from megascend.topology.weight_routes import Receivers


class Output(Protocol):
    """What the model made of one micro batch: its last hidden states, and the head that has not been applied to them yet.

    n is the number of tokens that this rank holds, padding included.

    Attributes:
        fuses_loss: :meth:`cross_entropy` may be used.
    """

    @property
    def fuses_loss(self) -> bool: ...

    def cross_entropy(self, coefficients: Tensor, loss_grad: float) -> tuple[Tensor, Tensor]:
        """``sum(-coefficients * logprobs)``, which will receive the gradient ``loss_grad``, and fp32 log-probabilities [n]."""
        ...

    def logprobs(self, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """fp32 [n] log-probabilities of the targets, with their graph, and the entropies if asked for."""
        ...

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """fp32 [n, vocabulary] on the CPU; or of ``rows`` (int64, ascending) of the n alone."""
        ...


@dataclass(frozen=True)
class ScalarOutput:
    """What a model with a scalar head made of one micro batch.

    Attributes:
        values: fp32 [n], one for each token that this rank holds, padding included, with their graph.
    """

    values: Tensor


class Trainable(Protocol):
    """What has gradients, an optimizer, a step count and a state: the model itself, or adapters on a frozen one.

    What a sample trains has a name: its adapter's, or ``""`` for the model itself.

    Attributes:
        step_count: calls of :meth:`step`, skipped steps and those before a checkpoint included.
        frozen: the model's own parameters are not trained.
        adapters: by name; empty if the model itself is trained.
        projections: Hugging Face weights that adapters of this model may target.
    """

    step_count: int

    @property
    def frozen(self) -> bool: ...

    @property
    def adapters(self) -> Mapping[str, Any]: ...

    @property
    def projections(self) -> Sequence[str]: ...

    # --- a call of forward_backward or forward ---

    def describe(self) -> str:
        """What must be equal on all ranks for a call to be the same on them."""
        ...

    def require_open(self) -> None:
        """Raise ConfigError if gradients cannot be added to before the next step."""
        ...

    def names(self, samples: Sequence[Sample], default: str | None, *, training: bool) -> list[str]:
        """What every sample trains, or runs through.

        Raises:
            DataError: a sample names what there is not.
        """
        ...

    def prepare(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> None:
        """Tell the layers which of ``names`` each token of ``batch`` belongs to; its members are of ``samples``."""
        ...

    def applying(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Have ``names`` in force until the block ends."""
        ...

    def loss_scales(self, names: Sequence[str]) -> list[float]:
        """What each of ``names`` multiplies its loss by before the backward pass, beside the engine's own scale."""
        ...

    def collect(self) -> None:
        """A forward_backward has run: its gradients count."""
        ...

    def abandon(self) -> None:
        """A forward_backward failed half way: no gradient of it may count."""
        ...

    # --- a step ---

    def choose(self, names: str | Sequence[str] | None) -> list[str]:
        """What a step is for; by default all that has gradients.

        Raises:
            ConfigError: there is no such name, or it has no gradients.
        """
        ...

    def step(self, names: Sequence[str], *, lr: float | None = None) -> StepResult:
        """Reduce, clip and update, on all ranks or on none; then clear the gradients. Collective.

        Args:
            lr: learning rate of this step alone, in place of the schedule's.
        """
        ...

    def with_gradients(self) -> list[str]:
        """Names of what has accumulated gradients."""
        ...

    # --- checkpoints ---

    def counters(self) -> dict[str, Any] | None:
        """Counters of the model's optimizer, JSON; None if adapters are trained, which carry theirs."""
        ...

    def restore(self, step: int, counters: dict[str, Any] | None) -> None:
        """Go on after ``step`` steps, without gradients."""
        ...

    def saved_adapters(self) -> dict[str, Any]:
        """On rank 0 every adapter, whole and on the CPU, with its optimizer (``lora.adapter_io.SavedAdapter``). Collective."""
        ...

    def load_adapters(self, directories: Mapping[str, Path]) -> None:
        """Have exactly these adapters, or, if one does not fit, those from before. Collective."""
        ...


class AdapterTrainable(Trainable, Protocol):
    """Adapters on a frozen model."""

    def step(
        self, names: Sequence[str], adam: Mapping[str, Adam] | None = None, *, lr: float | None = None
    ) -> StepResult:
        """As :meth:`Trainable.step`.

        Args:
            adam: settings of this step alone, by adapter.
        """
        ...

    def check(self, name: str, lora: Lora) -> None:
        """Raise ConfigError unless an adapter ``name`` with these settings can be added."""
        ...

    def add(self, name: str, lora: Lora) -> None:
        """A new adapter whose output is 0. Collective.

        Raises:
            OutOfDeviceMemoryError: on every rank: some rank has no room.
        """
        ...

    def make_room(self, names: Sequence[str]) -> None:
        """Allocate what a step of these adapters needs. Local.

        Raises:
            OutOfDeviceMemoryError: there is no room.
        """
        ...

    def forget(self, name: str) -> None:
        """Remove an adapter with all that belongs to it."""
        ...

    def discard(self, names: str | Sequence[str]) -> None:
        """Drop accumulated gradients. Local."""
        ...

    def require(self, names: str | Sequence[str]) -> None:
        """Raise ConfigError if there is no adapter of one of these names."""
        ...

    def named_weights(self, name: str, *, everywhere: bool = False) -> Mapping[str, Tensor]:
        """An adapter alone, under peft's names, float32 on the CPU, on rank 0 or ``everywhere``. Collective."""
        ...

    def as_peft(self, name: str, base_model: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """(``adapter_config.json``, its tensors in float32 on the CPU) of an adapter on rank 0, None on others. Collective."""
        ...

    def save(self, name: str, path: Path, base_model: str, *, optimizer: bool) -> None:
        """Write an adapter as a directory that ``peft`` loads. Collective."""
        ...

    def load(self, name: str, path: Path, *, optimizer: bool, lora: Lora | None = None, replace: bool = False) -> None:
        """Add an adapter from such a directory, or replace the one of that name, if it can be read. Collective."""
        ...


class Engine(Protocol):
    """A model of one kind, ready to train.

    Attributes:
        kind: its name in checkpoints, whose tensors have names of its own.
        topology, groups: who does what, and how ranks meet.
        device: of the tensors of micro batches.
        info: of the checkpoint that the model was built from; its ``scalar_head`` says which kind of output there is.
        precision: of parameters and activations.
        batching: the user's settings.
        max_length: longest sample in tokens.
        layout: how sequences lie on the ranks.
        trainable: what is trained.
    """

    kind: str
    topology: Topology
    groups: ProcessGroups
    device: torch.device
    info: ModelInfo
    precision: Precision
    batching: Batching
    max_length: int
    layout: SequenceLayout

    @property
    def trainable(self) -> Trainable: ...

    def scales(self, micro_batches: int) -> tuple[float, float]:
        """How a call of ``micro_batches`` scales losses.

        Returns:
            What each rank multiplies its part of the loss by, so that the engine's own averages over micro batches and ranks
            give the sum over all of them; and the gradient that the loss of one micro batch will receive.
        """
        ...

    def run(self, batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> list[Any]:
        """Take every micro batch through the model, and back unless ``forward_only``. Collective.

        Returns:
            The second part of what ``on_output`` returned for each, in order; empty on ranks that see no outputs.
        """
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Dropout off, parameters complete, until the block ends."""
        ...

    def state(self, *, everything: bool) -> dict[str, Any]:
        """This rank's part of what a checkpoint holds of the model and its optimizer: ``engines.chunks.Chunks`` and objects
        by name, live tensors. Nothing of a frozen model.

        Args:
            everything: also what another rank writes, as needed to load.
        """
        ...

    def hf_parts(self) -> HfParts:
        """What the model's tensors in a checkpoint are in terms of Hugging Face's weights, on every rank all of them, by which
        engines of other kinds read it. Collective.

        Raises:
            CheckpointError: on every rank: it cannot be said in boxes.
        """
        ...

    def named_weights(
        self, adapter: str | None = None, *, receivers: Receivers = "all", device: torch.device | str | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's weights under their Hugging Face names, whole, one at a time, on the ranks that receive. Collective.

        Every rank iterates to the end; where there is nothing to receive, there is nothing to iterate over. A tensor may be
        the model's own memory: copy what is to outlast the next one.

        Args:
            adapter: merged into what comes, in float32.
            receivers: all ranks, the main one (0), or a set of global ranks.
            device: where to; default: where the model is. ``meta``: names, shapes and dtypes alone.
        """
        ...

    def export(self, path: Path, adapter: str | None) -> None:
        """Write the model, with ``adapter`` merged into it, as a Hugging Face directory. Collective."""
        ...

    def random_streams(self) -> Any:
        """Where the engine's own random generators stand, beside those of Python, NumPy, torch and the device; or None."""
        ...

    def restore_random_streams(self, state: Any) -> None:
        """Set them to what :meth:`random_streams` has returned."""
        ...

    def close(self) -> None:
        """Let go of what the engine has changed in the process. The object is of no use afterwards."""
        ...


class ApartEngine(Engine, Protocol):
    """An engine that knows whether ranks meet in :meth:`run`.

    Attributes:
        apart: they do not, with this model and layout; the others need not wait when one gives up.
    """

    @property
    def apart(self) -> bool: ...


class ReleasingEngine(Engine, Protocol):
    """An engine that holds device memory which only makes it faster."""

    def release_memory(self) -> None:
        """Give that memory back: there is none left for something else. Local."""
        ...


class CachingEngine(Engine, Protocol):
    """An engine that can keep the keys and values of tokens, which is for sampling.

    Attributes:
        mixes_adapters: one micro batch may have tokens of several adapters.
    """

    mixes_adapters: bool

    def why_no_cache(self) -> str | None:
        """Why it cannot with this model and layout, in a few words; None if it can."""
        ...

    def caching(self) -> AbstractContextManager[None]:
        """Until the block ends, micro batches that are ``cached`` keep their keys and values, or find those of earlier tokens."""
        ...


OnOutput = Callable[[MicroBatch, Any], tuple[Tensor, Any]]
"""Called with the output of each micro batch (:class:`Output`, or :class:`ScalarOutput`, as the model is).

It returns the loss to differentiate, and what to keep of it without a graph."""
