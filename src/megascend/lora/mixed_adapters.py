"""Many adapters in one batch: stacked side by side for a call, and applied to each token by the model's layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megascend.batch.micro_batch import MicroBatch
from megascend.batch.sample import Sample
from megascend.distributed.process_groups import ProcessGroups
from megascend.kernels.host_copy import to_device
from megascend.lora.adapter_set import AdapterSet
from megascend.lora.applied_adapters import AppliedAdapters
from megascend.lora.dropout import token_keys
from megascend.lora.registry import AdapterRegistry
from megascend.lora.segments import token_segments, tokens_per_adapter
from megascend.lora.stack_pool import StackPool, places
from megascend.lora.stacked_adapters import StackedAdapters
from megascend.topology.topology import Topology


class MixedAdapters(AdapterSet):
    """Adapters in the layers of a frozen model, many in one batch.

    Args:
        layers: applies them.
        dtype: of the model.
        sequence_first: layers see the tokens of a plain batch as [sequence, batch], not [batch, sequence].
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        topology: Topology,
        groups: ProcessGroups,
        model_dir: Path,
        *,
        layers: AppliedAdapters,
        dtype: torch.dtype,
        device: torch.device,
        sequence_first: bool,
    ) -> None:
        super().__init__(registry, topology, groups, model_dir)
        self._applied, self._dtype, self._device, self._sequence_first = layers, dtype, device, sequence_first
        self._stacked: StackedAdapters | None = None
        self._pool: StackPool | None = None

    def keep_stacks(self, limit: int, on_drop: Callable[[StackedAdapters], None]) -> StackPool:
        """From now on take stacks from a pool, whose memory stays where it is; see :class:`StackPool`."""
        self._pool = StackPool(self._shape_groups, self._dtype, self._device, limit, on_drop)
        return self._pool

    def prepare(self, batch: MicroBatch, samples: Sequence[Sample], names: Sequence[str]) -> None:
        self.segment(batch, samples, names)

    def abandon(self) -> None:
        """Gradients of a call are added to the adapters' own by :meth:`collect` alone."""

    @contextlib.contextmanager
    def applying(self, names: Sequence[str]) -> Iterator[None]:
        """Apply adapters (``""``: the model alone) by their indices in ``names`` until the block ends."""
        if not any(names):
            with self._applied.applying(None):
                yield
            return
        adapters = tuple(self.registry[name] if name else None for name in names)
        if self._pool is not None:
            self._stacked = self._pool.take(adapters)
        elif self._stacked is None or (self._stacked.adapters != adapters and not self._stacked.take(adapters)):
            self._stacked = None  # frees the old one first
            self._stacked = StackedAdapters(adapters, self._shape_groups, self._dtype, self._device)
        self._stacked.fill()
        with self._applied.applying(self._stacked):
            yield

    def collect(self) -> None:
        """Add the gradients of the last call to its adapters' own."""
        assert self._stacked is not None
        self._stacked.collect()

    def forget(self, name: str) -> None:
        """Remove an adapter, and whatever copies of it there are."""
        if self._pool is not None:
            self._pool.forget(self.registry[name])
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
        count = len(names) if self._pool is None else places(len(names))
        counts = tokens_per_adapter(batch.adapter_index, lengths, count)
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
        interleaved = self._sequence_first and batch.packed is None
        keys = torch.stack(parts, dim=1).flatten() if interleaved else torch.cat(parts)
        return to_device(keys, self._device)
