"""Gather a sharded model's weights, a layer at a time, under the names of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megascend.engines.common.transformers_names import as_stored, in_checkpoint, layer_of
from megascend.engines.common.weight_stream import ExportBarrier, stream_weights
from megascend.engines.fsdp.expert_parallel import ExpertShare
from megascend.engines.fsdp.shards import LocalShard, shards
from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.files import TensorHeader
from megascend.reference.reductions import to_dtype
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.runtime.topology.topology import Receivers, ranks_of


def named_weights(
    model: Any,
    groups: ProcessGroups,
    headers: Mapping[str, TensorHeader],
    dtype: torch.dtype,
    *,
    merge: Callable[[str, Tensor], Tensor] | None = None,
    receivers: Receivers = "all",
    device: torch.device | str | None = None,
    share: ExpertShare | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the checkpoint, unsharded tensor) of all persistent tensors, in the model's order, on receiving ranks.

    Collective, as :meth:`megascend.engines.base.Engine.named_weights`; see
    :func:`megascend.engines.common.weight_stream.stream_weights`. Beside the model, every rank holds one gathered layer.

    Args:
        headers: headers of the checkpoint's tensors; exported names, shapes and dtypes are compared with them.
        dtype: dtype of the tensors; frozen tensors that are fp32 in the checkpoint stay fp32.
        merge: called with each parameter, by transformers' name.
        device: device of the tensors; default: the ranks' own. ``meta``: shapes and dtypes, without gathering.
        share: the share of experts that this rank holds; None: all.

    Raises:
        CheckpointError: on every receiver: another rank stopped before the end; or, after the last tensor, the tensors differ
            from ``headers``.
    """
    receives = groups.rank in ranks_of(receivers, groups.topology)
    barrier = ExportBarrier(groups)
    problems: list[str] = []
    describes = device is not None and torch.device(device).type == "meta"
    gather = _describe if describes else _gather

    def layers() -> Iterator[tuple[str, Tensor]]:
        """Gather layer by layer; numbers beyond the range of ``dtype`` are reported in ``problems``."""
        for _, layer_shards in groupby(shards(model, share), key=lambda shard: layer_of(shard.name)):
            barrier.before_layer()
            layer: dict[str, Tensor] = {}
            for shard in layer_shards:
                tensor = gather(shard, groups.device, share)
                if not receives:
                    continue
                stays_fp32 = not shard.trained and shard.name in headers and headers[shard.name].dtype == "F32"
                try:
                    cast = not stays_fp32 and tensor.is_floating_point()
                    layer[shard.name] = to_dtype(shard.name, tensor, dtype) if cast else tensor
                    if merge is not None:
                        layer[shard.name] = merge(shard.name, layer[shard.name])
                except CheckpointError as error:
                    problems.append(str(error))
                    layer[shard.name] = tensor
            # Per layer: transformers splits fused experts only when it gets all tensors of a layer.
            for name, tensor in in_checkpoint(model, layer, headers).items():
                yield name, as_stored(tensor, headers.get(name))

    def finish(name: str, tensor: Tensor) -> Tensor:
        if problems:  # recorded while gathering: an error there would leave the other ranks waiting in the collective
            raise CheckpointError(f"named_weights: {problems[0]}")
        return tensor if device is None else tensor.to(device)

    yield from stream_weights(layers(), barrier, groups, headers, dtype, receives=receives, finish=finish)


def _describe(shard: LocalShard, device: torch.device, share: ExpertShare | None) -> Tensor:
    """Return a tensor on ``meta`` in place of :func:`_gather`'s."""
    shape = list(shard.source.shape)
    if share is not None and shard.divided != 1:
        shape[0] *= share.size
    return torch.empty(shape, dtype=shard.source.dtype, device="meta")


def _gather(shard: LocalShard, device: torch.device, share: ExpertShare | None) -> Tensor:
    source = shard.source
    if not isinstance(source, DTensor):
        return source.detach().to(device)
    local = shard.local.detach().to(device)  # offloaded shards are not on the device where the groups communicate
    # run_check would compare the metadata over all ranks, for shards that come from one DTensor anyway.
    on_device = DTensor.from_local(
        local, source.device_mesh, source.placements, run_check=False, shape=source.shape, stride=source.stride()
    )
    tensor = on_device.full_tensor()
    if share is None or shard.divided == 1:
        return tensor
    # Each rank of the expert group has its share of the experts, in rank order.
    parts = [torch.empty_like(tensor) for _ in range(share.size)]
    dist.all_gather(parts, tensor.contiguous(), group=share.group)
    return torch.cat(parts)
