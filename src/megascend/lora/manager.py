"""Adapters in a Megatron model: hooks in its layers, and the stacked adapters of the last call."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascend.batch.micro_batch import MicroBatch
from megascend.batch.sample import Sample
from megascend.config import Adam, Adapters, Schedule
from megascend.distributed.objects import gather_objects
from megascend.distributed.process_groups import ProcessGroups
from megascend.kernels.host_copy import to_device
from megascend.lora.adapter_set import AdapterSet
from megascend.lora.dropout import token_keys
from megascend.lora.layers import AdapterLayers
from megascend.lora.layout import shape_groups
from megascend.lora.registry import AdapterRegistry, check_exist
from megascend.lora.segments import token_segments, tokens_per_adapter
from megascend.lora.stacked_adapters import StackedAdapters
from megascend.lora.target_maps import find_target_modules
from megascend.lora.target_modules import ModelLayout, check_untied, matches, restrict
from megascend.topology.topology import Topology


class AdapterManager(AdapterSet):
    """Adapters in the layers of a frozen Megatron model, many in one batch.

    Attributes:
        layers: applies them.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        config: Any,
        topology: Topology,
        groups: ProcessGroups,
        tensor_names: Collection[str],
        limits: Adapters,
        *,
        adam: Adam,
        schedule: Schedule,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        vocab_size: int,
        model_dir: Path,
    ) -> None:
        self._dtype, self._device = dtype, device
        for chunk in chunks:
            chunk.requires_grad_(False)
        layout = ModelLayout(config, topology, groups.coordinates, tensor_names, vocab_size)
        check_untied(limits.targets, layout)
        found = find_target_modules(chunks, layout)
        target_modules = [target for target in (restrict(each, limits.targets) for each in found) if target is not None]
        mine = sorted({fused_slice.name for target in found for fused_slice in target.slices})
        everything = sorted({name for rank in gather_objects(mine, "world", groups, "layers") for name in rank})
        check_exist("adapters.targets names", "can be adapted", limits.targets, everything)
        allowed = [name for name in everything if matches(name, limits.targets)]
        found_groups = shape_groups(target_modules)
        registry = AdapterRegistry(
            limits,
            found_groups,
            allowed,
            adam=adam,
            schedule=schedule,
            seed=seed,
            scales_loss=dtype == torch.float16,
            device=device,
        )
        super().__init__(registry, found_groups, topology, groups, model_dir)
        self.layers = AdapterLayers(
            chunks,
            self._shape_groups,
            tensor_size=topology.tensor,
            sequence_parallel=topology.sequence_parallel and topology.tensor > 1,
        )
        self._stacked: StackedAdapters | None = None

    def prepare(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> None:
        self.segment(batch, samples, names)

    def abandon(self) -> None:
        """Gradients of a call are added to the adapters' own by :meth:`collect` alone."""

    @contextlib.contextmanager
    def applying(self, names: Sequence[str]) -> Iterator[None]:
        """Apply adapters (``""``: the model alone) by their indices in ``names`` until the block ends."""
        if not any(names):
            with self.layers.applying(None):
                yield
            return
        adapters = tuple(self.registry[name] if name else None for name in names)
        if self._stacked is None or (self._stacked.adapters != adapters and not self._stacked.take(adapters)):
            self._stacked = None  # frees the old one first
            self._stacked = StackedAdapters(adapters, self._shape_groups, self._dtype, self._device)
        self._stacked.fill()
        with self.layers.applying(self._stacked):
            yield

    def collect(self) -> None:
        """Add the gradients of the last call to its adapters' own."""
        assert self._stacked is not None
        self._stacked.collect()

    def forget(self, name: str) -> None:
        """Remove an adapter, and whatever copies of it there are."""
        if self._stacked is not None and self.registry[name] in self._stacked.adapters:
            self._stacked = None
        self.registry.remove(name)

    def segment(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> None:
        """Say which adapter each token of ``batch`` belongs to.

        Args:
            samples: the caller's list, of which ``batch.members`` are in the batch.
            names: the adapters of the call.
        """
        lengths = [length // self._topology.context for length in batch.padded_lengths]
        counts = tokens_per_adapter(batch.adapter_index, lengths, len(names))
        ranks = self._topology.tensor if self._topology.sequence_parallel else 1
        batch.segments = token_segments(
            batch.token_adapter_index,
            counts,
            self._keys(batch, samples, names),
            (self._groups.coordinates.tensor if ranks > 1 else 0, ranks),
            self._device,
        )

    def _keys(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> Tensor | None:
        """Dropout keys of the tokens, in the order in which layers see them."""
        adapters = [self.registry[name] if name else None for name in names]
        if not any(adapter is not None and adapter.lora.dropout for adapter in adapters):
            return None
        parts = []
        for member, index, positions in zip(batch.members, batch.adapter_index, batch.positions, strict=True):
            adapter, sample = adapters[index], samples[member].input_ids
            parts.append(
                torch.zeros_like(positions)
                if adapter is None
                else token_keys(adapter.seed, adapter.step_count, sample, positions)
            )
        # Of a plain batch the layers see [sequence, batch].
        keys = torch.cat(parts) if batch.packed is not None else torch.stack(parts, dim=1).flatten()
        return to_device(keys, self._device)
