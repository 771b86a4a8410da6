"""A sharded model's tensors as this rank has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of one tensor.

    Attributes:
        name: transformers' name of the parameter or buffer.
        whole: the parameter (a DTensor) or buffer.
        local: this rank's part, the same memory; empty where there are more ranks than rows.
        offsets: where in the whole tensor it begins.
    """

    name: str
    whole: Tensor
    local: Tensor
    offsets: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.whole.shape)

    @property
    def trained(self) -> bool:
        """It is a parameter."""
        return isinstance(self.whole, nn.Parameter)


def shards(model: nn.Module) -> Iterator[LocalShard]:
    """This rank's part of everything that checkpoints hold of a model, tied weights once.

    Its parameters must not be gathered just now.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield _shard(name, tensor)


def _shard(name: str, tensor: Any) -> LocalShard:
    if not isinstance(tensor, DTensor):
        assert not isinstance(tensor, nn.Parameter), f"{name} is not sharded"
        return LocalShard(name, tensor, tensor, (0,) * tensor.dim())
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return LocalShard(name, tensor, tensor._local_tensor.detach(), tuple(offsets))
