"""AdamW, also with 8-bit moments, and Muon on fp32 main parameters, for engines without Megatron; a step updates all or none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megascend.config import Adam, Precision, Schedule, VisionTower
from megascend.config.training import learning_rate
from megascend.engines.common.blockwise_adamw import QUANTISED, BlockwiseAdamW
from megascend.engines.common.weight_settings import MainParameter, SettingsByWeight, WeightSettings, matrix_optimizer
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.reference.reductions import global_norm
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.training.batch.gradient_scaling import GradientScaling
from megascend.training.batch.results import StepResult
from megascend.training.checkpoint.hf_slices import HfSlices, held_weights
from megascend.training.checkpoint.slices import OPTIMIZER_KEY, TensorSlices


@dataclass(frozen=True)
class WeightMap:
    """Hugging Face's weights in the parameters of an engine's model.

    Attributes:
        vision_tower: as in ``EngineSpec``.
        hf_slices: returns the slices that each parameter consists of; called only if settings depend on them.
        engine: kind of the engine, for messages.
    """

    info: ModelInfo
    vision_tower: VisionTower
    groups: ProcessGroups
    hf_slices: Callable[[], HfSlices]
    engine: str

    def settings(
        self, adam: Adam, mains: Mapping[str, TensorSlices]
    ) -> dict[str, tuple[MainParameter, WeightSettings]]:
        """Return the main parameters with their settings, by name.

        Args:
            mains: for each parameter, this rank's slice of it, or none.

        Raises:
            ConfigError: the settings do not fit the checkpoint, or the engine's parameters.
        """
        by_weight, hf_slices = SettingsByWeight(adam, self.info, self.vision_tower), self.hf_slices()
        parameters = {}
        for name, slices in mains.items():
            weights = frozenset(hf_slice.weight for hf_slice in hf_slices[name])
            main = slices.slices[0][1] if slices.slices else torch.empty(0)
            parameter = MainParameter(main, list(held_weights({name: slices}, hf_slices)))
            parameters[name] = parameter, by_weight.common(weights, self.engine)
        return parameters


class MainAdamW(GradientScaling):
    """AdamW, and Muon, over main parameters; see :class:`megascend.engines.common.full_model.ModelOptimizer`.

    Args:
        pairs: for each name, a parameter (or this rank's shard of it) and its fp32 main parameter, which is updated and has the
            gradient; the two may be the same tensor.
        slices: for each name, the main parameter as a slice of the complete one; without a slice if it is empty.
        weights: Hugging Face's weights in the parameters; None: the engine cannot tell them apart.
    """

    def __init__(
        self,
        pairs: Mapping[str, tuple[Tensor, Tensor]],
        adam: Adam,
        schedule: Schedule,
        precision: Precision,
        slices: Mapping[str, TensorSlices],
        weights: WeightMap | None,
    ) -> None:
        learning_rate(schedule, adam.lr, 0)  # raises for a schedule without an end now, not at the first step
        if adam.offload:
            raise ConfigError("optimizer.offload is not a setting of this engine; leave it out")
        super().__init__(scales_loss=precision == "fp16")
        self._adam, self._schedule = adam, schedule
        self._pairs = dict(pairs)
        mains = [main for _, main in self._pairs.values()]
        by_name: dict[str, tuple[MainParameter, WeightSettings]] = {}
        if adam.by_weight:
            if weights is None:
                raise ConfigError(
                    f"optimizer.groups and optimizer.kind: {adam.kind} are not settings of this engine; leave them out"
                )
            by_name = weights.settings(adam, slices)
        self._matrix_names = [name for name, (_, chosen) in by_name.items() if chosen.matrix]
        param_groups: dict[tuple[float, float, bool], list[Tensor]] = defaultdict(list)
        for name, (_, main) in self._pairs.items():
            chosen = by_name[name][1] if name in by_name else WeightSettings(1.0, adam.weight_decay)
            # A rank's shard of a parameter may be empty.
            if chosen.matrix or not main.numel():
                continue
            # As Megatron: biases and norms have no weight decay. Biases of experts are fused into a parameter of two dimensions.
            decays = main.dim() > 1 and not name.endswith("bias")
            quantised = adam.moments == "8bit" and decays
            param_groups[chosen.lr_scale, chosen.weight_decay if decays else 0.0, quantised].append(main)
        groups: list[dict[str, Any]] = [
            {"params": params, "lr_scale": scale, "weight_decay": decay, QUANTISED: quantised}
            for (scale, decay, quantised), params in param_groups.items()
        ] or [{"params": [], "lr_scale": 1.0, QUANTISED: False}]
        self._adamw: torch.optim.AdamW | BlockwiseAdamW
        if adam.moments == "8bit":
            self._adamw = BlockwiseAdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps)
        else:
            fused = mains[0].device.type == "cuda"
            self._adamw = torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps, fused=fused)
        self._matrices = None
        if weights is not None:
            self._matrices = matrix_optimizer(adam, [*by_name.values()], weights.groups, weights.info, precision)
        self._on_device = mains[0].device.type == "cuda"  # the fused AdamW keeps its step count there
        self._updates = 0

    @property
    def mains(self) -> dict[str, Tensor]:
        """Return the fp32 main parameters by name."""
        return {name: main for name, (_, main) in self._pairs.items()}

    @torch.no_grad()
    def round_parameters(self) -> None:
        """Round 16-bit parameters from their fp32 main parameters."""
        for parameter, main in self._pairs.values():
            if parameter is not main:
                parameter.copy_(main)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the main parameters that have one."""
        return [main.grad for _, main in self._pairs.values() if main.grad is not None]

    def norm(self, grads: list[Tensor]) -> float:
        """Return the 2-norm of all gradients. Waits for the device, the only time in a step."""
        return float(global_norm(grads))

    @torch.no_grad()
    def step(self, number: int, reduced: bool, lr: float | None = None) -> StepResult:
        """Update all parameters, unless a gradient is not finite; then clear the gradients. Waits for the device once."""
        lr = learning_rate(self._schedule, self._adam.lr, number) if lr is None else lr
        grads = self.gradients()
        norm = self.norm(grads) / self.loss_scale
        # Any inf or NaN in any gradient makes the norm non-finite, so this one number decides for all parameters.
        finite = math.isfinite(norm)
        if finite:
            factor = self.gradient_factor(norm, self._adam.max_grad_norm)
            if factor != 1 and grads:  # one pass unscales and clips
                torch._foreach_mul_(grads, factor)
            for group in self._adamw.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self._adamw.step()
            if self._matrices is not None:
                self._matrices.step([self._pairs[name][1].grad for name in self._matrix_names], lr)
            self._updates += 1
            self.round_parameters()
        self.discard()
        return self.count(norm, lr, skipped=not finite)

    def discard(self) -> None:
        """Drop all gradients."""
        for _, main in self._pairs.values():
            if main.grad is not None:
                # In place: autograd hooks and kernels add to ``main_grad``, which is this tensor.
                main.grad.zero_()

    def counters(self) -> dict[str, Any]:
        """Return updates so far, steps skipped in a row, and the loss scale of fp16."""
        scaler = {"scale": self.loss_scale, "good_steps": self.good_steps} if self._scales_loss else None
        counters = {"updates": self._updates, "skipped_in_a_row": self.skipped_in_a_row, "scaler": scaler}
        return counters | self._adam.kind_counter

    def restore(self, counters: dict[str, Any]) -> None:
        """Continue from :meth:`counters`; moments have been loaded."""
        self._updates = counters["updates"]
        # One count for all: a step updates every parameter or none.
        if isinstance(self._adamw, BlockwiseAdamW):
            self._adamw.finish_loading()
            self._adamw.set_updates(self._updates)
        else:
            for _, state in self._states(self._adamw):
                state["step"].fill_(float(self._updates))
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        if counters["scaler"] is not None:
            self.loss_scale, self.good_steps = counters["scaler"]["scale"], counters["scaler"]["good_steps"]

    def tensors(self, *, loading: bool) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (parameter's name, kind, fp32 tensor): live ones, except 8-bit moments, which are copies in host memory.

        Kinds are ``exp_avg`` and ``exp_avg_sq`` of AdamW, ``momentum_buffer`` of Muon and, for 16-bit parameters, ``param``.

        Args:
            loading: the tensors will be filled from a checkpoint, before :meth:`restore`.
        """
        if isinstance(self._adamw, BlockwiseAdamW):
            self._adamw.begin_loading()
            self._adamw.create_state()
            for name, (_, main) in self._pairs.items():
                # An empty shard has no state, but its name.
                moments = self._adamw.checkpoint_tensors(main, loading=loading) if main.numel() else {}
                for kind in ("exp_avg", "exp_avg_sq"):
                    yield name, kind, moments.get(kind, main.detach())
        else:
            for name, state in self._states(self._adamw):
                yield name, "exp_avg", state["exp_avg"]
                yield name, "exp_avg_sq", state["exp_avg_sq"]
        for name, momentum in zip(
            self._matrix_names, [] if self._matrices is None else self._matrices.momentum, strict=True
        ):
            yield name, "momentum_buffer", momentum
        for name, (parameter, main) in self._pairs.items():
            if parameter is not main:
                yield name, "param", main.detach()

    def state(self, weights: Mapping[str, TensorSlices], *, loading: bool) -> dict[str, TensorSlices]:
        """Return :meth:`tensors` by their names in checkpoints, in the slices that ``weights`` has of the parameters."""
        tensors = {}
        for name, kind, values in self.tensors(loading=loading):
            weight = weights[name]
            # One slice, or none if the rank's shard is empty.
            slices = [(offsets, values.detach()) for offsets, _ in weight.slices]
            state = TensorSlices(weight.shape, values.dtype, slices=slices, replicas=weight.replicas)
            tensors[OPTIMIZER_KEY.format(state=kind, key=name)] = state
        return tensors

    def _states(self, adamw: torch.optim.AdamW) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield torch's AdamW's state of every parameter, initialised as in its first step if it does not exist yet."""
        muon = set(self._matrix_names)
        for name, (_, main) in self._pairs.items():
            if name in muon:
                continue
            state = adamw.state[main]
            # AdamW creates its state in its first step, but a checkpoint may be saved or loaded before that.
            if not state:
                state["step"] = torch.zeros((), device=main.device if self._on_device else "cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(main), torch.zeros_like(main)
            yield name, state


class ModelAdamW(MainAdamW):
    """AdamW, and Muon, over an unsharded model's parameters.

    A 16-bit parameter has an fp32 main parameter, which is updated. Gradients are summed in fp32, in ``main_grad``.
    """

    def __init__(
        self, model: nn.Module, adam: Adam, schedule: Schedule, precision: Precision, weights: WeightMap | None = None
    ) -> None:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        pairs = {name: (parameter, _main(parameter)) for name, parameter in trained.items()}
        slices = {name: TensorSlices.whole(main.detach()) for name, (_, main) in pairs.items()}
        super().__init__(pairs, adam, schedule, precision, slices, weights)


def _main(parameter: nn.Parameter) -> Tensor:
    """Return the tensor to update, the parameter or its fp32 copy, with a ``grad`` that always exists."""
    if parameter.dtype == torch.float32:
        parameter.grad = torch.zeros_like(parameter)
        parameter.main_grad = parameter.grad  # type: ignore[reportAttributeAccessIssue]
        return parameter
    main = parameter.detach().float().requires_grad_()
    main.grad = torch.zeros_like(main)
    parameter.main_grad = main.grad  # type: ignore[reportAttributeAccessIssue]

    # Autograd would sum the gradients of several micro batches in 16 bits.
    def add(updated: Tensor) -> None:
        if updated.grad is not None:
            main.grad.add_(updated.grad)  # type: ignore[reportOptionalMemberAccess]
            updated.grad = None

    parameter.register_post_accumulate_grad_hook(add)
    return main
