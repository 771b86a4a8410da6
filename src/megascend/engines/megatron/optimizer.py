"""Megatron's optimizer; a step is taken on all ranks or on none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megascend.changes import patch
from megascend.config import Adam, Precision, Schedule
from megascend.config.training import learning_rate
from megascend.engines.base import DTYPES
from megascend.engines.common.blockwise_adamw import QUANTISED, BlockwiseAdamW
from megascend.engines.common.offloaded_adam import OffloadedAdam
from megascend.engines.common.weight_settings import MainParameter, MatrixUpdates, WeightSettings, matrix_optimizer
from megascend.engines.megatron.routers import Routers
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.runtime.bootstrap import current_runtime
from megascend.runtime.distributed.objects import all_reduce_numbers, raise_on_all_ranks
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.training.batch.gradient_scaling import INITIAL_LOSS_SCALE
from megascend.training.batch.results import StepResult

BY_WEIGHT = "megascend_weight_settings"
"""Key of the :class:`WeightSettings` in a parameter group of Megatron's Adam."""


@dataclass(frozen=True)
class ParameterState:
    """Optimizer state of one parameter, or of a part of it, on this rank; live tensors, on the device or in host memory.

    Attributes:
        parameter: the model's.
        start: index in the flattened parameter at which the state begins.
        divided: the state is sharded over data parallel ranks, each with a run of it.
        tensors: ``exp_avg`` and ``exp_avg_sq`` (8-bit ones as fp32 copies in host memory), or ``momentum_buffer`` of Muon, and
            for 16-bit parameters ``param``, the float32 main parameter.
    """

    parameter: torch.nn.Parameter
    start: int
    divided: bool
    tensors: dict[str, torch.Tensor]


