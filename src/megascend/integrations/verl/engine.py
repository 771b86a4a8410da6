"""verl's ``BaseEngine`` on megascend's Megatron backend, registered for ``engine=megatron`` and the vendor ``megascend``.

verl imports it through :mod:`megascend.integrations.verl.plugin`. docs/integrations/verl.md describes its selection, the
translation of verl's settings, and unsupported features.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from megascend.backends import MegatronBackend
from megascend.config import Adapters, Batching
from megascend.engines.megatron.groups import require_none_alive
from megascend.errors import ConfigError, ProcessGroupError
from megascend.integrations.verl import losses
from megascend.integrations.verl.batches import Batch
from megascend.integrations.verl.settings import translate
from megascend.integrations.verl.settings_table import VENDOR
from megascend.models.checkpoint_files.files import tensor_headers
from megascend.models.checkpoint_files.hub import snapshot
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.checkpoint_files.scalar_head import WEIGHT, HeadKind
from megascend.runtime.distributed.objects import gather_objects
from megascend.runtime.topology.topology import plan
from megascend.training.batch.sample import Sample
from megascend.training.kernels.host_copy import to_device

log = logging.getLogger(__name__)

ADAPTER = "verl"
"""Name of the single adapter of a LoRA run."""

DEVICES = ["cpu", "cuda", "npu"]
STATE, HF_MODEL = "megascend", "huggingface"
"""Subdirectories of a verl checkpoint: the backend's state, and the Hugging Face export."""
CRITICS: dict[HeadKind, str] = {
    "scalar": "a critic with the head of its checkpoint",
    "new_token_classifier": "a critic with a new head",
}


