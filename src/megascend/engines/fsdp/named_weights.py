"""A sharded model's weights under the names of its checkpoint, gathered a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megascend.distributed.process_groups import ProcessGroups
from megascend.engines.fsdp.expert_parallel import ExpertShare
from megascend.engines.fsdp.shards import LocalShard, shards
from megascend.engines.transformers_names import in_checkpoint, layer_of
from megascend.engines.weight_stream import ExportBarrier, stream_weights
from megascend.errors import CheckpointError
from megascend.huggingface.files import TensorHeader
from megascend.kernels.reductions import to_dtype
from megascend.topology.weight_routes import Receivers, ranks_of


def named_weights(
    model: Any,
    groups: ProcessGroups,
    wanted: Mapping[str, TensorHeader],
    dtype: torch.dtype,
    *,
    merge: Callable[[str, Tensor], Tensor] | None = None,
    receivers: Receivers = "all",
    device: torch.device | str | None = None,
    share: ExpertShare | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint, whole tensor) of everything that a checkpoint has, in the model's order, on ranks that receive.

    Collective, as :meth:`megascend.engines.base.Engine.named_weights`; see
    :func:`megascend.engines.weight_stream.stream_weights`. Beside the model, every rank holds one layer.

    Args:
        wanted: headers of the checkpoint that the model comes from; names, shapes and dtypes are compared with them.
        dtype: of what comes; what the model keeps in fp32 because its checkpoint does, stays so.
        merge: called with each parameter, by transformers' name.
        device: where to; default: where ranks compute. ``meta``: shapes and dtypes, and no shard travels.
        share: of experts that this rank holds; None: all.

    Raises:
        CheckpointError: on every receiver: another rank stopped before the end; or, after the last tensor, they were not those
            of ``wanted``.
    """
    receives = groups.rank in ranks_of(receivers, groups.topology)
    barrier = ExportBarrier(groups)
    problems: list[str] = []
    describes = device is not None and torch.device(device).type == "meta"
    gathered = _described if describes else _gathered
    layers = _layers(model, groups, wanted, dtype, barrier.before_layer, receives, merge, share, problems, gathered)

    def finish(name: str, tensor: Tensor) -> Tensor:
        if problems:  # found while gathering, which must not end where other ranks continue
            raise CheckpointError(f"named_weights: {problems[0]}")
        return tensor if device is None else tensor.to(device)

    yield from stream_weights(layers, barrier, groups, wanted, dtype, receives=receives, finish=finish)


def _layers(
    model: Any,
    groups: ProcessGroups,
    wanted: Mapping[str, TensorHeader],
    dtype: torch.dtype,
    before_layer: Callable[[], None],
    receives: bool,
    merge: Callable[[str, Tensor], Tensor] | None,
    share: ExpertShare | None,
    problems: list[str],
    gather: Callable[[LocalShard, torch.device, ExpertShare | None], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Gather a layer after the other; ``problems`` collects what is beyond the range of ``dtype``."""
    for _, of_layer in groupby(shards(model, share), key=lambda shard: layer_of(shard.name)):
        before_layer()
        whole: dict[str, Tensor] = {}
        for shard in of_layer:
            gathered = gather(shard, groups.device, share)
            kept = not shard.trained and shard.name in wanted and wanted[shard.name].dtype == "F32"
            if receives:
                try:
                    cast = not kept and gathered.is_floating_point()
                    whole[shard.name] = to_dtype(shard.name, gathered, dtype) if cast else gathered
                    if merge is not None:
                        whole[shard.name] = merge(shard.name, whole[shard.name])
                except CheckpointError as error:
                    problems.append(str(error))
                    whole[shard.name] = gathered
        yield from in_checkpoint(model, whole, wanted).items()


def _described(shard: LocalShard, device: torch.device, share: ExpertShare | None) -> Tensor:
    """Return a tensor without memory in place of :func:`_gathered`'s."""
    shape = list(shard.whole.shape)
    if share is not None and shard.divided != 1:
        shape[0] *= share.size
    return torch.empty(shape, dtype=shard.whole.dtype, device="meta")


def _gathered(shard: LocalShard, device: torch.device, share: ExpertShare | None) -> Tensor:
    whole = shard.whole
    if not isinstance(whole, DTensor):
        return whole.detach().to(device)
    local = shard.local.detach().to(device)  # offloaded shards are not where the groups communicate
    placed = DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    found = placed.full_tensor()
    if share is None or shard.divided == 1:
        return found
    parts = [torch.empty_like(found) for _ in range(share.size)]
    dist.all_gather(parts, found.contiguous(), group=share.group)
    return torch.cat(parts)
