"""Backend: the methods of the facade, the same for every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from typing_extensions import Self

from megascend.batch.losses import Loss, LossFunction, resolve
from megascend.batch.packing import shard
from megascend.batch.results import ForwardBackwardResult, ForwardResult, StepResult
from megascend.batch.sample import Sample
from megascend.checkpoint import manifest
from megascend.checkpoint.saver import PendingSave, Saver
from megascend.config import Adam, Lora
from megascend.distributed.objects import agree, all_reduce_numbers, from_rank_0, gather_objects
from megascend.distributed.process_groups import ProcessGroups
from megascend.engines import checkpoints
from megascend.engines.base import Engine, Trainable
from megascend.errors import ConfigError, MegascendError, OutOfDeviceMemoryError
from megascend.huggingface.files import write_chat_template
from megascend.lora.adapter_set import AdapterSet
from megascend.selfcheck.verdict import Verdict
from megascend.step.checks import check_samples, require_head
from megascend.step.step import Step
from megascend.topology.topology import Topology
from megascend.topology.weight_routes import Receivers

if TYPE_CHECKING:
    from megascend.platforms.base import Platform

T = TypeVar("T")

GRACE_S = 10.0
"""How long a run that ends with an error waits for a checkpoint that is being written."""


class Backend:
    """A Hugging Face model in training, on all ranks of this world. Its kinds differ in the engine that they build.

    Every method is collective: all ranks call it, in the same order. Ranks that differ only in tensor, pipeline or
    context parallelism pass the same samples. An error that concerns the batch is raised on every rank alike. Before ranks
    communicate on the device they compare, in one small exchange, their methods and arguments; where these differ, all raise
    OutOfStepError, which says where each one is.

    Args:
        engine: the model, ready to train; the backend closes it and its groups.
        model_dir: the Hugging Face checkpoint that it was built from.
        platform: what the process runs on.
        save_timeout_s: seconds after which a checkpoint that is waited for and still being written counts as failed.

    Attributes:
        on_micro_batch: called on this rank when a micro batch of :meth:`forward_backward` begins, with the number of those before
            it and of all of the call; None: nothing is called. What it raises ends the call.
    """

    def __init__(self, engine: Engine, model_dir: Path, platform: Platform, save_timeout_s: float = 1800.0) -> None:
        self.engine, self.platform = engine, platform
        self.groups: ProcessGroups = engine.groups
        self.topology: Topology = engine.topology
        self._model_dir = model_dir
        self._step = Step(engine)
        self.on_micro_batch: Callable[[int, int], None] | None = None
        self.chat_template: str | None = None
        self._saver = Saver(self.groups, page_locked=platform.page_locks_memory, timeout_s=save_timeout_s)

    # --- facts ---

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
        return self.engine.info.shape.vocab_size

    @property
    def max_length(self) -> int:
        """Longest sample in tokens."""
        return self.engine.max_length

    @property
    def adapters(self) -> Mapping[str, Any]:
        """The adapters by name; empty if the model itself is trained. Not to be changed."""
        return self.engine.trainable.adapters

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        return self.engine.info.parameter_count

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs of forward and backward for one token in a sequence of ``length``; see :class:`ModelInfo`."""
        return self.engine.info.flops_per_token(length, frozen=self.engine.trainable.frozen)

    @property
    def self_check(self) -> Verdict | None:
        """Result of comparing a slice of the model with transformers; None for engines without such a check."""
        return self.engine.self_check

    @property
    def self_check_s(self) -> float:
        """Seconds that the constructor has waited for that."""
        return self.engine.self_check_s

    # --- the methods ---

    def shard(self, samples: Sequence[Sample]) -> list[Sample]:
        """This data parallel rank's share of a global list: token counts balanced, preference pairs kept together."""
        shares = shard([len(s) for s in samples], [s.pair for s in samples], self.topology.data)
        return [samples[index] for index in shares[self.topology.coordinates(self.rank).data]]

    def check_samples(self, samples: Sequence[Sample]) -> None:
        """Raise DataError for samples that the model cannot take. Local: no other rank needs to call it."""
        check_samples(samples, self.engine)

    def gather_by_data_rank(self, obj: T) -> list[T]:
        """A Python object of every data parallel rank, in their order, on every rank. Travels over Gloo."""
        if self.topology.data < self.world_size:
            self._agree("gather_by_data_rank()")
        return gather_objects(obj, "dp", self.groups, "gather_by_data_rank()")

    def from_rank_0(self, produce: Callable[[], T]) -> T:
        """What ``produce`` returns or raises on rank 0, on every rank. Travels over Gloo."""
        return from_rank_0(produce, self.groups, "from_rank_0()")

    def any_rank(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank; the same answer on every rank. Travels over Gloo."""
        numbers = [float(flag) for flag in flags]
        return [value > 0 for value in all_reduce_numbers(numbers, "world", self.groups, "max", "any_rank()")]

    def smallest(self, *numbers: float) -> list[float]:
        """For each number, the smallest on any rank; the same answer on every rank. Travels over Gloo."""
        return all_reduce_numbers(numbers, "world", self.groups, "min", "smallest()")

    def set_micro_batch_tokens(self, tokens: int) -> None:
        """Change the token budget of a micro batch (``batching.micro_batch_tokens``), on all ranks alike."""
        self.engine.batching = self.engine.batching.with_budget(tokens)

    def try_step(self, samples: Sequence[Sample], adapter: str | None = None) -> None:
        """:meth:`forward_backward` by cross entropy without keeping any gradient, to see what memory it takes. Collective.

        Gradients that were there before are lost.
        """
        self._step.forward_backward(samples, resolve("cross_entropy"), adapter, keep=False)

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss: str | Loss | LossFunction = "cross_entropy",
        adapter: str | None = None,
        logprobs: bool = False,
        values: bool = False,
    ) -> ForwardBackwardResult:
        """Compute the loss over the samples of all data parallel ranks and accumulate its gradients.

        The loss is ``sum(weight * loss_t) / sum(weight)`` over all samples (or the mean over preference pairs), whatever
        the layout and however the samples fall into micro batches; with adapters, over the samples of each adapter. A loss with
        ``reduction="sum"`` is not divided. Calls before one :meth:`optimizer_step` add up.

        Args:
            samples: this data parallel rank's samples; may be empty on some ranks, not on all. Samples of any adapters may
                be mixed.
            loss: ``cross_entropy``, ``importance_sampling``, ``ppo``, ``cispo``, ``gspo``, ``dro``, ``stable_reinforce``,
                ``dpo``, a :class:`megascend.Loss`, or a callable ``(logprobs [n], LossInputs) -> losses [n]``. For a scalar head:
                ``value``, ``clipped_value``, ``bradley_terry`` or a :class:`megascend.Loss` with ``of="values"``.
            adapter: the adapter of samples that do not name theirs (``Sample.adapter``).
            logprobs: also return the log-probabilities of all targets. The call then waits for the device.
            values: the same with a scalar head's values.

        Raises:
            DataError: on every rank, if any rank's samples cannot be trained on; no gradient has been added then.
            LossFunctionError: on every rank, if the loss raised on any, with its traceback; its adapters keep the gradients
                of earlier calls, the model itself has lost those accumulated since the last :meth:`optimizer_step`.
            ConfigError: the loss is unknown, or gradients were reduced already (``overlap_grad_reduce``).
            OutOfDeviceMemoryError: on every rank, if memory ran out on any of several that do not wait for one another (data
                parallel ones, with adapters on a dense model of Megatron's); no gradient has been added.
            torch.OutOfMemoryError: memory ran out, and this is the only rank, or others may be waiting for it.
        """
        try:
            resolved = resolve(loss)
            require_head(self.engine, resolved.of, f"loss {resolved.name!r}")
            outputs = "logprobs" if logprobs else "values" if values else None
            if outputs:
                require_head(self.engine, outputs, f"forward_backward({outputs}=True)")
            self.engine.trainable.require_open()
        except ConfigError as error:
            agree("forward_backward", self.groups, problem=error)
            raise
        with self._freeing():
            return self._step.forward_backward(samples, resolved, adapter, self.on_micro_batch, outputs)

    def optimizer_step(
        self,
        adapters: str | Sequence[str] | None = None,
        adam: Mapping[str, Adam] | None = None,
        lr: float | None = None,
    ) -> StepResult:
        """Reduce and clip the accumulated gradients, update what is trained, and clear the gradients.

        If the gradient norm of any rank is not finite, no rank changes anything and ``skipped`` is True. Adapters are
        clipped, skipped and counted each by itself.

        Args:
            adapters: which adapters; default: all that have accumulated gradients.
            adam: by adapter, settings for this step alone, in place of the backend's own and its schedule: learning rate, betas,
                eps, weight decay, ``max_grad_norm``. Its other settings have no effect.
            lr: learning rate of this step alone, in place of the schedule's; for programs with a scheduler of their own.

        Raises:
            ConfigError: a named adapter does not exist, none has accumulated gradients, ``adam`` names one that makes no step, or
                both ``adam`` and ``lr`` are given.
            OutOfDeviceMemoryError: on every rank, if adapters' moments have no room on any; nothing has changed.
        """
        trainable = self.engine.trainable
        settings = dict(adam or {})

        def choose() -> list[str]:
            chosen = trainable.choose(adapters)
            idle = [name for name in settings if name not in chosen]
            if idle:
                raise ConfigError(f"optimizer_step: adam has settings for {idle[0]!r}; the step is for {chosen}")
            if settings and lr is not None:
                raise ConfigError("optimizer_step: adam has a learning rate already; leave lr out")
            if trainable.frozen or settings:  # last, and before any rank has changed anything
                self._adapters().make_room(chosen)
            return chosen

        names = "" if adapters is None else repr([adapters] if isinstance(adapters, str) else list(adapters))
        options = f", adam={settings}" if settings else "" if lr is None else f", lr={lr!r}"
        with self._freeing():
            chosen = self._agree(f"optimizer_step({names}{options}){trainable.describe()}", choose)
        result = trainable.step(chosen, settings, lr=lr)
        self.groups.monitor.step = self.step_count + 1
        return result

    def _agree(self, call: str, check: Callable[[], T] = lambda: None) -> T:
        """Make sure that all ranks are in the same call, before they communicate on the device. One small exchange over Gloo.

        Args:
            call: with the arguments that must be equal.
            check: of this rank; if it raises a MegascendError, all ranks do.

        Returns:
            What ``check`` returns.

        Raises:
            OutOfStepError: on every rank: they are in different calls.
        """
        try:
            result = check()
        except MegascendError as problem:
            agree(call, self.groups, problem)
            raise
        agree(call, self.groups)
        return result

    def discard_gradients(self, adapters: str | Sequence[str] | None = None) -> None:
        """Drop what has been accumulated since the last step. Local: every rank calls it.

        Args:
            adapters: which ones' gradients; default: all that there are, or the model's own.

        Raises:
            ConfigError: one does not exist.
        """
        if adapters is not None:
            self._adapters().discard(adapters)
        elif names := self.engine.trainable.with_gradients():
            self._adapters().discard(names) if self.engine.trainable.frozen else self.engine.trainable.abandon()

    @contextmanager
    def _freeing(self) -> Iterator[None]:
        """Free cached device memory after an error of all ranks that memory ran out."""
        try:
            yield
        except OutOfDeviceMemoryError:
            self._free_memory()
            raise

    def _free_memory(self) -> None:
        """Free device memory that holds nothing, or only makes steps faster."""
        self.engine.release_memory()
        self.platform.free_cached_memory()

    def recover_memory(self) -> bool:
        """Make room after a call that has raised torch.OutOfMemoryError, and drop what it has left half done.

        Returns:
            Whether other calls may follow: False with several ranks, which may be waiting for this one in a collective.
        """
        if self.world_size > 1:
            return False
        self.engine.trainable.abandon()
        self._free_memory()
        return True

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
        with self._freeing():
            return self._step.forward(samples, entropy, logits, adapter, reference)

    def values(
        self, samples: Sequence[Sample], adapter: str | None = None, reference: bool = False
    ) -> list[torch.Tensor]:
        """What a scalar head makes of every token, without gradients and with dropout off: fp32 [length] on the CPU each.

        The value at a place is that after the token there has been read; a reward model's score of a sequence is the last one.

        Args:
            samples: this data parallel rank's samples; :meth:`Sample.scored` makes them.
            adapter, reference: as for :meth:`forward`.

        Raises:
            ConfigError: the model has no scalar head.
        """
        return self._step.values(samples, adapter, reference)

    def next_token_logits(self, samples: Sequence[Sample], adapter: str | None = None) -> list[torch.Tensor]:
        """Logits of the token that follows each sample, fp32 [vocabulary] each on the CPU, with dropout off.

        Without a cache: whoever samples a response this way takes prompt and response so far through the model for each token.

        Args:
            samples: this data parallel rank's samples; may be empty on some ranks, not on all. Targets and weights do not matter.
            adapter: the adapter of samples that do not name theirs; without either, the base model alone.
        """
        return self._step.next_token_logits(samples, adapter)

    # --- adapters ---

    def add_adapter(self, name: str, lora: Lora | None = None) -> None:
        """A new LoRA adapter with peft's first values: its output is 0. Other adapters are not touched.

        Raises:
            ConfigError: the name is taken or not allowed, a limit is reached, or a target does not exist.
            OutOfDeviceMemoryError: on every rank, if it has no room on any, with its gradients and moments.
        """
        settings = lora or Lora()
        self._agree(f"add_adapter({name!r}, {settings!r})", lambda: self._adapters().check(name, settings))
        with self._freeing():
            self._adapters().add(name, settings)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter and what it has accumulated; frees its memory.

        Raises:
            ConfigError: there is none of that name.
        """
        self._agree(f"remove_adapter({name!r})", lambda: self._adapters().require(name))
        self._adapters().forget(name)

    def save_adapter(self, name: str, path: str | Path, optimizer: bool = True) -> None:
        """Write an adapter as a directory that ``peft`` loads; it appears only when complete. Any layout can load it.

        Args:
            optimizer: also write what :meth:`load_adapter` needs to train on exactly.

        Raises:
            ConfigError: it has accumulated gradients, which would be lost.
            CheckpointError: on every rank, if ``path`` holds something else or cannot be written.
        """

        def check() -> None:
            self._adapters().require(name)
            if optimizer and name in self._adapters().with_gradients():
                raise ConfigError(
                    f"save_adapter: call optimizer_step({name!r}) first; accumulated gradients are not saved"
                )

        with self.groups.monitor.phase("save adapter"):
            self._agree(f"save_adapter({name!r}, {str(path)!r}, {optimizer=})", check)
            self._adapters().save(name, Path(path), str(self._model_dir), optimizer=optimizer)

    def load_adapter(
        self, name: str, path: str | Path, lora: Lora | None = None, optimizer: bool = True, replace: bool = False
    ) -> None:
        """Add an adapter from a directory that megascend or ``peft`` has written.

        Args:
            lora: its settings from now on, of the same rank and scaling; default: those it was saved with.
            optimizer: also load its optimizer's state and step count, where there are any.
            replace: put it in the place of the adapter of that name, if there is one; its gradients are dropped.

        Raises:
            ConfigError: as :meth:`add_adapter`.
            CheckpointError, OutOfDeviceMemoryError: on every rank; nothing has been added or replaced then.
        """
        with self.groups.monitor.phase("load adapter"), self._freeing():
            replacing = ", replace=True" if replace else ""
            call = f"load_adapter({name!r}, {str(path)!r}, {lora!r}, {optimizer=}{replacing})"
            self._agree(call, self._adapters)
            self._adapters().load(name, Path(path), optimizer=optimizer, lora=lora, replace=replace)

    def _adapters(self) -> AdapterSet:
        trainable: Trainable = self.engine.trainable
        if not isinstance(trainable, AdapterSet):
            if trainable.frozen:
                raise ConfigError(
                    f"adapters of engine {self.engine.kind!r} are no megascend.lora.adapter_set.AdapterSet"
                )
            raise ConfigError(
                "this backend trains the model itself; to train adapters, construct "
                f"{type(self).__name__}(adapters=megascend.Adapters())"
            )
        return trainable

    # --- out ---

    def named_weights(
        self,
        adapter: str | None = None,
        *,
        alone: bool = False,
        receivers: Receivers = "all",
        device: torch.device | str | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, whole, one at a time, on the ranks that receive.

        All ranks call it and iterate to the end; where there is nothing to receive, there is nothing to iterate over. Names and
        shapes are those of the checkpoint that the model comes from. The dtype is that of ``precision``, whatever the checkpoint
        has; what is fp32 there and not trained (a router's correction bias) stays fp32. A tensor may be the model's own memory:
        copy what is to outlast the next one, and change none.

        Args:
            adapter: merged into what comes, ``W + scaling * B A`` in float32; the model in memory stays as it is.
            alone: the adapter's factors alone, under ``peft``'s names, float32.
            receivers: all ranks, the main one (0), or a set of global ranks.
            device: where to; default: where the model is, for an adapter alone the CPU. ``meta``: names, shapes and dtypes
                alone, for which no weights travel.

        Raises:
            ConfigError: there is no such adapter, or none was named for ``alone``.
            ProcessGroupError: while iterating: a rank left the stream before its end.
            CheckpointError: while iterating: a number is beyond fp16's range.
        """

        def check() -> None:
            if adapter is not None:
                self._adapters().require(adapter)
            elif alone:
                raise ConfigError("named_weights(alone=True): name the adapter")

        self._agree(f"named_weights({adapter=}, {alone=}, {receivers=})", check)
        if alone and adapter is not None:
            factors = self._adapters().named_weights(adapter, everywhere=receivers != "main")
            receives = receivers in ("all", "main") or self.rank in receivers
            return (
                (name, tensor if device is None else tensor.to(device)) for name, tensor in factors.items() if receives
            )
        return self.engine.named_weights(adapter, receivers=receivers, device=device)

    def adapter_as_peft(self, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        """An adapter as ``peft`` has it: the content of ``adapter_config.json`` and the tensors, float32 on the CPU.

        On rank 0; None on the others. All ranks call it.

        Raises:
            ConfigError: there is no such adapter.
        """
        self._agree(f"adapter_as_peft({name!r})", lambda: self._adapters().require(name))
        return self._adapters().as_peft(name, self._model_dir.name)

    def export_hf(self, path: str | Path, adapter: str | None = None) -> None:
        """Write the model as a Hugging Face directory that ``transformers`` loads; it appears only when complete.

        Tensors have the dtype of ``precision``, as in :meth:`named_weights`, and ``config.json`` names it; ``megascend export
        --dtype`` makes another one of it.

        Args:
            adapter: merge this adapter into what is written, ``W + scaling * B A`` in float32; the model in memory stays as
                it is.

        Raises:
            CheckpointError: on every rank: ``path`` is something else or cannot be written, or a number is beyond fp16's range.
        """
        with self.groups.monitor.phase("export"):
            call = f"export_hf({str(path)!r}, {adapter=})"
            self._agree(call, lambda: None if adapter is None else self._adapters().require(adapter))
            self._export(Path(path), adapter)

    def _export(self, path: Path, adapter: str | None) -> None:
        self.engine.export(path, adapter)
        if (template := self.chat_template) is not None:
            self.from_rank_0(lambda: write_chat_template(path, template))

    def check_export(self, path: str | Path, *, replaces: bool = False) -> None:
        """Refuse now what would keep :meth:`export_hf` from writing to ``path`` later. Nothing is written. Collective.

        Args:
            replaces: what is at ``path`` now, whatever it is, will be gone by then.

        Raises:
            CheckpointError: on every rank: the export would hold other tensors than the checkpoint that the model comes from, a
                file beside the weights cannot be read, or ``path`` cannot be written.
        """
        self.engine.check_export(Path(path), replaces=replaces)

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
        """Write everything that this run needs to resume, while it continues; the directory appears only when complete.

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
        with self.groups.monitor.phase("save"):
            self._agree(f"save({str(path)!r}, {hf=}, {wait=})", self._require_no_gradients)
            began = time.perf_counter()
            described = checkpoints.describe(self.engine, progress, config)
            self._saver.finish()
            state = checkpoints.checkpoint_state(self.engine, described, str(self._model_dir))
            write_more = (lambda directory: self._export(directory / "hf", None)) if hf else None
            pending = self._saver.save(Path(path), state, write_more=write_more, after=after)
            pending.stall_s = time.perf_counter() - began
            if wait:
                self._saver.finish()
        return pending

    def prepare_saves(self) -> None:
        """Take the host memory that :meth:`save` copies to, in the background. Local; without it the first save has to."""
        self._saver.prepare(self.engine.state(everything=False))

    def load(self, path: str | Path) -> dict[str, Any]:
        """Resume from a checkpoint: under the same layout exactly, under another one from the same parameters and moments.

        Every file is compared with its digest first. With adapters, those of the checkpoint take the place of the present ones.

        Returns:
            What was given to :meth:`save` as ``progress``.

        Raises:
            CheckpointError: on every rank: there is no complete checkpoint of this model at ``path``, or it is damaged.
            ConfigError: one of its adapters is beyond this backend's limits; the present ones stay.
        """
        with self.groups.monitor.phase("load"):
            self._agree(f"load({str(path)!r})")
            self._saver.finish()
            directory = Path(path)
            saved = manifest.verify(directory, self.groups)
            current = checkpoints.describe(self.engine)
            manifest.check_fits(saved, current, directory)
            checkpoints.load(self.engine, directory, saved, current)
        self.groups.monitor.step = self.step_count + 1
        return saved.progress

    @property
    def step_count(self) -> int:
        """Calls of :meth:`optimizer_step` so far, skipped steps and those before a checkpoint included."""
        return self.engine.trainable.step_count

    def _require_no_gradients(self) -> None:
        if names := self.engine.trainable.with_gradients():
            adapter = f" for adapter {names[0]!r}" if names[0] else ""
            raise ConfigError(
                f"save: call optimizer_step() first{adapter}; accumulated gradients are not part of a checkpoint"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error, a checkpoint that is being written gets a few seconds and is given up then."""
        if error is None:
            self.close()
            return
        self._saver.abandon(GRACE_S)
        self._destroy()

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and leave the process groups. The object is of no use afterwards.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        try:
            self._saver.close()
        finally:
            self._destroy()

    def _destroy(self) -> None:
        self.engine.close()
        self.groups.destroy()
