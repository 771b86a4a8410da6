"""A rank's shards of a model's tensors: loading from a checkpoint's files, AdamW steps, state for checkpoints.

Each rank reads only its own rows from the files. Nothing is broadcast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megascend.config import Adam, Precision, Schedule
from megascend.engines.common.adamw import MainAdamW, WeightMap
from megascend.engines.common.transformers_names import is_transposed, persistent_tensors
from megascend.engines.fsdp import transformers_api
from megascend.engines.fsdp.expert_parallel import ExpertShare
from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.models.checkpoint_files.quantised import read_tensor
from megascend.reference.reductions import names_with_nan, out_of_range, square_sum
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.training.checkpoint.hf_slices import HfSlice
from megascend.training.checkpoint.slices import TensorSlices
from weightwire.slices import index_of, minus, overlap


@dataclass(frozen=True)
class LocalShard:
    """Shard of one tensor on this rank.

    Attributes:
        name: transformers' name of the parameter or buffer.
        source: the parameter (a DTensor if it is sharded) or buffer; under expert parallelism, of this rank's experts only.
        local: the shard, sharing its memory; empty if there are more ranks than rows.
        offsets: offsets of the shard in the global tensor.
        shape: shape of the global tensor.
        divided: expert parallel size if ``source`` has this rank's experts only; else 1.
    """

    name: str
    source: Tensor
    local: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    divided: int = 1

    @property
    def is_parameter(self) -> bool:
        """True for parameters, False for buffers."""
        return isinstance(self.source, nn.Parameter)

    @property
    def trained(self) -> bool:
        """True for parameters that are not frozen."""
        return self.is_parameter and self.source.requires_grad


def shards(model: nn.Module, share: ExpertShare | None = None) -> Iterator[LocalShard]:
    """Yield this rank's shard of every persistent tensor of a model, tied weights once.

    Sharded parameters must not be gathered.

    Args:
        share: the share of experts that this rank holds; None: all.
    """
    experts = set() if share is None else set(transformers_api.names_of_experts(model))
    for name, tensor in persistent_tensors(model).items():
        yield _shard(name, tensor, share if name in experts else None)


def _shard(name: str, tensor: Any, share: ExpertShare | None) -> LocalShard:
    if not isinstance(tensor, DTensor):
        return LocalShard(name, tensor, tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local, (first, *rest) = tensor._local_tensor.detach(), tensor.shape
    if share is None:
        return LocalShard(name, tensor, local, tuple(offsets), (first, *rest))
    # fully_shard knows only this rank's experts: their place among all experts is added here.
    start = (share.index * first + offsets[0], *offsets[1:])
    return LocalShard(name, tensor, local, start, (share.size * first, *rest), share.size)


@torch.no_grad()
def load(
    shards: Sequence[LocalShard],
    sources: Mapping[str, Sequence[HfSlice]],
    headers: Mapping[str, TensorHeader],
    fresh: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Fill this rank's shards.

    Args:
        sources: the complete checkpoint tensors that each tensor of the model consists of.
        headers: headers of the checkpoint's tensors.
        fresh: newly initialised tensors that are in no file, by name in a checkpoint.
        dtype: the model's compute dtype.

    Returns:
        Bytes read from the files.
    """
    files: dict[Path, Any] = {}
    read = 0
    for shard in shards:
        if shard.local.is_floating_point():
            shard.local.fill_(torch.nan)  # shows elements that no source has filled
        for source in sources[shard.name]:
            read += _read(shard, source, headers[source.weight], files, fresh or {}, dtype)
    holes = names_with_nan({shard.name: shard.local for shard in shards})
    if holes:
        raise CheckpointError(f"model: {holes[0]} contains NaN, or was not read completely")
    return read