@EngineRegistry.register("language_model", "megatron", device=DEVICES, vendor=VENDOR)
class MegascendEngine(BaseEngine):
    """A language model that verl trains, on all ranks of the default process group."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.settings = translate(
            _as_mapping(model_config),
            _as_mapping(engine_config),
            _as_mapping(optimizer_config),
            _as_mapping(checkpoint_config),
            get_device_name(),
        )
        self._model_dir = snapshot(model_config.local_path)
        # Before any weights are read: only the headers of the checkpoint's files.
        self._head: HeadKind = critic_head(self._model_dir) if self.settings.value_model else "lm"
        info = inspect_checkpoint(self._model_dir, self._head)
        self._topology = plan(self.settings.parallel, dist.get_world_size(), info.shape)
        self._coordinates = self._topology.coordinates(dist.get_rank())
        self._backend: MegatronBackend | None = None
        self._schedule: LearningRateSchedule | None = None
        self._saved: list[Path] = []  # directories of checkpoints, oldest first
        self._adapter_on = True
        self.mode: str | None = None

    # --- construction ---

    def initialize(self) -> None:
        """Load the model, and create optimizer and scheduler. A second call reloads the model from its directory."""
        if self._backend is not None:
            self._backend.close()
        # After the close above: reloading this engine's own model is allowed.
        _require_own_process()
        settings = self.settings
        if settings.lora is not None:
            adapters = Adapters(max_count=1, max_rank=settings.lora.rank, targets=settings.lora.targets)
        else:
            # Frozen: an unused adapter slot, because a backend with adapters has no optimizer for the model itself.
            adapters = Adapters(max_count=1, max_rank=1) if settings.forward_only else None
        self._backend = MegatronBackend(
            self._model_dir,
            parallel=settings.parallel,
            precision=settings.precision,
            optimizer=settings.adam,
            recompute=settings.recompute,
            moe=settings.moe,
            batching=Batching(packing=settings.packing),
            adapters=adapters,
            seed=settings.seed,
            head=self._head,
        )
        if settings.lora is not None and settings.adapter_path:
            self._backend.load_adapter(ADAPTER, settings.adapter_path, settings.lora, optimizer=False)
        elif settings.lora is not None:
            self._backend.add_adapter(ADAPTER, settings.lora)
        self._schedule = None if settings.forward_only else LearningRateSchedule(self.optimizer_config)
        if self._backend.rank == 0:
            head = "" if self._head == "lm" else f", {CRITICS[self._head]}"
            # Printed, not logged: verl falls back to its own engine silently, and this line is how a user can tell.
            print(f"verl's engine is megascend: {self._topology}, {settings.precision}{head}", flush=True)

    @property
    def backend(self) -> MegatronBackend:
        """Return the training backend, which :meth:`initialize` makes."""
        if self._backend is None:
            raise ConfigError("verl's engine has no model yet: initialize() comes first")
        return self._backend

    # --- ranks ---

    def get_data_parallel_rank(self) -> int:
        return self._coordinates.data

    def get_data_parallel_size(self) -> int:
        return self._topology.data

    def get_data_parallel_group(self) -> Any:
        # Without context parallel ranks: verl splits a batch by sequences, and those ranks share sequences.
        return self.backend.groups.device_group("dp")

    def is_mp_src_rank_with_outputs(self) -> bool:
        # verl collects outputs and metrics from these ranks only, one of each data parallel rank.
        coordinates = self._coordinates
        return (
            coordinates.tensor == 0 and coordinates.context == 0 and coordinates.pipeline == self._topology.pipeline - 1
        )

    # --- modes and devices ---

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload)

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _TrainMode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "eval", **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Do nothing on a CPU; refuse offloading on other devices."""
        # verl's base class checks the combination of arguments.
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if device != get_device_name() and (model or optimizer or grad):
            raise ConfigError(
                f"verl asks for the model or the optimizer on {device}; with megascend they stay on {get_device_name()}: place "
                "trainer and rollout on devices of their own"
            )

    # --- a step ---

    def optimizer_zero_grad(self) -> None:
        self.backend.discard_gradients()

    def optimizer_step(self) -> float:
        """Take a step; return the gradient norm before clipping, which is not finite if the step was skipped."""
        if self._schedule is None:
            raise ConfigError("optimizer_step of an engine with forward_only=True")
        # verl owns the schedule: the backend's own rate is never used.
        result = self.backend.optimizer_step(lr=self._schedule.lr)
        if result.skipped:
            log.warning(
                "megascend: gradients are not finite, the step is skipped (%d in a row)", result.skipped_in_a_row
            )
        return result.grad_norm

    def lr_scheduler_step(self) -> float:
        if self._schedule is None:
            raise ConfigError("lr_scheduler_step of an engine with forward_only=True")
        return self._schedule.advance()

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Return verl's losses and outputs of this data parallel rank's sequences; {} before the last pipeline stage."""
        return self._as_verl(self._run(data, loss_function, forward_only))

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> dict[str, Any]:
        """Train on a batch. Losses are read after the step, which waits for its norm anyway, so the host synchronizes once."""
        # As in verl's own train_batch: serializing a batch loses the ragged dimension of this field.
        maybe_fix_3d_position_ids(data)
        self.optimizer_zero_grad()
        collected = self._run(data, loss_function, forward_only=False)
        grad_norm = self.optimizer_step()
        outputs = self._as_verl(collected)
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"]["grad_norm"] = grad_norm
        return outputs

    def _run(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> losses.BatchResults:
        """Run forward and backward without a device synchronization, unless ``forward_only``."""
        if loss_function is None and not forward_only:
            raise ConfigError("forward_backward_batch: a backward pass needs a loss_function")
        backend, topology = self.backend, self._topology
        batch = Batch(data)
        is_critic = self.settings.value_model
        entropy = not is_critic and bool(tensordict_utils.get(batch.data, "calculate_entropy", default=False))
        fusable = not (forward_only or is_critic or entropy)
        # Decided per rank, by its own sequences; _agree() below makes all ranks take the same path.
        weights = losses.cross_entropy_weights(batch, loss_function) if fusable else None
        tokens, cross_entropy = self._agree(batch, weights is not None)
        adapter = ADAPTER if self.settings.lora is not None and self._adapter_on else None
        loss = None
        if loss_function is not None:
            group, device = self.get_data_parallel_group(), backend.groups.device
            loss = losses.BatchLoss(batch, loss_function, group, device, topology.context, topology.data, tokens)
        if forward_only:
            return self._forward(batch, batch.samples(adapter), entropy, loss)
        assert loss is not None
        if cross_entropy:
            backend.forward_backward(batch.samples(adapter, weights), loss.as_cross_entropy())
        else:
            loss_input = "values" if is_critic else "logprobs"
            backend.forward_backward(batch.samples(adapter), loss.as_loss(entropy, loss_input))
        # Read after the optimizer step, so that the copy does not stall the device.
        loss.results.start_copy()
        return loss.results

    def _as_verl(self, collected: losses.BatchResults) -> dict[str, Any]:
        return collected.as_verl() if self._coordinates.pipeline == self._topology.pipeline - 1 else {}

    def _forward(
        self, batch: Batch, samples: list[Sample], entropy: bool, loss: losses.BatchLoss | None
    ) -> losses.BatchResults:
        """Run forward. The output at position t follows token t: the log-probability of token t + 1, or the value at t."""
        if self.settings.value_model:
            host_outputs = {"values": self.backend.values(samples)}
        else:
            scores = self.backend.forward(samples, entropy=entropy)
            host_outputs = {"log_probs": scores.logprobs, **({"entropy": scores.entropy} if scores.entropy else {})}
        outputs = {
            name: to_device(torch.cat(values), self.backend.groups.device) for name, values in host_outputs.items()
        }
        if loss is not None:
            loss.evaluate_batch(outputs)
            return loss.results
        collected = losses.BatchResults()
        row_outputs = {name: values.split(batch.lengths) for name, values in outputs.items()}
        no_loss = torch.ones(())  # the placeholder that verl's own engines return
        collected.add(losses.VerlLossResult(range(len(samples)), row_outputs, no_loss, {}))
        return collected

    def _agree(self, batch: Batch, cross_entropy: bool) -> tuple[float, bool]:
        """Agree on batch-wide values in one small exchange over Gloo.

        Args:
            cross_entropy: True if the loss is a cross entropy on this rank's batch.

        Returns:
            Number of trained tokens of all ranks, and whether the loss is a cross entropy on all of them.
        """
        backend = self.backend
        local = (
            self._coordinates.data,
            batch.trained_tokens(),
            batch.token_budget(self._topology.context),
            cross_entropy,
        )
        gathered = gather_objects(local, "world", backend.groups, "verl's batch")
        # By data parallel rank: tensor, context and pipeline ranks report the same sequences again.
        tokens = sum({data: tokens for data, tokens, _, _ in gathered}.values())
        # The same budget on all ranks, or they would run different numbers of micro batches.
        backend.set_micro_batch_tokens(max(budget for _, _, budget, _ in gathered))
        # verl's losses divide by batch_num_tokens and multiply by dp_size; its own engine sets them, too.
        batch.set_engine_values(sp_size=self._topology.context, batch_num_tokens=tokens, dp_size=self._topology.data)
        return tokens, tokens > 0 and all(flag for _, _, _, flag in gathered)

    # --- weights ---

    def get_per_tensor_param(
        self, base_sync_done: bool = False, **_: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """Return an iterator over Hugging Face names and unsharded tensors; all ranks must iterate to the end.

        With LoRA and ``merge`` the adapter is merged. Without ``merge`` the base model is returned first and, once
        ``base_sync_done``, only the adapter, under peft's names.
        """
        lora = self.settings.lora
        if lora is None:
            return self.backend.named_weights(), None
        if self.settings.merge:
            return self.backend.named_weights(ADAPTER), None
        from verl.utils.megatron_peft_utils import build_peft_config_for_vllm

        # In the form that verl's rollout passes on to vLLM.
        config = build_peft_config_for_vllm(self.model_config.lora)
        return self.backend.named_weights(ADAPTER if base_sync_done else None, adapter_only=base_sync_done), config

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Disable the adapter within the block: the frozen base model is the reference of a LoRA run."""
        before, self._adapter_on = self._adapter_on, False
        try:
            yield
        finally:
            self._adapter_on = before

    # --- checkpoints ---

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:  # fmt: skip
        """Save model, optimizer, schedule and random state to ``local_path/megascend``; with ``hf_model`` also an export."""
        _refuse_hdfs(hdfs_path)
        backend, directory = self.backend, Path(local_path)
        # On rank 0 only, with the error on all ranks: the directory is shared.
        backend.from_rank_0(lambda: directory.mkdir(parents=True, exist_ok=True))
        progress = {"global_step": global_step, "scheduler_steps": self._schedule.steps if self._schedule else 0}
        backend.save(directory / STATE, progress=progress, wait=not self.settings.async_save)
        if self.settings.hf_model:
            adapter = ADAPTER if self.settings.lora is not None else None
            backend.export_hf(directory / HF_MODEL, adapter)
        surplus = self._surplus(directory, max_ckpt_to_keep)
        backend.from_rank_0(lambda: [shutil.rmtree(path) for path in surplus])

    def _surplus(self, directory: Path, limit: int | None) -> list[Path]:
        """Record a checkpoint; return the oldest ones beyond ``limit``, to be deleted, as verl's engines do."""
        self._saved = [*(path for path in self._saved if path != directory), directory]
        # None, 0 and negative numbers keep all, as in verl's own checkpoint managers.
        if not limit or limit < 0:
            return []
        surplus, self._saved = self._saved[:-limit], self._saved[-limit:]
        return surplus

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:
        """Resume from :meth:`save_checkpoint`'s directory, under any layout. A local directory is never deleted."""
        _refuse_hdfs(hdfs_path)
        progress = self.backend.load(Path(local_path) / STATE)
        if not self.settings.forward_only:
            self._schedule = LearningRateSchedule(self.optimizer_config)
            if progress["scheduler_steps"]:
                # Recomputed from the settings, not restored: see use_checkpoint_opt_param_scheduler in the table.
                self._schedule.advance(progress["scheduler_steps"])


