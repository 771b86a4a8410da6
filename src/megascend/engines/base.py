"""Engine, and what it trains: the contract of a step, a checkpoint and the facade with every engine.

An engine owns a model, its groups, its schedule and its optimizer. Everything above it is the same for all engines.
"""

from __future__ import annotations

import contextlib
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from megascend.batch.micro_batch import MicroBatch, SequenceLayout
from megascend.batch.results import StepResult
from megascend.batch.sample import Sample
from megascend.checkpoint.hf_slices import HfSlices
from megascend.config import Adam, Precision
from megascend.engines.context import EngineContext, EngineSpec
from megascend.engines.export import check_export, export
from megascend.errors import ConfigError
from megascend.lora.adapter_io import SavedAdapter
from megascend.selfcheck.verdict import Verdict
from megascend.topology.weight_routes import Receivers

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Output(Protocol):
    """Last hidden states of one micro batch, and the head that has not been applied to them yet.

    n is the number of tokens that this rank holds, padding included.

    Attributes:
        fuses_loss: :meth:`cross_entropy` may be used.
    """

    @property
    def fuses_loss(self) -> bool: ...

    def cross_entropy(self, coefficients: Tensor, loss_grad: float) -> tuple[Tensor, Tensor]:
        """Return ``sum(-coefficients * logprobs)``, which will receive gradient ``loss_grad``, and fp32 log-probabilities [n]."""
        ...

    def logprobs(self, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return fp32 [n] log-probabilities of the targets, with their graph, and the entropies if asked for."""
        ...

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """Return fp32 [n, vocabulary] on the CPU; or only ``rows`` (int64, ascending) of the n."""
        ...


@dataclass(frozen=True)
class ScalarOutput:
    """Output of a model with a scalar head for one micro batch.

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
        """Return what must be equal on all ranks for a call to be the same on them."""
        ...

    def require_open(self) -> None:
        """Raise ConfigError if gradients cannot be added to before the next step."""
        ...

    def names(self, samples: Sequence[Sample], default: str | None, *, training: bool) -> list[str]:
        """Return what every sample trains, or runs through.

        Raises:
            DataError: a sample names an adapter that does not exist.
        """
        ...

    def prepare(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> None:
        """Mark each token of ``batch``, whose members are of ``samples``, with the one of ``names`` that it belongs to."""
        ...

    def applying(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Activate the given adapters within the context."""
        ...

    def loss_scales(self, names: Sequence[str]) -> list[float]:
        """Return the factor of each one's loss in the backward pass, beside the engine's own scale."""
        ...

    def collect(self) -> None:
        """Accumulate the gradients of a forward_backward that has run."""
        ...

    def abandon(self) -> None:
        """Drop the gradients of a forward_backward that failed half way."""
        ...

    # --- a step ---

    def choose(self, names: str | Sequence[str] | None) -> list[str]:
        """Return what a step is for; by default all that has gradients.

        Raises:
            ConfigError: there is no such name, or it has no gradients.
        """
        ...

    def step(
        self, names: Sequence[str], adam: Mapping[str, Adam] | None = None, *, lr: float | None = None
    ) -> StepResult:
        """Reduce, clip and update, on all ranks or on none; then clear the gradients. Collective.

        Args:
            adam: settings of this step alone, by adapter.
            lr: learning rate of this step alone, in place of the schedule's.
        """
        ...

    def with_gradients(self) -> list[str]:
        """Return the names of what has accumulated gradients."""
        ...

    # --- checkpoints ---

    def counters(self) -> dict[str, Any] | None:
        """Return counters of the model's optimizer, JSON; None if adapters are trained, which carry theirs."""
        ...

    def restore(self, step: int, counters: dict[str, Any] | None) -> None:
        """Continue after ``step`` steps, without gradients."""
        ...

    def saved_adapters(self) -> dict[str, SavedAdapter]:
        """Return on rank 0 all adapters, whole and on the CPU, with their optimizers (``lora.adapter_io``). Collective."""
        ...

    def load_adapters(self, directories: Mapping[str, Path]) -> None:
        """Replace all adapters by these, or, if one does not fit, keep those from before. Collective."""
        ...


OnOutput = Callable[[MicroBatch, Any], tuple[Tensor, Any]]
"""Called with the output of each micro batch (:class:`Output`, or :class:`ScalarOutput`, as the model is).

It returns the loss to differentiate, and what to keep of it without a graph."""


class Engine(ABC):
    """A model of one kind, ready to train.

    A subclass sets ``kind``, ``layout`` and ``trainable``, and implements :meth:`run`, :meth:`state`, :meth:`hf_slices` and
    :meth:`named_weights`; everything else has a default.

    Args:
        spec: the settings.
        context: process, layout, groups and checkpoint.

    Attributes:
        kind: name in checkpoints, whose tensors have names of its own.
        topology, groups: rank arithmetic and process groups.
        device: of the tensors of micro batches.
        info: of the checkpoint in ``model_dir`` that the model was built from; its ``scalar_head`` says which kind of output
            there is.
        precision: of parameters and activations; ``dtype`` is torch's name for it.
        batching: settings of micro batches.
        max_length: longest sample in tokens.
        layout: of sequences on the ranks.
        trainable: what is trained.
        mixes_adapters: one micro batch may have tokens of several adapters.
        independent_ranks: ranks exchange nothing in :meth:`run`, with this model and layout; none waits for one that has failed.
        self_check: result of comparing a slice of the model, computed as here, with transformers; None: there is no such check.
        self_check_s: seconds that its verdict was waited for.

    Raises:
        ConfigError: adapters on a model with a scalar head.
    """

    kind: str
    layout: SequenceLayout
    trainable: Trainable
    mixes_adapters = True
    independent_ranks = False
    self_check: Verdict | None = None
    self_check_s = 0.0

    def __init__(self, spec: EngineSpec, context: EngineContext) -> None:
        self.topology, self.groups, self.info = context.topology, context.groups, context.info
        self.device, self.model_dir, self.batching = context.groups.device, context.model_dir, spec.batching
        self.precision: Precision = spec.precision
        self.dtype = DTYPES[spec.precision]
        limits = [limit for limit in (spec.batching.max_length, self.info.shape.max_position) if limit is not None]
        self.max_length = min(limits, default=sys.maxsize)
        if self.info.scalar_head is not None and spec.adapters is not None:
            raise ConfigError(
                "adapters: LoRA on a model with a scalar head is not supported: peft trains the head beside the adapter "
                "(modules_to_save), and adapters here have no weights of their own but A and B; leave adapters out"
            )

    # --- running micro batches ---

    @abstractmethod
    def run(self, batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> list[Any]:
        """Take every micro batch through the model, and back unless ``forward_only``. Collective.

        Returns:
            The second part of what ``on_output`` returned for each, in order; empty on ranks that see no outputs.
        """

    def scales(self, micro_batches: int) -> tuple[float, float]:
        """Return how a call of ``micro_batches`` scales losses; 1 and 1 where gradients of micro batches and ranks add up.

        Returns:
            The factor of each rank's part of the loss with which the engine's own averages over micro batches and ranks
            give the sum over all of them; and the gradient that the loss of one micro batch will receive.
        """
        return 1.0, 1.0

    def evaluating(self) -> AbstractContextManager[None]:
        """Switch dropout off within the context, in which parameters are complete. Default: there is no dropout."""
        return contextlib.nullcontext()

    def why_no_cache(self) -> str | None:
        """Return why keys and values cannot be kept for sampling with this model and layout, or None if they can."""
        return f"engine {self.kind} has none"

    def caching(self) -> AbstractContextManager[None]:
        """Within the context, let micro batches that are ``cached`` keep keys and values, or use those of earlier tokens."""
        return contextlib.nullcontext()

    def release_memory(self) -> None:  # noqa: B027
        """Free device memory that only makes the engine faster. Local."""

    # --- checkpoints ---

    @abstractmethod
    def state(self, *, everything: bool) -> dict[str, Any]:
        """Return what this rank writes of the model and its optimizer: ``checkpoint.slices.TensorSlices`` and objects by name,
        live tensors. Nothing of a frozen model.

        Args:
            everything: also what another rank writes, as needed to load.
        """

    @abstractmethod
    def hf_slices(self) -> HfSlices:
        """Return the slices of Hugging Face's weights that the tensors of :meth:`state` consist of, on every rank all of them, by
        which engines of other kinds read a checkpoint. Collective.

        Raises:
            CheckpointError: on every rank: they cannot be described so.
        """

    def random_streams(self) -> Any:
        """Return the state of the engine's own random generators, beside those of Python, NumPy, torch and the device."""
        return None

    def restore_random_streams(self, state: Any) -> None:  # noqa: B027
        """Set them to what :meth:`random_streams` has returned."""

    # --- weights ---

    @abstractmethod
    def named_weights(
        self, adapter: str | None = None, *, receivers: Receivers = "all", device: torch.device | str | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights under their Hugging Face names, whole, one at a time, on the ranks that receive. Collective.

        Every rank iterates to the end; where there is nothing to receive, there is nothing to iterate over. A tensor may be
        the model's own memory: copy what is to outlast the next one.

        Args:
            adapter: merged into what comes, in float32.
            receivers: all ranks, the main one (0), or a set of global ranks.
            device: where to; default: where the model is. ``meta``: names, shapes and dtypes alone.
        """

    def export(self, path: Path, adapter: str | None = None, device: str | None = None) -> None:
        """Write the model, with ``adapter`` merged into it, as a Hugging Face directory. Collective.

        Args:
            device: on which tensors are collected; default: where the model is.
        """
        weights = self.named_weights(adapter, receivers="main", device=device)
        export(weights, self.model_dir, path, _name(self.dtype), self.groups, self.info)

    def check_export(self, path: Path, *, replaces: bool) -> None:
        """Refuse now what would keep :meth:`export` from writing to ``path`` later; see :func:`check_export`. Collective."""
        weights = self.named_weights(receivers="main", device="meta")
        check_export(weights, self.model_dir, path, _name(self.dtype), self.groups, self.info, replaces=replaces)

    def close(self) -> None:  # noqa: B027
        """Undo what the engine has changed in the process; its groups are the backend's. The object is of no use afterwards."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def seed_generators(seed: int) -> None:
    """Seed the random generators of Python, NumPy and torch in this process."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
