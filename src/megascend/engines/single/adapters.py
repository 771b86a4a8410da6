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
from megascend.lora.registry import AdapterRegistry
from megascend.lora.transfer import scatter
from megascend.lora.transformers_targets import is_transposed, layer_targets
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
        # peft imports Transformer Engine where that is installed. Its library must be loaded before the first kernel of
        # cuDNN is: with two versions of cuDNN on a machine, the loader would mix them.
        import peft  # noqa: F401

        model.requires_grad_(False)
        # peft before 0.20 takes the dimensions of transposed experts for each other.
        found = [target for target in layer_targets(model) if not is_transposed(target)]
        everything = sorted(target.slices[0].name for target in found)
        registry = AdapterRegistry.of_model(
            found, everything, limits, adam=adam, schedule=schedule, seed=seed, dtype=dtype, device=device
        )
        super().__init__(registry, topology, groups, model_dir)
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