class MegatronOptimizer:
    """AdamW, and Muon, over the model chunks of this rank. A step is taken on all ranks or on none.

    Args:
        page_locked: offloaded state is in page-locked memory.

    Attributes:
        skipped_in_a_row: steps skipped since the last update.
    """

    def __init__(
        self,
        chunks: list[Any],
        adam: Adam,
        schedule: Schedule,
        precision: Precision,
        groups: ProcessGroups,
        routers: Routers,
        *,
        page_locked: bool = False,
    ) -> None:
        learning_rate(schedule, adam.lr, 0)  # raises for a schedule without an end now, not at the first step
        self._chunks, self._adam, self._schedule, self._groups = chunks, adam, schedule, groups
        self._routers = routers
        self._scales_loss = precision == "fp16"
        self.megatron = get_megatron_optimizer(optimizer_config(adam, precision), chunks)
        if adam.moments == "8bit":
            self._quantise_moments()
        if adam.offloaded_share:
            self._offload(page_locked=page_locked)
        self._matrices: MatrixUpdates | None = None
        self._matrix_mains: list[tuple[Any, Tensor]] = []  # (one of Megatron's optimizers, main parameter)
        self.skipped_in_a_row = 0

    @cached_property
    def _mains(self) -> list[tuple[Any, torch.nn.Parameter, int, Tensor]]:
        """List (Megatron's optimizer, model's parameter, start of its run, main parameter) of this rank."""
        return [(part, *names) for part in self._parts() for names in _main_parameters(part)]

    def mains(self) -> Iterator[tuple[torch.nn.Parameter, int, Tensor]]:
        """Yield (model's parameter, start of its run, main parameter) of every parameter of which this rank has a part."""
        for _, parameter, start, main in self._mains:
            yield parameter, start, main

    def main_values(self) -> Iterator[tuple[torch.nn.Parameter, int, Tensor]]:
        """Yield (16-bit parameter of the model, start of a run, its live main parameter), wherever that is in memory."""
        for part, parameter, start, main in self._mains:
            if parameter.dtype == torch.float32:
                continue
            if isinstance(part.optimizer, OffloadedAdam):
                for offset, tensors in part.optimizer.state_of(main).runs():
                    yield parameter, start + offset, tensors["param"]
            else:
                yield parameter, start, main.detach().view(-1)

    def set_by_weight(
        self, parameters: Sequence[tuple[MainParameter, WeightSettings]], info: ModelInfo, precision: Precision
    ) -> None:
        """Apply settings of single weights. Collective; before the first step.

        Args:
            parameters: those of :meth:`mains`, with their settings.
        """
        settings_of = {id(parameter.main): settings for parameter, settings in parameters}
        mains = self._mains  # before Megatron's parameter groups, from which it is computed, are divided
        for part in self._parts():
            divided: list[dict[str, Any]] = []
            for group in part.optimizer.param_groups:
                by_settings: dict[WeightSettings | None, list[Tensor]] = {}
                for main in group["params"]:
                    by_settings.setdefault(settings_of[id(main)], []).append(main)
                # A group without parameters is kept, as other ranks may have some.
                for settings, members in (by_settings or {None: []}).items():
                    divided.append({**group, "params": members, BY_WEIGHT: settings})
            part.optimizer.param_groups[:] = divided
        self._matrices = matrix_optimizer(self._adam, parameters, self._groups, info, precision)
        part_of = {id(main): (part, main) for part, _, _, main in mains}
        self._matrix_mains = [part_of[id(parameter.main)] for parameter, settings in parameters if settings.matrix]

    def _quantise_moments(self) -> None:
        """Replace the provider's Adam, which has no state yet, by one with 8-bit moments over the same parameter groups."""
        adam = self._adam
        for part in self._parts():
            quantised = BlockwiseAdamW([{"params": []}], lr=adam.lr, betas=adam.betas, eps=adam.eps)
            # Assigned, as Megatron does: torch's constructor refuses views, which main parameters are.
            # Megatron's groups without weight decay are those of biases and one-dimensional weights.
            quantised.param_groups[:] = [
                {**group, "betas": adam.betas, "eps": adam.eps, QUANTISED: group.get("wd_mult", 1.0) != 0}
                for group in part.optimizer.param_groups
            ]
            patch(part, "optimizer", quantised, "its moments have 8 bits")

    def _offload(self, *, page_locked: bool) -> None:
        """Move state to host memory, and let the provider's Adam update it in chunks. Collective."""
        problem = None
        try:
            for part in self._parts():
                weights = {}
                for parameter, start, main in _main_parameters(part):
                    weights[id(main)] = parameter.data.view(-1)[start : start + main.numel()]
                adam, provider = part.optimizer, current_runtime("the optimizer").provider
                assert provider is not None, "Megatron runs with one"
                streamed = OffloadedAdam(
                    adam,
                    weights,
                    share=self._adam.offloaded_share,
                    page_locked=page_locked,
                    stored_count=partial(provider.adam_count, adam),
                )
                patch(part, "optimizer", streamed, "its state is in host memory")
                if hasattr(part, "_copy_main_params_to_model_params"):
                    patch(
                        part, "_copy_main_params_to_model_params", _do_nothing, "its Adam writes the model's parameters"
                    )
        except ConfigError as error:  # too little host memory, perhaps on this rank only
            problem = error
        raise_on_all_ranks(problem, self._groups, "the offload of optimizer state")

    def scale_loss(self, loss: Any) -> Any:
        """Return ``loss`` times the fp16 loss scale (1 for other precisions)."""
        return self.megatron.scale_loss(loss)

    def step(self, number: int, reduced: bool, lr: float | None = None) -> StepResult:
        """Reduce the gradients, then update the parameters, unless any rank's gradients are not finite.

        Args:
            number: previous steps, the position in the schedule.
            reduced: Megatron's schedule has already reduced the gradients (``overlap_grad_reduce``).
            lr: learning rate of this step, in place of the schedule's.
        """
        if not reduced:
            self._groups.monitor.call("grad reduce", finalize_model_grads, self._chunks)
        with self._groups.monitor.phase("update"):
            return self._update(learning_rate(self._schedule, self._adam.lr, number) if lr is None else lr)

    def _update(self, lr: float) -> StepResult:
        self._set_hyperparameters(lr)
        loss_scale = float(self.megatron.get_loss_scale()) if self._scales_loss else 1.0
        # Megatron's own step() checks gradients for fp16 only. Here a norm that is not finite on any rank skips the step on all.
        overflow = bool(self.megatron.prepare_grads())
        grad_norm = math.inf if overflow else float(self.megatron.get_grad_norm())
        flags = [float(math.isfinite(grad_norm))]
        finite = all_reduce_numbers(flags, "world", self._groups, "min", "the check for finite gradients")[0] == 1.0
        if finite:
            # After the check, since clipping by a norm that is not finite would write NaN into every gradient.
            self._clip(grad_norm)
            if self._matrices is not None:
                self._matrices.step([main.grad for _, main in self._matrix_mains], lr)
                for _, main in self._matrix_mains:  # Adam does not change parameters without a gradient
                    main.grad = None
            self.megatron.step_with_ready_grads()
            self._routers.update_bias()
        else:
            # The step was skipped for another rank's gradients: report that, not this rank's finite norm.
            grad_norm = grad_norm if not math.isfinite(grad_norm) else math.inf
            self._routers.forget_counts()
        self.zero_grad()
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        return StepResult(grad_norm, lr, not finite, self.skipped_in_a_row, loss_scale)

    def zero_grad(self) -> None:
        """Zero the gradient buffer of every model chunk, and the optimizer's copies of gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def discard(self) -> None:
        """Drop all gradients, and the routers' token counts."""
        self.zero_grad()
        self._routers.forget_counts()

    def counters(self) -> dict[str, Any]:
        """Return updates so far, steps skipped in a row, and fp16's loss scaler."""
        counters = {"updates": self.updates, "skipped_in_a_row": self.skipped_in_a_row, "scaler": self.scaler_state}
        return counters | self._adam.kind_counter

    def restore(self, counters: dict[str, Any]) -> None:
        """Continue from :meth:`counters`; moments have been loaded."""
        for part in self._parts():
            if isinstance(part.optimizer, BlockwiseAdamW):
                part.optimizer.finish_loading()
        self.updates, self.scaler_state = counters["updates"], counters["scaler"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]

    def create_state(self) -> None:
        """Allocate the state of all parameters, as the first step would; a no-op if it exists."""
        for number, (part, main) in enumerate(self._matrix_mains):
            assert self._matrices is not None
            # Moments are allocated for parameters that have no state.
            part.optimizer.state[main]["momentum_buffer"] = self._matrices.momentum[number]
        for optimizer in self._parts():
            if isinstance(optimizer.optimizer, BlockwiseAdamW):
                optimizer.optimizer.create_state()
            elif not isinstance(optimizer.optimizer, OffloadedAdam):  # which has its state from the beginning
                optimizer.init_state_fn(optimizer.optimizer, optimizer.config)

    def parameter_states(self, *, loading: bool) -> Iterator[ParameterState]:
        """Yield the state of every parameter of which this rank has a part; created if it does not exist yet.

        Args:
            loading: the tensors will be filled from a checkpoint, before :meth:`restore`.
        """
        self.create_state()
        for part in self._parts():
            if isinstance(part.optimizer, BlockwiseAdamW):
                part.optimizer.begin_loading()
        for part, parameter, start, main in self._mains:
            divided = hasattr(part, "gbuf_ranges")
            if isinstance(part.optimizer, OffloadedAdam):
                for offset, tensors in part.optimizer.state_of(main).runs():
                    yield ParameterState(parameter, start + offset, divided, tensors)
                continue
            if isinstance(part.optimizer, BlockwiseAdamW):
                tensors = part.optimizer.checkpoint_tensors(main, loading=loading)
            else:
                state = part.optimizer.state[main]
                names = ("momentum_buffer",) if "momentum_buffer" in state else ("exp_avg", "exp_avg_sq")
                tensors = {name: state[name] for name in names}
            # An fp32 parameter is its own main parameter, and is in the checkpoint already.
            if parameter.dtype != torch.float32:
                tensors["param"] = main.detach()
            yield ParameterState(parameter, start, divided, tensors)

    @property
    def updates(self) -> int:
        """Steps that changed the parameters, Adam's count for its bias correction."""
        for optimizer in self._parts():
            for group in optimizer.optimizer.param_groups:
                if "step" in group:
                    return int(group["step"])
            for state in optimizer.optimizer.state.values():
                if "step" in state:
                    return int(state["step"])
        return 0

    @updates.setter
    def updates(self, count: int) -> None:
        for optimizer in self._parts():
            if isinstance(optimizer.optimizer, BlockwiseAdamW | OffloadedAdam):
                for group in optimizer.optimizer.param_groups:
                    group["step"] = count
                continue
            provider = current_runtime("the optimizer").provider
            assert provider is not None, "Megatron runs with one"
            # torch's Adam has a step count per parameter, Transformer Engine's and MindSpeed's one per group.
            by_parameter = isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW)
            for group in optimizer.optimizer.param_groups:
                if not by_parameter:
                    group["step"] = provider.adam_count(optimizer.optimizer, count)
                adams = [main for main in group["params"] if "momentum_buffer" not in optimizer.optimizer.state[main]]
                for parameter in adams if by_parameter else []:
                    optimizer.optimizer.state[parameter]["step"] = torch.tensor(float(count))

    @property
    def scaler_state(self) -> dict[str, float] | None:
        """The loss scale of fp16 and its counters; None for other precisions."""
        scaler = getattr(self._parts()[0], "grad_scaler", None) if self._scales_loss and self._parts() else None
        return None if scaler is None else {name: float(value) for name, value in scaler.state_dict().items()}

    @scaler_state.setter
    def scaler_state(self, state: dict[str, float] | None) -> None:
        if state is None:
            return
        for optimizer in self._parts():
            scale = torch.tensor([state["scale"]], dtype=torch.float32)
            counters = {name: int(value) for name, value in state.items() if name != "scale"}
            optimizer.grad_scaler.load_state_dict({"scale": scale, **counters})

    def _parts(self) -> list[Any]:
        """Return Megatron's chained optimizers (experts have their own), without those that have no parameters."""
        chain = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [optimizer for optimizer in chain if not optimizer.is_stub_optimizer]

    def _set_hyperparameters(self, lr: float) -> None:
        """Set learning rate and weight decay of all parameter groups, in place of Megatron's own scheduler."""
        default = WeightSettings(1.0, self._adam.weight_decay)
        for group in self.megatron.param_groups:
            settings = group.get(BY_WEIGHT) or default
            # Groups keep Megatron's factors: no weight decay on biases and norms is a wd_mult of 0.
            group["lr"] = lr * settings.lr_scale * group.get("lr_mult", 1.0)
            group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)

    def _clip(self, grad_norm: float) -> None:
        if self._adam.max_grad_norm == 0:
            return
        # Every optimizer of the chain clips by the norm over all of them.
        for optimizer in getattr(self.megatron, "chained_optimizers", [self.megatron]):
            parameters = optimizer.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self._adam.max_grad_norm, total_norm=grad_norm)


