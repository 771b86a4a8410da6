"""Engine and Trainable: the interfaces between engines and the code above them (steps, checkpoints, the backend).

An engine owns a model, its process groups, its schedule and its optimizer. All code above it is the same for all engines.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from megascend.config import Adam, Precision
from megascend.engines.common.export import check_export, export
from megascend.engines.common.heads import fresh_weights
from megascend.engines.common.router_replay import RouterReplay
from megascend.engines.context import EngineContext, EngineSpec
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.checkpoint_files.scalar_head import WEIGHT
from megascend.models.selfcheck.verdict import Verdict
from megascend.runtime.distributed.objects import gather_objects
from megascend.runtime.topology.topology import Receivers
from megascend.training.batch.micro_batch import MicroBatch, SequenceLayout
from megascend.training.batch.results import StepResult
from megascend.training.batch.sample import Sample
from megascend.training.checkpoint.hf_slices import HfSlices
from megascend.training.checkpoint.slices import TensorSlices
from megascend.training.kernels.linear_divergence import TeacherDivergence
from megascend.training.lora.adapter_io import read_tensor
from megascend.training.lora.factors import UnshardedAdapter
from megascend.training.lora.registry import AdapterSettings

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Output(Protocol):
    """Last hidden states of one micro batch, with the head that is still to be applied to them.

    n is the number of tokens that this rank holds, padding included.

    Attributes:
        fuses_loss: :meth:`cross_entropy` is supported.
        prediction: output of the head for multi-token prediction, if the micro batch has targets for it; else None.
    """

    @property
    def fuses_loss(self) -> bool: ...

    @property
    def prediction(self) -> Output | None: ...

    def cross_entropy(self, coefficients: Tensor, loss_grad: float) -> tuple[Tensor, Tensor]:
        """Return ``sum(-coefficients * logprobs)``, which will receive gradient ``loss_grad``, and fp32 log-probabilities [n]."""
        ...

    def logprobs(self, entropy: bool, candidates: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return fp32 [n] log-probabilities of the targets, with their autograd graph, and entropies if ``entropy``.

        Args:
            candidates: int64 [n, K], further tokens (-1: none), whose log-probabilities fp32 [n, K] come third; 0 at -1.
        """
        ...

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """Return fp32 [n, vocabulary] on the CPU, or only ``rows`` (int64, ascending) of it."""
        ...

    def logit_factors(self) -> tuple[Tensor, Tensor, float | None]:
        """Return the last hidden states [n, h], the output layer's rows of tokens on this rank [rows, h], and the logits' cap.

        Logits are the product, capped, without adapters of the output layer. Without a graph. Both tensors may share the
        model's memory: copy them to keep them beyond the micro batch.
        """
        ...

    def divergence(self, divergence: TeacherDivergence, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return fp32 [n] log-probabilities of the targets, and divergences from the teacher with ``states`` [n, its h].

        Both with their autograd graph. At temperature 1.
        """
        ...


class RowOutput(Output, Protocol):
    """Output whose rows can be selected."""

    def select(self, rows: Tensor, targets: Tensor) -> Output:
        """Return the output of ``rows``, int64 [m] with repetitions, sorted by adapter, for ``targets`` [m]."""
        ...


@dataclass(frozen=True)
class ScalarOutput:
    """Output of a model with a scalar head for one micro batch.

    Attributes:
        values: fp32 [n], one for each token that this rank holds, padding included, with their autograd graph; of a head with
            several labels [n, labels].
    """

    values: Tensor


class Trainable(Protocol):
    """The trained parameters with their gradients, optimizer and step count: the model, or adapters on a frozen one.

    Every sample trains one named entity: an adapter, or ``""`` for the model itself.

    Attributes:
        step_count: calls of :meth:`step`, including skipped steps and those before a checkpoint.
        frozen: the model's own parameters are not trained.
        adapters: adapters by name; empty if the model itself is trained.
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
        """Return the state that must be equal on all ranks when they make a call, as text."""
        ...

    def require_open(self) -> None:
        """Raise ConfigError if no further gradients can be accumulated before the next step."""
        ...

    def names(self, samples: Sequence[Sample], default: str | None, *, training: bool) -> list[str]:
        """Return the adapter of every sample, ``""`` for the model itself.

        Raises:
            DataError: a sample names an adapter that does not exist.
        """
        ...

    def prepare(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> None:
        """Assign an adapter to each token of ``batch``: its sample's entry of ``names``."""
        ...

    def applying(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Activate the given adapters within the context."""
        ...

    def loss_scales(self, names: Sequence[str]) -> list[float]:
        """Return each adapter's factor of its loss in the backward pass, in addition to the engine's own scale."""
        ...

    def collect(self) -> None:
        """Accumulate the gradients of a completed forward_backward."""
        ...

    def abandon(self) -> None:
        """Drop the gradients of a forward_backward that failed."""
        ...

    # --- a step ---

    def choose(self, names: str | Sequence[str] | None) -> list[str]:
        """Return the names that a step updates; by default all that have gradients.

        Raises:
            ConfigError: a name does not exist, or has no gradients.
        """
        ...

    def step(
        self, names: Sequence[str], adam: Mapping[str, Adam] | None = None, *, lr: float | None = None
    ) -> StepResult:
        """Reduce, clip and update, on all ranks or on none; then clear the gradients. Collective.

        Args:
            adam: settings of this step only, by adapter.
            lr: learning rate of this step only, in place of the schedule's.
        """
        ...

    def with_gradients(self) -> list[str]:
        """Return the names that have accumulated gradients."""
        ...

    # --- checkpoints ---

    def counters(self) -> dict[str, Any] | None:
        """Return the counters of the model's optimizer, JSON; None if adapters are trained, which store their own."""
        ...

    def restore(self, step: int, counters: dict[str, Any] | None) -> None:
        """Continue after ``step`` steps, without gradients."""
        ...

    def saved_adapters(self) -> dict[str, UnshardedAdapter]:
        """Return on rank 0 all adapters, unsharded on the CPU, with their optimizers (``lora.adapter_io``). Collective."""
        ...

    def load_adapters(self, directories: Mapping[str, Path]) -> None:
        """Replace all adapters by these; if one does not fit, keep the present ones. Collective."""
        ...


OnOutput = Callable[[MicroBatch, Any], tuple[Tensor, Any]]
"""(micro batch, its :class:`Output` or :class:`ScalarOutput`) -> (loss to differentiate, result without a graph)."""


class Engine(ABC):
    """A model of one kind, ready to train.

    A subclass sets ``kind``, ``layout`` and ``trainable``, and implements :meth:`run`, :meth:`weights`, :meth:`hf_slices`,
    :meth:`training_state` and :meth:`named_weights`; everything else has a default.

    Args:
        spec: the settings.
        context: process, layout, groups and checkpoint.

    Attributes:
        kind: the engine's name in checkpoints; each kind has its own tensor names.
        topology, groups: rank arithmetic and process groups.
        device: device of the tensors of micro batches.
        info: description of the checkpoint in ``model_dir`` that the model was built from; its ``scalar_head`` decides the kind
            of output.
        precision: precision of parameters and activations; ``dtype`` is torch's name for it.
        batching: settings of micro batches.
        max_length: longest sample in tokens.
        layout: padding, packing and division of sequences over the ranks.
        trainable: the model's parameters, or the adapters.
        independent_ranks: ranks do not communicate in :meth:`run`, with this model and layout; none waits for a failed one.
        mtp_loss_weight: factor of the loss of a head for multi-token prediction; 0: none is trained.
        base_weights: format of a frozen model's weights.
        self_check: result of comparing a slice of the model with transformers; None: the engine has no such check.
        self_check_s: seconds spent waiting for its verdict.
        router_replay: replays the experts of samples with ``routed_experts``; None for a model without experts.
        replay_unsupported_reason: reason why this engine cannot replay experts, or None.
        shares_prefixes: common prefixes of samples are computed once.
    """

    kind: str
    layout: SequenceLayout
    trainable: Trainable
    independent_ranks = False
    mtp_loss_weight = 0.0
    self_check: Verdict | None = None
    self_check_s = 0.0
    router_replay: RouterReplay | None = None
    replay_unsupported_reason: str | None = None
    shares_prefixes = False

    def __init__(self, spec: EngineSpec, context: EngineContext) -> None:
        self.topology, self.groups, self.info = context.topology, context.groups, context.info
        self.device, self.model_dir, self.batching = context.groups.device, context.model_dir, spec.batching
        self.precision: Precision = spec.precision
        self.dtype = DTYPES[spec.precision]
        self.max_length = longest_sample(spec, self.info)
        self.base_weights = spec.base_weights

    # --- running micro batches ---

    def share_prefixes_unless(self, reason: str | None) -> None:
        """Compute common prefixes of samples once, as the settings say, unless a rank has a reason against it. Collective."""
        # Pipeline stages of a model with two kinds of layers may have one kind each.
        reasons = gather_objects(reason, "world", self.groups, "reasons against shared prefixes")
        reason = next((reason for reason in reasons if reason is not None), None)
        setting = self.batching.share_prefixes
        if reason is not None and isinstance(setting, int):
            raise ConfigError(
                f"batching.share_prefixes: {setting} with {reason}, where no prefixes are shared; set auto"
            )
        if reason is not None and setting == "auto" and self.groups.rank == 0:
            logger.info("common prefixes are computed for every sample: %s", reason)
        self.shares_prefixes = reason is None and setting != "off"

    @abstractmethod
    def run(self, batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> list[Any]:
        """Run forward passes of all micro batches, and backward passes unless ``forward_only``. Collective.

        Returns:
            The second result of ``on_output`` for each micro batch, in order; empty on ranks that see no outputs.
        """

    def scales(self, micro_batches: int) -> tuple[float, float]:
        """Return (factor of each rank's part of the loss, gradient that the backward pass of a micro batch starts from).

        The factor undoes the engine's averages over micro batches and ranks, so that the result is the sum over all of them.
        Both are 1 if the engine adds up the gradients of micro batches and ranks.
        """
        return 1.0, 1.0

    def evaluating(self) -> AbstractContextManager[None]:
        """Switch dropout off within the context, after pending parameter gathers have finished. Default: a no-op."""
        return contextlib.nullcontext()

    def cache_unsupported_reason(self) -> str | None:
        """Return the reason why this model and layout have no KV cache for sampling, or None if they have one."""
        return f"engine {self.kind} has none"

    def caching(self) -> AbstractContextManager[None]:
        """Let micro batches with ``cached`` write and read the KV cache within the context."""
        return contextlib.nullcontext()

    def release_memory(self) -> None:  # noqa: B027
        """Free device memory that is only an optimisation, such as CUDA graphs. Local."""

    # --- names of weights: checkpoints, pushes of slices and optimizer settings by weight follow from them ---

    @abstractmethod
    def weights(self) -> dict[str, TensorSlices]:
        """Return this rank's slices of the model's tensors by the engine's names, replicas included. Live tensors; local.

        While the same object is returned, the slices are unchanged: pushes keep views of them.
        """

    @abstractmethod
    def hf_slices(self) -> HfSlices:
        """Return the slices of Hugging Face weights that make up the tensors of :meth:`weights`, for all ranks. Collective.

        Raises:
            CheckpointError: on every rank: a tensor is not made up of such slices.
        """

    # --- checkpoints ---

    @abstractmethod
    def training_state(self, *, loading: bool) -> dict[str, Any]:
        """Return what a checkpoint of a trained model has beside its weights, on this rank: tensors as slices, and objects.

        Tensors are live, or copies that ``trainable.restore()`` reads after a load has filled them.

        Args:
            loading: the tensors will be filled from a checkpoint.
        """

    def random_streams(self) -> Any:
        """Return the state of random generators beyond those of Python, NumPy, torch and the device."""
        return None

    def restore_random_streams(self, state: Any) -> None:  # noqa: B027
        """Restore the random generators from :meth:`random_streams`."""

    # --- complete weights ---

    # Not made of slices: the weights of some architectures (gpt_oss) are computed from parameters, by a library's conversion.
    @abstractmethod
    def named_weights(
        self, adapter: str | None = None, *, receivers: Receivers = "all", device: torch.device | str | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's unsharded weights under their Hugging Face names, one at a time, on receiving ranks. Collective.

        Every rank iterates to the end; ranks that do not receive yield nothing. A tensor may share the model's memory: copy it
        to keep it beyond the next one.

        Args:
            adapter: merge this adapter, in float32.
            receivers: all ranks, the main one (0), or a set of global ranks.
            device: device of the tensors; default: the model's. ``meta``: names, shapes and dtypes only.
        """

    def export(self, path: Path, adapter: str | None = None, device: str | None = None) -> None:
        """Write the model, with ``adapter`` merged into it, as a Hugging Face directory. Collective.

        Args:
            device: device to collect tensors on; default: the model's.
        """
        weights = self.named_weights(adapter, receivers="main", device=device)
        export(weights, self.model_dir, path, str(self.dtype).removeprefix("torch."), self.groups, self.info)

    def check_export(self, path: Path, *, replaces: bool) -> None:
        """Raise the error with which a later :meth:`export` would fail; see :func:`check_export`. Collective."""
        weights = self.named_weights(receivers="main", device="meta")
        dtype = str(self.dtype).removeprefix("torch.")
        check_export(weights, self.model_dir, path, dtype, self.groups, self.info, replaces=replaces)

    def close(self) -> None:  # noqa: B027
        """Undo the engine's changes to the process; the backend destroys the groups. The object is unusable afterwards."""


def seed_generators(seed: int) -> None:
    """Seed the random generators of Python, NumPy and torch in this process."""
    random.seed(seed)
    # NumPy accepts 32-bit seeds only.
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def longest_sample(spec: EngineSpec, info: ModelInfo) -> int:
    """Return the tokens of the longest sample that settings and model allow."""
    limits = [limit for limit in (spec.batching.max_length, info.shape.max_position) if limit is not None]
    return min(limits, default=sys.maxsize)


def unbuilt_modules(info: ModelInfo) -> tuple[str, ...]:
    """Return the names of the modules in towers that no engine builds, those around linear layers included."""
    towers = info.architecture.copied
    modules = [name.rpartition(".")[0] for name in info.extra if towers and name.startswith(towers)]
    return tuple(sorted({*modules, *(name.rpartition(".")[0] for name in modules)}))


def adapter_settings(spec: EngineSpec, info: ModelInfo, device: torch.device) -> AdapterSettings:
    """Return the settings that all adapters of an engine share."""
    assert spec.adapters is not None
    settings = AdapterSettings(
        spec.adapters,
        spec.optimizer,
        spec.schedule,
        spec.seed,
        DTYPES[spec.precision],
        device,
        unbuilt=unbuilt_modules(info),
    )
    if (scalar_head := info.scalar_head) is None:
        return settings
    head = fresh_weights(info, spec.seed).get(WEIGHT)
    if head is None:
        head = read_tensor(spec.model, WEIGHT)
    return replace(settings, head=head, labels=scalar_head.labels, problem_type=scalar_head.problem_type)