@EngineRegistry.register("value_model", "megatron", device=DEVICES, vendor=VENDOR)
class MegascendValueEngine(MegascendEngine):
    """A critic: a token classifier with one label, which returns values instead of log-probabilities."""


class LearningRateSchedule:
    """Megatron-Core's scheduler with verl's settings."""

    def __init__(self, optimizer_config: Any) -> None:
        # Megatron's scheduler expects an optimizer, and writes to its parameter groups: this object takes its place.
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0, "weight_decay": 0.0}]
        self.steps = 0
        self._scheduler = get_megatron_optimizer_param_scheduler(self, optimizer_config)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.param_groups[0]["lr"])

    def advance(self, steps: int = 1) -> float:
        """Advance by ``steps``; return the new learning rate."""
        self._scheduler.step(steps)
        self.steps += steps
        return self.lr


def critic_head(model_dir: Path) -> HeadKind:
    """Return the kind of head in a critic's checkpoint, or a new one, as in verl's other engines. Reads headers only."""
    if WEIGHT not in tensor_headers(model_dir):
        return "new_token_classifier"
    head = inspect_checkpoint(model_dir, "scalar").scalar_head
    assert head is not None
    if head.dropout:
        raise ConfigError(
            f"{model_dir}/config.json: classifier_dropout is {head.dropout:g} (transformers' default if unset), and a critic of "
            "verl has none; set classifier_dropout: 0"
        )
    return "scalar"


class _TrainMode(BaseEngineCtx):
    """Context of train mode, which discards gradients at its end."""

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        # Also after an error: gradients of half a batch must not be added to the next step's.
        if self.zero_grad_on_exit or exc_type is not None:
            self.engine.optimizer_zero_grad()
        super().__exit__(exc_type, exc_val, exc_tb)


def _require_own_process() -> None:
    try:
        require_none_alive()
    except ProcessGroupError as error:
        raise ConfigError(
            "verl has put two models into one process, which holds one Megatron backend; set trainer.use_v1=True and "
            "trainer.v1.trainer_mode=sync"
        ) from error


def _refuse_hdfs(path: str | None) -> None:
    if path is not None:
        raise ConfigError(f"hdfs_path={path!r}: checkpoints are written to, and read from, local directories")


def _as_mapping(config: Any) -> Mapping[str, Any]:
    return {} if config is None else {name: config[name] for name in config}
