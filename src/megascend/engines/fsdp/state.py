"""What a checkpoint holds of a sharded model and its optimizer, as chunks of whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megascend.engines.chunks import OPTIMIZER_KEY, Chunks
from megascend.engines.fsdp.optimizer import Optimizer
from megascend.engines.fsdp.shards import LocalShard


def state(
    shards: Sequence[LocalShard], optimizer: Optimizer, *, everything: bool, first_copy: bool, first_rank: bool
) -> dict[str, Chunks]:
    """This rank's part, live tensors. Names are those of transformers' parameters, whatever the layout.

    Args:
        everything: also what another rank writes, as needed to load.
        first_copy: this rank is of the first copy of the model, which is the one that writes shards.
        first_rank: this rank is 0, which writes what all ranks have whole.
    """
    by_name = {shard.name: shard for shard in shards}
    found: dict[str, Chunks] = {}

    def add(name: str, shard: LocalShard, values: Tensor) -> None:
        mine = first_copy if shard.trained else first_rank
        if not everything and not (mine and values.numel()):
            return
        chunks = found[name] = Chunks(shard.shape, values.dtype)
        if values.numel():
            chunks.add(shard.offsets, values.detach())

    for name, shard in by_name.items():
        add(name, shard, shard.local)
    for name, kind, values in optimizer.tensors():
        add(OPTIMIZER_KEY.format(state=kind, key=name), by_name[name], values)
    return found
