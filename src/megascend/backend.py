"""MegatronBackend: the facade that a trainer imports."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from megascend.bootstrap import bootstrap
from megascend.config import Adam, Adapters, Batching, Lora, Moe, Parallel, PlatformName, Precision, Recompute, Schedule
from megascend.distributed.launch import Launch
from megascend.errors import ConfigError, LossFunctionError, MegascendError
from megascend.huggingface.info import ModelInfo, inspect_checkpoint
from megascend.topology.topology import Topology, plan

if TYPE_CHECKING:
    from megascend.batch.losses import Loss, LossFunction
    from megascend.batch.results import ForwardBackwardResult, ForwardResult, StepResult
    from megascend.batch.sample import Sample
    from megascend.checkpoint.saver import PendingSave
    from megascend.distributed.process_groups import ProcessGroups
    from megascend.lora.adapter import Adapter
    from megascend.lora.manager import AdapterManager
    from megascend.platforms.base import Platform
    from megascend.selfcheck.verdict import Verdict

T = TypeVar("T")

GRACE_S = 10.0
"""How long a run that ends with an error waits for a checkpoint that is being written."""


class MegatronBackend:
    """A Hugging Face model, trained by Megatron-Core on all ranks of this world.

    Every method is collective: all ranks call it, in the same order. Ranks that differ only in tensor, pipeline or
    context parallelism pass the same samples. An error that concerns the batch is raised on every rank alike. Before ranks
    meet on the device they make sure, in one small exchange, that all of them are in the same method with the same arguments;
    where they are not, all raise OutOfStepError, which says where each one is.

    Args:
        model: directory of a Hugging Face checkpoint with safetensors weights.
        parallel: how the ranks divide the work; data parallelism takes what is left of the world size.
        precision: ``fp32``, ``fp16`` or ``bf16``, for parameters, activations and pipeline messages. Main parameters,
            gradients and moments are fp32 in every case.
        tf32: as for :func:`megascend.bootstrap`, which is called if it has not been.
        optimizer, schedule, recompute, moe, batching: see :mod:`megascend.config`.
        adapters: freeze the model and train LoRA adapters on it (:meth:`add_adapter`); optimizer and schedule are then
            each adapter's, unless it has its own.
        provider_options: settings of the provider's own, beside those that follow from the model and the layout.
        platform: as for :func:`megascend.bootstrap`, which is called if it has not been.
        seed: of dropout and everything else that is random.
        timeout_s: seconds after which a missing rank is an error on all others.
        save_timeout_s: seconds after which a checkpoint that is waited for and still being written counts as failed.
        self_check: hold a small slice of the model against transformers first (docs/limits.md); a few seconds, once for a
            configuration.
        provider: as for :func:`megascend.bootstrap`.
        mindspeed: the earlier name of ``provider_options``.

    Raises:
        ConfigError, TopologyError, CheckpointError, PlatformError, VersionError, ImportOrderError,
        CollectiveTimeoutError, SelfCheckError: before any training, on every rank.
    """

    def __init__(
        self,
        model: str | Path,
        parallel: Parallel | None = None,
        precision: Precision = "bf16",
        tf32: bool | None = None,
        optimizer: Adam | None = None,
        schedule: Schedule | None = None,
        recompute: Recompute | None = None,
        moe: Moe | None = None,
        batching: Batching | None = None,
        adapters: Adapters | None = None,
        provider_options: Mapping[str, bool | int | float | str | None] | None = None,
        platform: PlatformName = "auto",
        seed: int = 1234,
        timeout_s: float = 600.0,
        save_timeout_s: float = 1800.0,
        self_check: bool = True,
        provider: str | None = None,
        mindspeed: Mapping[str, bool | int | float | str | None] | None = None,
    ) -> None:
        if mindspeed is not None:
            warnings.warn("mindspeed= is now called provider_options=", FutureWarning, stacklevel=2)
            if provider_options is not None:
                raise ConfigError("mindspeed= is now called provider_options=, and both are given: leave mindspeed out")
            provider_options = mindspeed
        if precision not in ("fp32", "fp16", "bf16"):
            raise ConfigError(f"precision must be fp32, fp16 or bf16, got {precision!r}")
        layout: Parallel = parallel or Parallel()
        batches: Batching = batching or Batching()
        self._runtime = bootstrap(platform, layout, tf32, "megatron", precision, provider)
        self._model_dir = Path(model)
        self._info: ModelInfo = inspect_checkpoint(self._model_dir)
        launch = Launch.from_environment()
        self.topology: Topology = plan(layout, launch.world_size, self._info.shape)
        self._runtime.check_batching(self.topology, batches)
        self._runtime.load_megatron()

        from megascend.checkpoint.saver import Saver
        from megascend.distributed import process_groups
        from megascend.engines.megatron.architecture import check_architecture
        from megascend.engines.megatron.engine import MegatronStrategy
        from megascend.engines.megatron.groups import MegatronGroups, require_none_alive
        from megascend.step.step import Step

        check_architecture(self._model_dir)
        require_none_alive()  # before anything is patched under a backend that is in use
        self._runtime.configure_topology(self.topology, timeout_s)
        self.groups: ProcessGroups = process_groups.initialize(
            self.topology, self.platform, timeout_s, launch, MegatronGroups()
        )
        self._precision: Precision = precision
        try:
            if precision == "fp32" and not self._runtime.tf32:
                self.platform.check_products()
            with self.groups.monitor.phase("build"):
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
                    adapters=adapters,
                    provider_options=provider_options or {},
                    seed=seed,
                    device=self.groups.device,
                    self_check=self_check,
                )
        except BaseException:
            self.groups.destroy()  # so that another attempt in this process finds none left over
            raise
        self._step = Step(self._strategy)
        self._saver = Saver(self.groups, page_locked=self.platform.page_locks_memory, patience_s=save_timeout_s)
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
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters by name; empty if the model itself is trained. Not to be changed."""
        return {} if self._strategy.adapters is None else self._strategy.adapters.registry

    @property
    def self_check(self) -> Verdict:
        """What the check of the model's configuration against transformers found."""
        return self._strategy.self_check

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        return self._info.parameter_count

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs of forward and backward for one token in a sequence of ``length``; see :class:`ModelInfo`."""
        return self._info.flops_per_token(length, frozen=self._strategy.adapters is not None)

    # --- the verbs ---

    def shard(self, samples: Sequence[Sample]) -> list[Sample]:
        """This data parallel rank's share of a global list: token counts balanced, preference pairs kept together."""
        from megascend.batch.packing import shard

        shares = shard([len(s) for s in samples], [s.pair for s in samples], self.topology.data)
        return [samples[index] for index in shares[self.topology.coordinates(self.rank).data]]

    def check_samples(self, samples: Sequence[Sample]) -> None:
        """Raise DataError for samples that the model cannot take. Local: no other rank needs to call it."""
        self._strategy.check_samples(samples)

    def gather_by_data_rank(self, obj: T) -> list[T]:
        """A Python object of every data parallel rank, in their order, on every rank. Travels over Gloo."""
        from megascend.distributed.objects import gather_objects

        if self.topology.data < self.world_size:
            self._together("gather_by_data_rank()")
        return gather_objects(obj, "dp", self.groups, "gather_by_data_rank()")

    def from_rank_0(self, produce: Callable[[], T]) -> T:
        """What ``produce`` returns or raises on rank 0, on every rank. Travels over Gloo."""
        from megascend.distributed.objects import broadcast_object

        made: tuple[T | None, MegascendError | None] | None = None
        if self.rank == 0:
            try:
                made = produce(), None
            except MegascendError as error:
                made = None, error
        value, problem = broadcast_object(made, "world", self.groups, what="from_rank_0()")
        if problem is not None:
            raise problem
        return value  # type: ignore[return-value]

    def any_rank(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank; the same answer on every rank. Travels over Gloo."""
        from megascend.distributed.objects import all_reduce_numbers

        numbers = [float(flag) for flag in flags]
        return [value > 0 for value in all_reduce_numbers(numbers, "world", self.groups, "max", "any_rank()")]

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss: str | Loss | LossFunction = "cross_entropy",
        adapter: str | None = None,
    ) -> ForwardBackwardResult:
        """Compute the loss over the samples of all data parallel ranks and accumulate its gradients.

        The loss is ``sum(weight * loss_t) / sum(weight)`` over all samples (or the mean over preference pairs), whatever
        the layout and however the samples fall into micro batches; with adapters, over the samples of each adapter. Calls
        before one :meth:`optimizer_step` add up.

        Args:
            samples: this data parallel rank's samples; may be empty on some ranks, not on all. Samples of any adapters may
                be mixed.
            loss: ``cross_entropy``, ``importance_sampling``, ``ppo``, ``dpo``, a :class:`megascend.Loss`, or a callable
                ``(logprobs [n], LossInputs) -> values [n]``.
            adapter: the adapter of samples that do not name theirs (``Sample.adapter``).

        Raises:
            DataError: on every rank, if any rank's samples cannot be trained on; no gradient has been added then.
            LossFunctionError: on every rank, if the loss raised on any, with its traceback; its adapters keep the gradients
                of earlier calls, the model itself has lost those accumulated since the last :meth:`optimizer_step`.
            ConfigError: the loss is unknown, or gradients were reduced already (``overlap_grad_reduce``).
        """
        from megascend.distributed.objects import agree

        try:
            resolved = self._resolved(loss)
        except ConfigError as error:
            agree("forward_backward", self.groups, problem=error)
            raise
        try:
            result = self._step.forward_backward(samples, resolved, adapter)
        except LossFunctionError:
            if self._strategy.adapters is None:  # micro batches before the one that failed have left theirs
                self._strategy.optimizer.zero_grad()
                self._accumulated = self._reduced = False
            raise
        self._accumulated = True
        self._reduced = self._strategy.reduces_while_running
        return result

    def _resolved(self, loss: str | Loss | LossFunction) -> Loss:
        from megascend.batch.losses import resolve

        if self._reduced:
            raise ConfigError(
                "forward_backward was called twice before optimizer_step, but optimizer.overlap_grad_reduce has reduced the "
                "first call's gradients already; pass all samples in one call or set overlap_grad_reduce: false"
            )
        return resolve(loss)

    def optimizer_step(self, adapters: str | Sequence[str] | None = None) -> StepResult:
        """Reduce and clip the accumulated gradients, update what is trained, and clear the gradients.

        If the gradient norm of any rank is not finite, no rank changes anything and ``skipped`` is True. Adapters are
        clipped, skipped and counted each by itself.

        Args:
            adapters: which adapters; default: all that have accumulated gradients.

        Raises:
            ConfigError: a named adapter does not exist, or none has accumulated gradients.
        """
        host = self._strategy.adapters
        named = "" if adapters is None else repr([adapters] if isinstance(adapters, str) else list(adapters))
        chosen = self._together(f"optimizer_step({named}){self._step.adapters_here()}", lambda: self._to_step(adapters))
        if host is None:
            reduced, self._reduced, self._accumulated = self._reduced, False, False
            result = self._strategy.optimizer.step(reduced)
        else:
            from megascend.batch.results import StepResult

            result = StepResult.of(host.optimizer.step(chosen))
        self.groups.monitor.step += 1
        return result

    def _to_step(self, adapters: str | Sequence[str] | None) -> list[Adapter]:
        """The adapters that a step is for; none if the model itself is trained."""
        host = self._strategy.adapters
        if host is None:
            if adapters is not None:
                raise ConfigError("optimizer_step(adapters=...): this backend trains the model itself")
            return []
        if adapters is None:
            chosen = [adapter for adapter in host.registry.values() if adapter.accumulated]
        else:
            chosen = host.named(adapters)
        idle = [adapter.name for adapter in chosen if not adapter.accumulated]
        if idle or not chosen:
            raise ConfigError(
                f"optimizer_step: {f'adapter {idle[0]!r}' if idle else 'no adapter'} has gradients; call forward_backward first"
            )
        return chosen

    def _together(self, call: str, check: Callable[[], T] = lambda: None) -> T:
        """Make sure that all ranks are in the same call, before they meet on the device. One small exchange over Gloo.

        Args:
            call: with the arguments that must be equal.
            check: what this rank has to say; if it raises a MegascendError, all ranks do.

        Returns:
            What ``check`` returns.

        Raises:
            OutOfStepError: on every rank: they are in different calls.
        """
        from megascend.distributed.objects import agree

        try:
            found = check()
        except MegascendError as problem:
            agree(call, self.groups, problem)
            raise
        agree(call, self.groups)
        return found

    def discard_gradients(self, adapters: str | Sequence[str]) -> None:
        """Drop what these adapters have accumulated since their last step. Local: every rank calls it.

        Raises:
            ConfigError: one does not exist.
        """
        for adapter in self._host().named(adapters):
            adapter.clear()

    def forward(
        self,
        samples: Sequence[Sample],
        entropy: bool = False,
        logits: bool = False,
        adapter: str | None = None,
        reference: bool = False,
    ) -> ForwardResult:
        """Log-probabilities of every sample's targets, without gradients and with dropout off.

        Args:
            samples: this data parallel rank's samples.
            entropy: also return the entropy at every position.
            logits: also return the whole logits, fp32 [length, vocabulary]: large, for tests and small models.
            adapter: the adapter of samples that do not name theirs; without either, the base model alone.
            reference: the base model alone for all samples, whatever adapter they name.
        """
        return self._step.forward(samples, entropy, logits, adapter, reference)

    # --- adapters ---

    def add_adapter(self, name: str, lora: Lora | None = None) -> None:
        """A new LoRA adapter with peft's first values: its output is 0. Other adapters are not touched.

        Raises:
            ConfigError: the name is taken or not allowed, a limit is reached, or a target does not exist.
        """
        settings = lora or Lora()
        self._together(f"add_adapter({name!r}, {settings!r})", lambda: self._host().registry.check(name, settings))
        self._host().add(name, settings)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter and what it has accumulated; frees its memory.

        Raises:
            ConfigError: there is none of that name.
        """
        self._together(f"remove_adapter({name!r})", lambda: self._host().named(name))
        self._host().forget(name)

    def save_adapter(self, name: str, path: str | Path, optimizer: bool = True) -> None:
        """Write an adapter as a directory that ``peft`` loads; it appears only when complete. Any layout can load it.

        Args:
            optimizer: also write what :meth:`load_adapter` needs to train on exactly.

        Raises:
            ConfigError: it has accumulated gradients, which would be lost.
            CheckpointError: on every rank, if ``path`` holds something else or cannot be written.
        """

        def check() -> None:
            adapter = self._host().registry[name]
            if optimizer and adapter.accumulated:
                raise ConfigError(
                    f"save_adapter: call optimizer_step({name!r}) first; accumulated gradients are not saved"
                )

        with self.groups.monitor.phase("save adapter"):
            self._together(f"save_adapter({name!r}, {str(path)!r}, {optimizer=})", check)
            self._host().save(name, Path(path), str(self._model_dir), optimizer=optimizer)

    def load_adapter(self, name: str, path: str | Path, lora: Lora | None = None, optimizer: bool = True) -> None:
        """Add an adapter from a directory that megascend or ``peft`` has written.

        Args:
            lora: its settings from now on, of the same rank and scaling; default: those it was saved with.
            optimizer: also load its optimizer's state and step count, where there are any.

        Raises:
            ConfigError: as :meth:`add_adapter`.
            CheckpointError: on every rank; nothing has been added then.
        """
        with self.groups.monitor.phase("load adapter"):
            self._together(f"load_adapter({name!r}, {str(path)!r}, {lora!r}, {optimizer=})", self._host)
            self._host().load(name, Path(path), optimizer=optimizer, lora=lora)

    def _host(self) -> AdapterManager:
        if self._strategy.adapters is None:
            raise ConfigError(
                "this backend trains the model itself; to train adapters, construct "
                "MegatronBackend(adapters=megascend.Adapters())"
            )
        return self._strategy.adapters

    # --- out ---

    def export_hf(self, path: str | Path, adapter: str | None = None) -> None:
        """Write the model as a Hugging Face directory that ``transformers`` loads; it appears only when complete.

        Args:
            adapter: merge this adapter into what is written, ``W + scaling * B A`` in float32; the model in memory stays as
                it is.
        """
        with self.groups.monitor.phase("export"):
            call = f"export_hf({str(path)!r}, {adapter=})"
            self._together(call, lambda: None if adapter is None else self._host().named(adapter))
            self._export(Path(path), adapter)

    def _export(self, path: Path, adapter: str | None = None) -> None:
        from megascend.engines.megatron import weights

        self._strategy.finish_param_gather()
        dtype = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[self._precision]
        merge = None
        if adapter is not None:
            from megascend.lora.merge import merged

            merge = merged(self._host().factors(adapter))
        weights.export(
            self._strategy.bare_chunks,
            self._strategy.config.bridge,
            self._model_dir,
            path,
            dtype,
            self.groups,
            merge,
        )

    def save(
        self,
        path: str | Path,
        *,
        progress: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        hf: bool = False,
        wait: bool = False,
        after: Callable[[Path], None] | None = None,
    ) -> PendingSave:
        """Write everything that this run needs to go on, while it goes on; the directory appears only when complete.

        Model, optimizer, schedule position and random state; with adapters, all of them with their optimizers instead of the
        frozen model. Returns when it is copied off the device. The checkpoint before is waited for first.

        Args:
            progress: JSON that :meth:`load` gives back: the position in the data, for example.
            config: the run's settings, kept for whoever looks.
            hf: also write ``path/hf``, which ``transformers`` loads (not in the background).
            wait: return when the checkpoint is complete.
            after: called on rank 0, on another thread, when ``path`` is in place.

        Raises:
            ConfigError: gradients are accumulated that no ``optimizer_step`` has used; they would be lost.
            CheckpointError: on every rank: ``path`` holds something else or cannot be written, or the save before failed.
        """
        from megascend.checkpoint import contents

        with self.groups.monitor.phase("save"):
            self._together(f"save({str(path)!r}, {hf=}, {wait=})", lambda: self._require_no_gradients("save"))
            taken = contents.describe(self._strategy, self.step_count, progress, config)
            write_more = (lambda directory: self._export(directory / "hf")) if hf else None
            pending = self._saver.save(
                Path(path),
                lambda: contents.collect(self._strategy, taken, str(self._model_dir), write_more),
                after,
            )
            if wait:
                self._saver.finish()
        return pending

    def prepare_saves(self) -> None:
        """Take the host memory that :meth:`save` copies to, in the background. Local; without it the first save has to."""
        from megascend.checkpoint import contents

        self._saver.prepare(contents.state_of(self._strategy))

    def load(self, path: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint: under the same layout exactly, under another one from the same parameters and moments.

        Every file is held against its digest first. With adapters, those of the checkpoint take the place of the present ones.

        Returns:
            What was given to :meth:`save` as ``progress``.

        Raises:
            CheckpointError: on every rank: there is no complete checkpoint of this model at ``path``, or it is damaged.
            ConfigError: one of its adapters is beyond this backend's limits; the present ones stay.
        """
        from megascend.checkpoint import contents, loader

        with self.groups.monitor.phase("load"):
            self._together(f"load({str(path)!r})")
            self._saver.finish()
            directory = Path(path)
            found = loader.verified(directory, self.groups)
            mine = contents.describe(self._strategy, self.step_count)
            loader.check_fits(found, mine, directory)
            loader.load(self._strategy, directory, found, mine)
        self._accumulated = self._reduced = False
        self.groups.monitor.step = found.step + 1
        return found.progress

    @property
    def step_count(self) -> int:
        """Calls of :meth:`optimizer_step` so far, skipped steps and those before a checkpoint included."""
        return self.groups.monitor.step - 1

    def _require_no_gradients(self, what: str) -> None:
        adapters = [name for name, adapter in self.adapters.items() if adapter.accumulated]
        if adapters or (self._accumulated and self._strategy.adapters is None):
            of = f" for adapter {adapters[0]!r}" if adapters else ""
            raise ConfigError(
                f"{what}: call optimizer_step() first{of}; accumulated gradients are not part of a checkpoint"
            )

    def __enter__(self) -> MegatronBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error, a checkpoint that is being written gets a few seconds and is given up then."""
        if error is None:
            self.close()
            return
        self._saver.abandon(GRACE_S)
        self.groups.destroy()

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and leave the process groups. The object is of no use afterwards.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        try:
            self._saver.close()
        finally:
            self.groups.destroy()