def _do_nothing() -> None:
    pass


def _main_parameters(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, torch.Tensor]]:
    """Yield (model's parameter, start of its run, tensor that Adam updates) of one of Megatron's optimizers."""
    if hasattr(optimizer, "gbuf_ranges"):  # the distributed optimizer
        for ranges in optimizer.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for parameter, param_ranges in bucket["param_map"].items():
                        group, order = optimizer.model_param_group_index_map[parameter]
                        main = optimizer.optimizer.param_groups[group]["params"][order]
                        yield parameter, param_ranges["param"].start, main
        return
    sixteen_bits = zip(
        getattr(optimizer, "float16_groups", []), getattr(optimizer, "fp32_from_float16_groups", []), strict=True
    )
    model_parameters = {
        id(main): model for models, mains in sixteen_bits for model, main in zip(models, mains, strict=True)
    }
    for group in optimizer.optimizer.param_groups:
        for main in group["params"]:
            yield model_parameters.get(id(main), main), 0, main


def optimizer_config(adam: Adam, precision: Precision) -> OptimizerConfig:
    """Build Megatron's settings for ``adam``; main parameters, gradients and moments are always fp32."""
    return OptimizerConfig(
        optimizer="adam",
        lr=adam.lr,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.betas[0],
        adam_beta2=adam.betas[1],
        adam_eps=adam.eps,
        clip_grad=adam.max_grad_norm,
        params_dtype=DTYPES[precision],
        fp16=precision == "fp16",
        bf16=precision == "bf16",
        initial_loss_scale=INITIAL_LOSS_SCALE,
        use_distributed_optimizer=adam.distributed,
        overlap_param_gather=adam.overlap_param_gather,
    )
