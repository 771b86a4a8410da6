"""LoRA adapters on a frozen transformers model, applied by peft, one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megascend.batch.micro_batch import MicroBatch
from megascend.batch.sample import Sample
from megascend.config import Adam, Adapters, Schedule
from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.single.worn_adapter import WornAdapter
from megascend.lora.adapter_set import AdapterSet
from megascend.lora.layout import shape_groups
from megascend.lora.peft_tensors import EXPERT_PARAMETERS
from megascend.lora.registry import AdapterRegistry, check_exist
from megascend.lora.target_modules import FusedSlice, TargetModule, matches, restrict
from megascend.lora.transfer import scatter
from megascend.topology.topology import Topology


class PeftAdapters(AdapterSet):
    """Adapters on a frozen model. Each micro batch is of one adapter, which is put on for it."""

    def __init__(
        self,
        model: Any,
        topology: Topology,
        groups: ProcessGroups,
        limits: Adapters,
        *,
        adam: Adam,
        schedule: Schedule,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        model_dir: Path,
    ) -> None:
        model.requires_grad_(False)
        found = target_modules(model)
        everything = sorted(target.slices[0].name for target in found)
        check_exist("adapters.targets names", "can be adapted", limits.targets, everything)
        chosen = [target for target in (restrict(each, limits.targets) for each in found) if target is not None]
        groups_of_layers = shape_groups(chosen)
        registry = AdapterRegistry(
            limits,
            groups_of_layers,
            [name for name in everything if matches(name, limits.targets)],
            adam=adam,
            schedule=schedule,
            seed=seed,
            scales_loss=dtype == torch.float16,
            device=device,
        )
        super().__init__(registry, groups_of_layers, topology, groups, model_dir)
        self._model = model
        self._order: list[str] = []
        self._worn: tuple[str, WornAdapter] | None = None
        self._pending: dict[str, torch.Tensor] = {}

    def prepare(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> None:
        """Nothing to do: micro batches are padded, and those hold samples of one adapter each."""

    @contextlib.contextmanager
    def applying(self, names: Sequence[str]) -> Iterator[None]:
        """Have :meth:`put_on` know ``names`` until the block ends, and the base model as it was afterwards."""
        self._order, self._pending = list(names), {}
        try:
            yield
        finally:
            self._take_off()
            self._order = []

    def put_on(self, batch: MicroBatch) -> None:
        """Have the model be that of the batch's adapter."""
        name = self._order[batch.adapter_index[0]]
        if self._worn is not None and self._worn[0] == name:
            return
        self._take_off()
        if name:
            whole = self.collect_whole(name, optimizer=False)
            assert whole is not None, "a world of one"
            self._worn = name, WornAdapter(self._model, whole.lora, whole.values)

    def take_gradients(self) -> None:
        """Add what the last backward pass has left to what this call has so far, in float32."""
        if self._worn is None:
            return
        name, worn = self._worn
        adapter = self.registry[name]
        vector = torch.zeros_like(adapter.grads)
        scatter(worn.take_gradients(), adapter, vector, self._shape_groups)
        self._pending[name] = vector if name not in self._pending else self._pending[name].add_(vector)

    def collect(self) -> None:
        """Add the gradients of the last call to its adapters' own."""
        for name, vector in self._pending.items():
            adapter = self.registry[name]
            adapter.grads.add_(vector)
            adapter.accumulated = True
        self._pending = {}

    def abandon(self) -> None:
        """Drop the gradients of the last call; those of earlier ones stay."""
        self._pending = {}

    def _take_off(self) -> None:
        if self._worn is not None:
            self._worn[1].take_off()
            self._worn = None


def target_modules(model: Any) -> list[TargetModule]:
    """Linear layers of a model's layers, and its fused experts, as what adapters may target.

    Embedding and output layer are not among them, and neither are routers.
    """
    found = []
    for name, module in model.named_modules():
        if ".layers." not in f".{name}":
            continue
        if isinstance(module, torch.nn.Linear) and not name.endswith("gate"):
            out_features, in_features = module.weight.shape
            found.append(_target(name, module, out_features, in_features))
        elif name.endswith(".experts"):
            for parameter in EXPERT_PARAMETERS:
                weight = getattr(module, parameter, None)
                if (
                    isinstance(weight, torch.Tensor)
                    and weight.ndim == 3
                    and not getattr(module, "is_transposed", False)
                ):
                    count, out_features, in_features = weight.shape
                    found.append(_target(f"{name}.{parameter}", module, out_features, in_features, count))
    return found


def _target(name: str, module: Any, out_features: int, in_features: int, experts: int | None = None) -> TargetModule:
    rows = torch.arange(out_features)
    part = FusedSlice(name, out_features, rows, rows)
    return TargetModule(
        module, "column", (part,), in_features, out_features, 0, in_features, experts=experts or 1, expert_total=experts
    )
