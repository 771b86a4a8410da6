"""Megatron's optimizer; a step is made by all ranks or by none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megascend.batch.gradient_scaling import INITIAL_LOSS_SCALE
from megascend.batch.results import StepResult
from megascend.bootstrap import current_runtime
from megascend.config import Adam, Precision, Schedule
from megascend.config.training import learning_rate
from megascend.distributed.objects import all_reduce_numbers
from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.base import DTYPES
from megascend.engines.megatron.routers import Routers


@dataclass(frozen=True)
class ParameterState:
    """Optimizer state of one parameter on this rank; live tensors.

    Attributes:
        parameter: the model's.
        start: index in the flattened parameter at which the state begins.
        divided: the state is sharded over data parallel ranks, each with a run of it.
        tensors: ``exp_avg``, ``exp_avg_sq`` and, for 16-bit parameters, ``param``, the float32 main parameter.
    """

    parameter: torch.nn.Parameter
    start: int
    divided: bool
    tensors: dict[str, torch.Tensor]


class MegatronOptimizer:
    """AdamW over the model chunks of this rank: one step for all ranks, or none.

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
    ) -> None:
        learning_rate(schedule, adam.lr, 0)  # raises for a schedule without an end now, not at the first step
        self._chunks, self._adam, self._schedule, self._groups = chunks, adam, schedule, groups
        self._routers = routers
        self._scales_loss = precision == "fp16"
        self.megatron = get_megatron_optimizer(optimizer_config(adam, precision), chunks)
        self.skipped_in_a_row = 0

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
        return {"updates": self.updates, "skipped_in_a_row": self.skipped_in_a_row, "scaler": self.scaler_state}

    def restore(self, counters: dict[str, Any]) -> None:
        """Continue from :meth:`counters`; moments have been loaded."""
        self.updates, self.scaler_state = counters["updates"], counters["scaler"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]

    def create_state(self) -> None:
        """Allocate Adam's moments, as the first step would; a no-op if they exist."""
        for optimizer in self._parts():
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)

    def parameter_states(self) -> Iterator[ParameterState]:
        """Yield the state of every parameter of which this rank has a part; created if it does not exist yet."""
        self.create_state()
        for optimizer in self._parts():
            for parameter, start, main in _main_parameters(optimizer):
                moments = optimizer.optimizer.state[main]
                tensors = {name: moments[name] for name in ("exp_avg", "exp_avg_sq")}
                # An fp32 parameter is its own main parameter, and is in the checkpoint already.
                if parameter.dtype != torch.float32:
                    tensors["param"] = main.detach()
                yield ParameterState(parameter, start, hasattr(optimizer, "gbuf_ranges"), tensors)

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
            provider = current_runtime("the optimizer").provider
            assert provider is not None, "Megatron runs with one"
            # torch's Adam has a step count per parameter, Transformer Engine's and MindSpeed's one per group.
            by_parameter = isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW)
            for group in optimizer.optimizer.param_groups:
                if not by_parameter:
                    group["step"] = provider.adam_count(optimizer.optimizer, count)
                for parameter in group["params"] if by_parameter else []:
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
        """Set learning rate and weight decay of all parameter groups, as Megatron's own scheduler would, which is not used."""
        for group in self.megatron.param_groups:
            # Groups keep Megatron's factors: no weight decay on biases and norms is a wd_mult of 0.
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._adam.weight_decay * group.get("wd_mult", 1.0)

    def _clip(self, grad_norm: float) -> None:
        if self._adam.max_grad_norm == 0:
            return
        # Every optimizer of the chain clips by the norm over all of them.
        for optimizer in getattr(self.megatron, "chained_optimizers", [self.megatron]):
            parameters = optimizer.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self._adam.max_grad_norm, total_norm=grad_norm)


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