def _read(
    shard: LocalShard,
    source: HfSlice,
    header: TensorHeader,
    files: dict[Path, Any],
    fresh: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> int:
    """Copy the intersection of a shard and a tensor of the checkpoint."""
    common = overlap(shard.offsets, tuple(shard.local.shape), source.offsets, source.sizes)
    if common is None:
        return 0
    offsets, sizes = common
    in_source = index_of(minus(offsets, source.offsets), sizes)
    in_source = in_source[len(in_source) - len(header.shape) :]  # a single expert's tensor has no expert dimension
    transposed = is_transposed(header.shape, source.sizes)
    if transposed:
        in_source = (in_source[0], in_source[2], in_source[1])
    target = shard.local[index_of(minus(offsets, shard.offsets), sizes)]
    if source.weight in fresh:
        target.copy_(fresh[source.weight][in_source])
        return 0
    assert header.file is not None
    try:
        values = read_tensor(source.weight, header, files, in_source)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"model: {header.file}: {source.weight} cannot be read: {error}") from error
    if transposed:
        values = values.mT
    # Shards are fp32, and the compute dtype may be fp16: a weight beyond its range would become infinity in every gather.
    if problem := out_of_range(source.weight, values, dtype):
        raise CheckpointError(f"model: {header.file}: {problem}")
    target.copy_(values.reshape(target.shape))
    return values.numel() * values.element_size()


@torch.no_grad()
def copy(shards: Sequence[LocalShard], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Fill complete tensors of a model that is on one rank from ``tensors``; see :func:`load`."""
    for shard in shards:
        if problem := out_of_range(shard.name, tensors[shard.name], dtype):
            raise CheckpointError(f"model: {problem}")
        shard.local.copy_(tensors[shard.name])


class ShardAdamW(MainAdamW):
    """AdamW over fp32 shards; see :class:`megascend.engines.common.full_model.ModelOptimizer`.

    Args:
        shards: shards of the trained parameters.
        replicas: copies of the model.
        weights: Hugging Face's weights in the parameters.
    """

    def __init__(
        self,
        shards: list[LocalShard],
        adam: Adam,
        schedule: Schedule,
        precision: Precision,
        groups: ProcessGroups,
        replicas: int,
        weights: WeightMap,
    ) -> None:
        self._shards = shards
        self._groups, self._replicas = groups, replicas
        # Detached, but in the shard's memory: AdamW's updates write the model's parameters.
        mains = {shard.name: shard.local.requires_grad_() for shard in shards}
        pairs = {name: (main, main) for name, main in mains.items()}
        super().__init__(pairs, adam, schedule, precision, slices_of(shards), weights)

    def gradients(self) -> list[Tensor]:
        """Assign the gradients, already reduced by the backward pass, to AdamW's parameters. Called once per step."""
        expert_grads: dict[int, list[Tensor]] = defaultdict(list)
        for shard, (_, main) in zip(self._shards, self._pairs.values(), strict=True):
            gradient = shard.source.grad
            assert gradient is None or isinstance(gradient, DTensor)
            main.grad = None if gradient is None else gradient._local_tensor
            if shard.divided > 1 and main.grad is not None:
                expert_grads[shard.divided].append(main.grad)
        for ranks, grads in expert_grads.items():
            # They contain the tokens of all ranks, but fully_shard has averaged only over the ranks with the same experts.
            torch._foreach_div_(grads, ranks)
        return super().gradients()

    def norm(self, grads: list[Tensor]) -> float:
        """Return the global gradient norm: squares summed over all ranks, divided by the number of replicas.

        One all-reduce over the world gives the same float on all ranks, so that all make the same decision to skip.
        """
        device = self._groups.device
        # A rank may hold no shard of a small model: its 0 still enters the sum.
        total = torch.stack([square_sum(grad) for grad in grads]).sum() if grads else torch.zeros(())
        total = total.to(device)
        if self._groups.topology.world_size > 1:
            with self._groups.monitor.phase("gradient norm"):
                dist.all_reduce(total, group=self._groups.device_group("world"))
        return float((total / self._replicas).sqrt())

    def discard(self) -> None:
        """Drop all gradients."""
        for shard, (_, main) in zip(self._shards, self._pairs.values(), strict=True):
            shard.source.grad = main.grad = None


def slices_of(
    shards: Sequence[LocalShard], *, first_copy: bool = True, first_rank: bool = True
) -> dict[str, TensorSlices]:
    """Return shards under transformers' names; live tensors.

    Args:
        first_copy: this rank belongs to the first replica of the model, which writes the shards.
        first_rank: this is rank 0, which writes tensors that are not sharded.
    """
    tensors = {shard.name: TensorSlices(shard.shape, shard.local.dtype) for shard in shards}
    for shard in shards:
        # Only the writer lists a tensor: slices of several ranks at the same offsets fail when torch validates the plan.
        writes = first_copy if shard.is_parameter else first_rank
        # A rank may have no rows of a small tensor.
        if shard.local.numel():
            tensors[shard.name].add(shard.offsets, shard.local.detach(), replica=not writes)
    return tensors
