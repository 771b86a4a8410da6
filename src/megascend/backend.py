"""MegatronBackend: the facade that a trainer imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.bootstrap import bootstrap
from megascend.config import Adam, Batching, Moe, Parallel, PlatformName, Precision, Recompute, Schedule
from megascend.errors import ConfigError
from megascend.huggingface.info import ModelInfo, inspect_checkpoint
from megascend.parallel.launch import Launch
from megascend.parallel.topology import Topology, plan

if TYPE_CHECKING:
    from megascend.parallel.process_groups import ProcessGroups
    from megascend.platforms.base import Platform
    from megascend.train.losses import Loss, LossFunction
    from megascend.train.results import ForwardBackwardResult, ForwardResult, StepResult
    from megascend.train.sample import Sample


class MegatronBackend:
    """A Hugging Face model, trained by Megatron-Core on all ranks of this world.

    Every method is collective: all ranks call it, in the same order. Ranks that differ only in tensor, pipeline or
    context parallelism pass the same samples. An error that concerns the batch is raised on every rank alike.

    Args:
        model: directory of a Hugging Face checkpoint with safetensors weights.
        parallel: how the ranks divide the work; data parallelism takes what is left of the world size.
        precision: ``fp32``, ``fp16`` or ``bf16``, for parameters, activations and pipeline messages. Main parameters,
            gradients and moments are fp32 in every case.
        optimizer, schedule, recompute, moe, batching: see :mod:`megascend.config`.
        mindspeed: on an NPU, arguments of MindSpeed's beside those that follow from the model and the layout.
        platform: as for :func:`megascend.bootstrap`, which is called if it has not been.
        seed: of dropout and everything else that is random.
        timeout_s: seconds after which a missing rank is an error on all others.

    Raises:
        ConfigError, TopologyError, CheckpointError, PlatformError, VersionError, ImportOrderError,
        CollectiveTimeoutError: before any training, on every rank.
    """

    def __init__(
        self,
        model: str | Path,
        parallel: Parallel | None = None,
        precision: Precision = "bf16",
        optimizer: Adam | None = None,
        schedule: Schedule | None = None,
        recompute: Recompute | None = None,
        moe: Moe | None = None,
        batching: Batching | None = None,
        mindspeed: Mapping[str, bool | int | float | str | None] | None = None,
        platform: PlatformName = "auto",
        seed: int = 1234,
        timeout_s: float = 600.0,
    ) -> None:
        if precision not in ("fp32", "fp16", "bf16"):
            raise ConfigError(f"precision must be fp32, fp16 or bf16, got {precision!r}")
        layout: Parallel = parallel or Parallel()
        batches: Batching = batching or Batching()
        self._runtime = bootstrap(platform, layout)
        self._model_dir = Path(model)
        self._info: ModelInfo = inspect_checkpoint(self._model_dir)
        launch = Launch.from_environment()
        self.topology: Topology = plan(layout, launch.world_size, self._info.shape)
        self.platform.check_batching(self.topology, batches)
        self._runtime.load_megatron()

        from megascend.model.architecture import check_architecture
        from megascend.parallel import process_groups
        from megascend.strategy.megatron import MegatronStrategy
        from megascend.strategy.step import Step

        check_architecture(self._model_dir)
        process_groups.require_none_alive()  # before anything is patched under a backend that is in use
        self._runtime.configure_topology(self.topology, timeout_s)
        self.groups: ProcessGroups = process_groups.initialize(self.topology, self._runtime.platform, timeout_s, launch)
        self._precision: Precision = precision
        try:
            self._strategy = MegatronStrategy(
                self._runtime,
                self.topology,
                self.groups,
                self._info.shape,
                self._model_dir,
                self._info.tensor_names,
                precision=precision,
                adam=optimizer or Adam(),
                schedule=schedule or Schedule(),
                recompute=recompute or Recompute(),
                moe=moe or Moe(),
                batching=batches,
                mindspeed=mindspeed or {},
                seed=seed,
                device=self.groups.device,
            )
        except BaseException:
            self.groups.destroy()  # so that another attempt in this process finds none left over
            raise
        self._step = Step(self._strategy)
        self._reduced = self._accumulated = False

    # --- what a trainer wants to know ---

    @property
    def platform(self) -> Platform:
        """The platform in use."""
        return self._runtime.platform

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.groups.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.topology.world_size

    @property
    def vocab_size(self) -> int:
        """Token ids lie in [0, vocab_size)."""
        return self._info.shape.vocab_size

    @property
    def max_length(self) -> int:
        """Longest sample in tokens."""
        return self._strategy.max_length

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        return self._info.parameter_count

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs of forward and backward for one token in a sequence of ``length``; recomputation not counted."""
        return self._info.flops_per_token(length)

    # --- the verbs ---

    def shard(self, samples: Sequence[Sample]) -> list[Sample]:
        """This data parallel rank's share of a global list: token counts balanced, preference pairs kept together."""
        from megascend.train.packing import shard

        shares = shard([len(s) for s in samples], [s.pair for s in samples], self.topology.data)
        return [samples[index] for index in shares[self.topology.coordinates(self.rank).data]]

    def forward_backward(
        self, samples: Sequence[Sample], loss: str | Loss | LossFunction = "cross_entropy"
    ) -> ForwardBackwardResult:
        """Compute the loss over the samples of all data parallel ranks and accumulate its gradients.

        The loss is ``sum(weight * loss_t) / sum(weight)`` over all samples (or the mean over preference pairs), whatever
        the layout and however the samples fall into micro batches. Calls before one :meth:`optimizer_step` add up.

        Args:
            samples: this data parallel rank's samples; may be empty on some ranks, not on all.
            loss: ``cross_entropy``, ``importance_sampling``, ``ppo``, ``dpo``, a :class:`megascend.Loss`, or a callable
                ``(logprobs [n], LossInputs) -> values [n]``.

        Raises:
            DataError: on every rank, if any rank's samples cannot be trained on.
            ConfigError: the loss is unknown, or gradients were reduced already (``overlap_grad_reduce``).
        """
        from megascend.train.losses import resolve

        if self._reduced:
            raise ConfigError(
                "forward_backward was called twice before optimizer_step, but optimizer.overlap_grad_reduce has reduced the "
                "first call's gradients already; pass all samples in one call or set overlap_grad_reduce: false"
            )
        result = self._step.forward_backward(samples, resolve(loss))
        self._accumulated = True
        self._reduced = self._strategy.reduces_while_running
        return result

    def optimizer_step(self) -> StepResult:
        """Reduce and clip the accumulated gradients, update all parameters, and clear the gradients.

        If the gradient norm of any rank is not finite, no rank changes anything and ``skipped`` is True.
        """
        reduced, self._reduced, self._accumulated = self._reduced, False, False
        return self._strategy.optimizer.step(reduced)

    def forward(self, samples: Sequence[Sample], entropy: bool = False, logits: bool = False) -> ForwardResult:
        """Log-probabilities of every sample's targets, without gradients and with dropout off.

        Args:
            samples: this data parallel rank's samples.
            entropy: also return the entropy at every position.
            logits: also return the whole logits, fp32 [length, vocabulary]: large, for tests and small models.
        """
        return self._step.forward(samples, entropy, logits)

    def export_hf(self, path: str | Path) -> None:
        """Write the model as a Hugging Face directory that ``transformers`` loads; it appears only when complete."""
        from megascend.model import weights

        self._strategy.finish_param_gather()
        dtype = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[self._precision]
        weights.export(
            self._strategy.bare_chunks, self._strategy.config.bridge, self._model_dir, Path(path), dtype, self.groups
        )

    def save(self, path: str | Path) -> None:
        """Write model, optimizer, schedule position and random state; the directory appears only when complete.

        Raises:
            ConfigError: gradients are accumulated that no ``optimizer_step`` has used; they would be lost.
            CheckpointError: ``path`` holds something else.
        """
        from megascend.checkpoint import sharded

        if self._accumulated:
            raise ConfigError("save: call optimizer_step() first; accumulated gradients are not part of a checkpoint")
        sharded.save(self._strategy, Path(path))

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint: under the same layout exactly, under another one from the same parameters and moments.

        Raises:
            CheckpointError: there is no complete checkpoint of this model at ``path``; nothing has been changed.
        """
        from megascend.checkpoint import sharded

        sharded.load(self._strategy, Path(path))
        self._accumulated = self._reduced = False

    def close(self) -> None:
        """Leave the process groups. The object is of no use afterwards."""
        self.groups.destroy()
