"""Backend: the facade over an engine; its methods are the same for every engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from typing_extensions import Self

from megascend.config import Adam, Lora
from megascend.engines.base import Engine, Trainable
from megascend.engines.common import checkpoints
from megascend.engines.step.checks import check_mtp_loss, check_samples, require_head
from megascend.engines.step.step import Step
from megascend.errors import ConfigError, MegascendError, OutOfDeviceMemoryError
from megascend.models.checkpoint_files.files import write_chat_template, write_ends
from megascend.models.selfcheck.verdict import Verdict
from megascend.runtime.distributed.groups import LEAVE_S
from megascend.runtime.distributed.objects import agree, all_reduce_numbers, from_rank_0, gather_objects
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.runtime.topology.topology import Receivers, Topology
from megascend.training.batch.loss import Loss, LossFunction
from megascend.training.batch.losses import resolve
from megascend.training.batch.packing import shard
from megascend.training.batch.prefixes import shard_by_prefixes
from megascend.training.batch.results import ForwardBackwardResult, ForwardResult, StepResult
from megascend.training.batch.sample import Sample
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.saver import PendingSave, Saver
from megascend.training.lora.adapter_set import AdapterSet
from megascend.training.lora.peft_format import to_config
from megascend.training.lora.peft_tensors import to_tensors

if TYPE_CHECKING:
    from megascend.runtime.platforms.base import Platform

T = TypeVar("T")

GRACE_S = 10.0
"""Seconds that a run which ends with an error waits for a checkpoint that is being written."""


class Backend:
    """A Hugging Face model in training, on all ranks of the world. Subclasses differ in the engine that they build.

    Every method is collective: all ranks call it, in the same order. Ranks that differ only in tensor, pipeline or
    context parallelism pass the same samples. An error that concerns the batch is raised on every rank. Before ranks
    communicate on the device they compare their methods and arguments in one small exchange; if these differ, all raise
    OutOfStepError, which names the call of each rank.

    Args:
        engine: the model, ready to train; the backend closes it and its groups.
        model_dir: the Hugging Face checkpoint that it was built from.
        platform: the kind of device that the process runs on.
        save_timeout_s: seconds that a call waits for a checkpoint to be written before the save counts as failed.

    Attributes:
        on_micro_batch: called on this rank when a micro batch of :meth:`forward_backward` begins, with its index and the number
            of micro batches of the call; None: nothing is called. An exception from it ends the call.
        chat_template: template that exports have in place of the model's; None: the model's.
        ends: tokens that end an answer, which exports name in generation_config.json beside the model's.
    """

    def __init__(self, engine: Engine, model_dir: Path, platform: Platform, save_timeout_s: float = 1800.0) -> None:
        self.engine, self.platform = engine, platform
        self.groups: ProcessGroups = engine.groups
        self.topology: Topology = engine.topology
        self._model_dir = model_dir
        self._step = Step(engine)
        self.on_micro_batch: Callable[[int, int], None] | None = None
        self.chat_template: str | None = None
        self.ends: Collection[int] = ()
        self._saver = Saver(self.groups, page_locked=platform.page_locks_memory, timeout_s=save_timeout_s)

    # --- properties ---

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
    def parameter_count(self) -> int:
        """Parameters of the model, tied ones counted once."""
        return self.engine.info.parameter_count

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs of forward and backward for one token in a sequence of ``length``; see :class:`ModelInfo`."""
        return self.engine.info.flops_per_token(length, frozen=self.engine.trainable.frozen)

    @property
    def adapters(self) -> Mapping[str, Any]:
        """The adapters by name; empty if the model itself is trained. Do not modify the mapping."""
        return self.engine.trainable.adapters

    @property
    def step_count(self) -> int:
        """Calls of :meth:`optimizer_step` so far, including skipped steps and those before a checkpoint."""
        return self.engine.trainable.step_count

    @property
    def self_check(self) -> Verdict | None:
        """Result of comparing a slice of the model with transformers; None for engines without such a check."""
        return self.engine.self_check

    @property
    def self_check_s(self) -> float:
        """Seconds that the constructor waited for :attr:`self_check`."""
        return self.engine.self_check_s

    # --- samples and objects of all ranks ---

    def shard(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return this data parallel rank's share of a global list: token counts balanced, preference pairs kept together.

        Tokens of prefixes that the engine computes once for several samples are counted once.
        """
        pairs, parts = [sample.pair for sample in samples], self.topology.data
        # All ranks compute all shares: no exchange is needed.
        if self.engine.shares_prefixes and parts > 1:
            kinds = [sample.adapter for sample in samples]
            shares = shard_by_prefixes(samples, kinds, pairs, parts, self.engine.batching.shortest_prefix)
        else:
            shares = shard([len(sample) for sample in samples], pairs, parts)
        return [samples[index] for index in shares[self.topology.coordinates(self.rank).data]]

    def check_samples(self, samples: Sequence[Sample]) -> None:
        """Raise DataError for samples that the model cannot take. Local: no other rank needs to call it."""
        check_samples(samples, self.engine)

    def gather_by_data_rank(self, obj: T) -> list[T]:
        """Return a Python object of every data parallel rank, in rank order, on every rank. Sent over Gloo."""
        # The dp groups compare calls among themselves only.
        if self.topology.data < self.world_size:
            self._agree("gather_by_data_rank()")
        return gather_objects(obj, "dp", self.groups, "gather_by_data_rank()")

    def from_rank_0(self, produce: Callable[[], T]) -> T:
        """Run ``produce`` on rank 0, and return its result or raise its error on every rank. Sent over Gloo."""
        return from_rank_0(produce, self.groups, "from_rank_0()")

    def any_rank(self, *flags: bool) -> list[bool]:
        """Return, for each flag, True if it is set on any rank; the same on every rank. Sent over Gloo."""
        numbers = [float(flag) for flag in flags]
        return [value > 0 for value in all_reduce_numbers(numbers, "world", self.groups, "max", "any_rank()")]

    def smallest(self, *numbers: float) -> list[float]:
        """Return each number's minimum over all ranks; the same on every rank. Sent over Gloo."""
        return all_reduce_numbers(numbers, "world", self.groups, "min", "smallest()")

    # --- training ---

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss: str | Loss | LossFunction = "cross_entropy",
        adapter: str | None = None,
        logprobs: bool = False,
        values: bool = False,
        loss_settings: Mapping[str, float] | None = None,
    ) -> ForwardBackwardResult:
        """Compute the loss over the samples of all data parallel ranks and accumulate its gradients.

        The loss is ``sum(weight * loss_t) / sum(weight)`` over all samples (or the mean over preference pairs), independent
        of the layout and of the division into micro batches; with adapters, over the samples of each adapter. A loss with
        ``reduction="sum"`` is not divided. Gradients of several calls before one :meth:`optimizer_step` add up.

        Args:
            samples: this data parallel rank's samples; may be empty on some ranks, not on all. Samples of any adapters may
                be mixed.
            loss: the name of a built-in loss (``docs/losses.md`` has a table) or of a registered one, a :class:`megascend.Loss`,
                or a callable ``(logprobs [n], LossInputs) -> losses [n]``. A scalar head needs a loss of values: one with
                ``of="values"``.
            adapter: the adapter of samples that do not name one (``Sample.adapter``).
            logprobs: also return the log-probabilities of all targets. The call then waits for the device.
            values: also return a scalar head's values of all tokens; waits for the device too.
            loss_settings: keyword arguments of the loss's function, such as ``{"clip_low": 0.1}`` of ``ppo``.

        Raises:
            DataError: on every rank, if any rank's samples cannot be trained on; no gradient has been added.
            LossFunctionError: on every rank, if the loss raised on any, with its traceback; its adapters keep the gradients
                of earlier calls, the model itself has lost those accumulated since the last :meth:`optimizer_step`.
            ConfigError: the loss or one of its settings is unknown, or gradients were reduced already (``overlap_grad_reduce``).
            OutOfDeviceMemoryError: on every rank, if any rank ran out of device memory and ranks do not wait for one another
                (data parallel ranks that train adapters on a dense Megatron model); no gradient has been added.
            torch.OutOfMemoryError: memory ran out, and this is the only rank, or others may be waiting for it in a collective.
        """
        try:
            resolved = resolve(loss, loss_settings)
            require_head(self.engine, resolved.of, f"loss {resolved.name!r}")
            check_mtp_loss(self.engine, resolved)
            outputs = "logprobs" if logprobs else "values" if values else None
            if outputs:
                require_head(self.engine, outputs, f"forward_backward({outputs}=True)")
            self.engine.trainable.require_open()
        except ConfigError as error:
            # Other ranks, where the checks passed, may be waiting in the step's first exchange.
            agree("forward_backward", self.groups, problem=error)
            raise
        with self._freeing_memory_on_oom():
            return self._step.forward_backward(samples, resolved, adapter, self.on_micro_batch, outputs)

    def optimizer_step(
        self,
        adapters: str | Sequence[str] | None = None,
        adam: Mapping[str, Adam] | None = None,
        lr: float | None = None,
    ) -> StepResult:
        """Reduce and clip the accumulated gradients, update the trained parameters, and clear the gradients.

        If the gradient norm of any rank is not finite, no rank changes anything and ``skipped`` is True. Each adapter is
        clipped, skipped and counted separately.

        Args:
            adapters: names of adapters; default: all that have accumulated gradients.
            adam: by adapter, settings for this step only, in place of the backend's and of the schedule: learning rate, betas,
                eps, weight decay, ``max_grad_norm``. Its other settings have no effect.
            lr: learning rate of this step only, in place of the schedule's; for programs that have a scheduler.

        Raises:
            ConfigError: the model, a named adapter or all adapters have no accumulated gradients, a named adapter does not
                exist, ``adam`` names an adapter without a step, or both ``adam`` and ``lr`` are given.
            OutOfDeviceMemoryError: on every rank, if any rank has no memory for the adapters' moments; nothing has changed.
        """
        trainable = self.engine.trainable
        settings = dict(adam or {})

        def choose() -> list[str]:
            chosen = trainable.choose(adapters)
            idle = [name for name in settings if name not in chosen]
            if idle:
                raise ConfigError(f"optimizer_step: adam has settings for {idle[0]!r}, but the step is for {chosen}")
            if settings and lr is not None:
                raise ConfigError("optimizer_step: adam has a learning rate already; leave lr out")
            # Allocates moments: after all checks, and before any rank has changed anything. With settings by adapter on a model
            # that is trained itself, _adapters() raises.
            if trainable.frozen or settings:
                self._adapters().make_room(chosen)
            return chosen

        names = "" if adapters is None else repr([adapters] if isinstance(adapters, str) else list(adapters))
        options = f", adam={settings}" if settings else "" if lr is None else f", lr={lr!r}"
        with self._freeing_memory_on_oom():
            chosen = self._agree(f"optimizer_step({names}{options}){trainable.describe()}", choose)
        result = trainable.step(chosen, settings, lr=lr)
        # Hang reports and error messages name the step that is running.
        self.groups.monitor.step = self.step_count + 1
        return result

    def discard_gradients(self, adapters: str | Sequence[str] | None = None) -> None:
        """Drop the gradients accumulated since the last step. No communication, but every rank must call it.

        Args:
            adapters: names of adapters; default: all that have gradients, or the model.

        Raises:
            ConfigError: an adapter does not exist.
        """
        if adapters is not None:
            self._adapters().discard(adapters)
        elif names := self.engine.trainable.with_gradients():
            if self.engine.trainable.frozen:
                self._adapters().discard(names)
            else:
                self.engine.trainable.abandon()

    def try_step(
        self, samples: Sequence[Sample], adapter: str | None = None, loss: str | Loss = "cross_entropy"
    ) -> None:
        """Run :meth:`forward_backward` and drop the gradients, to measure its memory. Collective.

        Gradients that had been accumulated before are lost.
        """
        self._step.forward_backward(samples, resolve(loss), adapter, accumulate=False)

    def set_micro_batch_tokens(self, tokens: int) -> None:
        """Change the token budget of a micro batch (``batching.micro_batch_tokens``), on all ranks alike."""
        self.engine.batching = self.engine.batching.with_budget(tokens)

    def recover_memory(self) -> bool:
        """Free memory after a call that raised torch.OutOfMemoryError, and drop its unfinished gradients.

        Returns:
            True if other calls may follow; False with several ranks, which may be waiting for this one in a collective.
        """
        if self.world_size > 1:
            return False
        self.engine.trainable.abandon()
        self._free_memory()
        return True

    # --- passes without gradients ---

    def forward(
        self,
        samples: Sequence[Sample],
        entropy: bool = False,
        logits: bool = False,
        adapter: str | None = None,
        reference: bool = False,
        candidates: bool = False,
    ) -> ForwardResult:
        """Compute log-probabilities of every sample's targets, without gradients and with dropout off.

        Args:
            samples: this data parallel rank's samples.
            entropy: also return the entropy at every position.
            logits: also return the full logits, fp32 [length, vocabulary]: large, for tests and small models.
            adapter: the adapter of samples that do not name one; without either, the base model.
            reference: use the base model for all samples, whatever adapter they name.
            candidates: also return the log-probabilities of the samples' candidates, which all must have.

        Raises:
            OutOfDeviceMemoryError, torch.OutOfMemoryError: as :meth:`forward_backward`.
        """
        with self._freeing_memory_on_oom():
            return self._step.forward(samples, entropy, logits, adapter, reference, candidates)

    def values(
        self, samples: Sequence[Sample], adapter: str | None = None, reference: bool = False
    ) -> list[torch.Tensor]:
        """Compute a scalar head's value of every token, without gradients and with dropout off: fp32 [length] on the CPU each.

        The value at a position includes the token there; a reward model's score of a sequence is the last one. A classifier's are
        [length, labels], the logits of a sequence being the last ones.

        Args:
            samples: this data parallel rank's samples; :meth:`Sample.scored` builds them.
            adapter: as for :meth:`forward`.
            reference: as for :meth:`forward`.

        Raises:
            ConfigError: the model has no scalar head.
            OutOfDeviceMemoryError, torch.OutOfMemoryError: as :meth:`forward_backward`.
        """
        with self._freeing_memory_on_oom():
            return self._step.values(samples, adapter, reference)

    def divergences(self, samples: Sequence[Sample], loss: Loss, adapter: str | None = None) -> list[torch.Tensor]:
        """Compute the divergence from the teacher of a loss, without gradients and with dropout off: fp32 [length] each.

        Args:
            samples: this data parallel rank's samples, with ``teacher_states``.
            loss: :func:`megascend.training.batch.losses.teacher_loss`.
            adapter: as for :meth:`forward`.
        """
        with self._freeing_memory_on_oom():
            return self._step.divergences(samples, loss, adapter)

    def next_token_logits(self, samples: Sequence[Sample], adapter: str | None = None) -> list[torch.Tensor]:
        """Compute logits of the token that follows each sample, fp32 [vocabulary] each on the CPU, with dropout off.

        No KV cache: sampling a response this way runs prompt and response so far through the model for each token.

        Args:
            samples: this data parallel rank's samples; may be empty on some ranks, not on all. Targets and weights do not matter.
            adapter: the adapter of samples that do not name one; without either, the base model.

        Raises:
            OutOfDeviceMemoryError, torch.OutOfMemoryError: as :meth:`forward_backward`.
        """
        with self._freeing_memory_on_oom():
            return self._step.next_token_logits(samples, adapter)

    def frozen_engine(self, model: str | Path) -> Engine:
        """Build the engine of another model on the ranks and groups of this one, for forward passes. Collective.

        This engine's layout and settings are used; dropout starts again from the seed. The caller closes it.

        Raises:
            ConfigError: a process can hold only one engine of this kind.
        """
        raise ConfigError(f"engine {self.engine.kind} cannot hold a second model beside {self._model_dir}")

    # --- adapters ---

    def add_adapter(self, name: str, lora: Lora | None = None) -> None:
        """Add a LoRA adapter, initialised as peft does: its output is 0. Other adapters are not touched.

        Raises:
            ConfigError: the name is taken or not allowed, a limit is reached, or a target does not exist.
            OutOfDeviceMemoryError: on every rank, if any rank has no memory for it, its gradients and its moments.
        """
        settings = lora or Lora()
        # Checked and agreed on before any rank allocates.
        self._agree(f"add_adapter({name!r}, {settings!r})", lambda: self._adapters().registry.check(name, settings))
        with self._freeing_memory_on_oom():
            self._adapters().add(name, settings)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter with its gradients and moments; frees its memory.

        Raises:
            ConfigError: no adapter has that name.
        """
        self._agree(f"remove_adapter({name!r})", lambda: self._adapters().require(name))
        self._adapters().forget(name)

    def save_adapter(self, name: str, path: str | Path, optimizer: bool = True) -> None:
        """Write an adapter as a directory that ``peft`` loads; it appears only when complete. Any layout can load it.

        Args:
            optimizer: also write the optimizer state, with which :meth:`load_adapter` resumes training exactly.

        Raises:
            ConfigError: the adapter has accumulated gradients, which would be lost.
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
            optimizer: also load its optimizer state and step count, if the directory has them.
            replace: replace an existing adapter of that name; its gradients are dropped.

        Raises:
            ConfigError: as :meth:`add_adapter`.
            CheckpointError, OutOfDeviceMemoryError: on every rank; nothing has been added or replaced.
        """
        with self.groups.monitor.phase("load adapter"), self._freeing_memory_on_oom():
            replacing = ", replace=True" if replace else ""
            call = f"load_adapter({name!r}, {str(path)!r}, {lora!r}, {optimizer=}{replacing})"
            self._agree(call, self._adapters)
            self._adapters().load(name, Path(path), optimizer=optimizer, lora=lora, replace=replace)

    def adapter_as_peft(self, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        """Return an adapter in ``peft``'s form: the content of ``adapter_config.json``, and tensors, float32 on the CPU.

        On rank 0; None on the others. All ranks call it.

        Raises:
            ConfigError: the adapter does not exist.
        """
        self._agree(f"adapter_as_peft({name!r})", lambda: self._adapters().require(name))
        adapters = self._adapters()
        adapter = adapters.unsharded(name)
        if adapter is None:
            return None
        # The directory's name only: the path means nothing on the machine that receives this.
        config = to_config(adapter.lora, adapter.values, self._model_dir.name, adapters.registry.peft_names)
        return config, to_tensors(adapter.values, adapter.lora.rank)

    # --- weights and checkpoints ---

    def named_weights(
        self,
        adapter: str | None = None,
        *,
        adapter_only: bool = False,
        receivers: Receivers = "all",
        device: torch.device | str | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield unsharded weights under their Hugging Face names, one at a time, on the receiving ranks.

        All ranks call it and iterate to the end; ranks that do not receive yield nothing. Names and shapes are those of the
        checkpoint that the model was built from. The dtype is that of ``precision``, whatever the checkpoint has; tensors that
        are fp32 there and not trained (a router's correction bias) stay fp32. A tensor may share the model's memory: never
        modify it, and copy it to keep it beyond the next one.

        Args:
            adapter: merge this adapter, ``W + scaling * B A`` in float32; the model in memory is not changed.
            adapter_only: yield only the adapter's factors, under ``peft``'s names, float32.
            receivers: all ranks, the main one (0), or a set of global ranks.
            device: device of the tensors; default: the model's, for an adapter's factors the CPU. ``meta``: names, shapes and
                dtypes only; no weights are sent.

        Raises:
            ConfigError: the adapter does not exist, or ``adapter_only`` is set without one.
            ProcessGroupError: while iterating: a rank left the stream before its end.
            CheckpointError: while iterating: a number is beyond fp16's range.
        """

        def check() -> None:
            if adapter is not None:
                self._adapters().require(adapter)
            elif adapter_only:
                raise ConfigError("named_weights(adapter_only=True): name the adapter")

        self._agree(f"named_weights({adapter=}, {adapter_only=}, {receivers=})", check)
        if adapter_only and adapter is not None:
            unsharded = self._adapters().unsharded(adapter, everywhere=receivers != "main")
            # All ranks have taken part in the exchange above; only some yield its result.
            receives = receivers in ("all", "main") or self.rank in receivers
            factors = to_tensors(unsharded.values, unsharded.lora.rank) if unsharded is not None and receives else {}
            return ((name, tensor if device is None else tensor.to(device)) for name, tensor in factors.items())
        return self.engine.named_weights(adapter, receivers=receivers, device=device)

    def export_hf(self, path: str | Path, adapter: str | None = None) -> None:
        """Write the model as a Hugging Face directory that ``transformers`` loads; it appears only when complete.

        Tensors have the dtype of ``precision``, as in :meth:`named_weights`, and ``config.json`` names it; ``megascend export
        --dtype`` converts it.

        Args:
            adapter: merge this adapter into the exported weights, ``W + scaling * B A`` in float32; the model in memory is not
                changed.

        Raises:
            CheckpointError: on every rank: ``path`` holds something else or cannot be written, or a number is beyond fp16's
                range.
        """
        with self.groups.monitor.phase("export"):
            call = f"export_hf({str(path)!r}, {adapter=})"
            self._agree(call, lambda: None if adapter is None else self._adapters().require(adapter))
            self._export(Path(path), adapter)

    def check_export(self, path: str | Path, *, replaces: bool = False) -> None:
        """Raise now the error with which :meth:`export_hf` to ``path`` would fail later. Nothing is written. Collective.

        Args:
            replaces: the current content of ``path``, whatever it is, will have been removed by then.

        Raises:
            CheckpointError: on every rank: the tensors of the export would differ from those of the checkpoint that the model
                was built from, a file beside the weights cannot be read, or ``path`` cannot be written.
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
        """Write a checkpoint to resume from, in the background; the directory appears only when complete.

        It holds model, optimizer, schedule position and random state; with adapters, all of them with their optimizers instead
        of the frozen model. Waits for the previous checkpoint first, and returns when the state is copied off the device.

        Args:
            progress: JSON that :meth:`load` returns: the position in the data, for example.
            config: the run's settings, stored for reference.
            hf: also write ``path/hf``, which ``transformers`` loads (not in the background).
            wait: return when the checkpoint is complete.
            after: called on rank 0, on another thread, when ``path`` is in place.

        Raises:
            ConfigError: gradients are accumulated that no ``optimizer_step`` has used; they would be lost.
            CheckpointError: on every rank: ``path`` holds something else or cannot be written, or the previous save failed.
        """
        with self.groups.monitor.phase("save"):
            self._agree(f"save({str(path)!r}, {hf=}, {wait=})", self._require_no_gradients)
            start = time.perf_counter()
            description = checkpoints.describe(self.engine, progress, config)
            # Until the previous checkpoint is written, its copies occupy the staging memory.
            self._saver.finish()
            state = checkpoints.checkpoint_state(self.engine, description, str(self._model_dir))
            write_more = (lambda directory: self._export(directory / "hf", None)) if hf else None
            pending = self._saver.save(Path(path), state, write_more=write_more, after=after)
            pending.stall_s = time.perf_counter() - start
            if wait:
                self._saver.finish()
        return pending

    def prepare_saves(self) -> None:
        """Allocate the host memory that :meth:`save` copies to, in the background. Local; otherwise the first save does it."""
        self._saver.prepare(checkpoints.engine_state(self.engine, loading=False))

    def load(self, path: str | Path) -> dict[str, Any]:
        """Resume from a checkpoint: under the same layout exactly, under another one with the same parameters and moments.

        Every file is compared with its digest first. Adapters of the checkpoint replace the present ones.

        Returns:
            The ``progress`` that was passed to :meth:`save`.

        Raises:
            CheckpointError: on every rank: ``path`` is not a complete checkpoint of this model, or it is damaged.
            ConfigError: one of its adapters exceeds this backend's limits; the present ones are kept.
        """
        with self.groups.monitor.phase("load"):
            self._agree(f"load({str(path)!r})")
            # The checkpoint to load may be the one that is still being written.
            self._saver.finish()
            directory = Path(path)
            # Digests first: a damaged file must not be loaded half.
            saved = manifest.verify(directory, self.groups)
            current = checkpoints.describe(self.engine)
            manifest.check_fits(saved, current, directory)
            checkpoints.load(self.engine, directory, saved, current)
        self.groups.monitor.step = self.step_count + 1
        return saved.progress

    # --- end ---

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error, without waiting long.

        A checkpoint that is being written then gets ``GRACE_S`` seconds, and the process groups, which other ranks may still
        use, ``LEAVE_S``.
        """
        if error is None:
            self.close()
            return
        # close() would wait for save_timeout_s, and could raise in place of the original exception.
        self._saver.abandon(GRACE_S)
        self._destroy(LEAVE_S)

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and destroy the process groups. The object is unusable afterwards.

        While an exception is handled, as in a ``finally`` block, other ranks may still use the groups: this one then waits for
        them for at most ``LEAVE_S`` seconds.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        try:
            self._saver.close()
        finally:
            self._destroy(None if sys.exc_info()[1] is None else LEAVE_S)

    # --- private ---

    def _agree(self, call: str, check: Callable[[], T] = lambda: None) -> T:
        """Run ``check`` and make sure that all ranks are in the same call, before they communicate on the device.

        One small exchange over Gloo.

        Args:
            call: name of the method, with the arguments that must be equal on all ranks.
            check: runs on this rank; if it raises a MegascendError, all ranks do.
        """
        try:
            result = check()
        except MegascendError as problem:
            # The other ranks raise this rank's problem, and this rank the error itself.
            agree(call, self.groups, problem)
            raise
        agree(call, self.groups)
        return result

    def _adapters(self) -> AdapterSet:
        trainable: Trainable = self.engine.trainable
        if not isinstance(trainable, AdapterSet):
            if trainable.frozen:
                raise ConfigError(
                    f"adapters of engine {self.engine.kind!r} are not a megascend.training.lora.adapter_set.AdapterSet"
                )
            raise ConfigError(
                "this backend trains the model itself; to train adapters, construct "
                f"{type(self).__name__}(adapters=megascend.Adapters())"
            )
        return trainable

    def _require_no_gradients(self) -> None:
        if names := self.engine.trainable.with_gradients():
            adapter = f" for adapter {names[0]!r}" if names[0] else ""
            raise ConfigError(
                f"save: call optimizer_step() first{adapter}; accumulated gradients are not part of a checkpoint"
            )

    def _export(self, path: Path, adapter: str | None) -> None:
        self.engine.export(path, adapter)
        if (template := self.chat_template) is not None:
            self.from_rank_0(lambda: write_chat_template(path, template))
        # By all ranks: of a stream each learns the ends at its own time.
        self.from_rank_0(lambda: write_ends(path, path, self.ends))

    @contextmanager
    def _freeing_memory_on_oom(self) -> Iterator[None]:
        """Free cached device memory if the block raises OutOfDeviceMemoryError, which all ranks do together."""
        try:
            yield
        except OutOfDeviceMemoryError:
            self._free_memory()
            raise

    def _free_memory(self) -> None:
        """Free cached device memory, and memory that only makes steps faster, such as CUDA graphs."""
        # First the engine's, which goes to the cache that is freed next.
        self.engine.release_memory()
        self.platform.free_cached_memory()

    def _destroy(self, limit_s: float | None = None) -> None:
        self.engine.close()
        self.groups.destroy(limit_s)
