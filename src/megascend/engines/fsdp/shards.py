"""A sharded model's tensors as this rank has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megascend.engines.fsdp import transformers_api
from megascend.engines.fsdp.expert_parallel import ExpertShare


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of one tensor.

    Attributes:
        name: transformers' name of the parameter or buffer.
        whole: the parameter (a DTensor) or buffer, of this rank's experts.
        local: this rank's part, the same memory; empty where there are more ranks than rows.
        offsets: where in the whole tensor it begins.
        shape: of the whole tensor.
        divided: ``whole`` is one of this many equal parts: of experts, some of which other ranks hold.
    """

    name: str
    whole: Tensor
    local: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    divided: int = 1

    @property
    def trained(self) -> bool:
        """It is a parameter."""
        return isinstance(self.whole, nn.Parameter)


def shards(model: nn.Module, share: ExpertShare | None = None) -> Iterator[LocalShard]:
    """This rank's part of everything that checkpoints hold of a model, tied weights once.

    Its parameters must not be gathered just now.

    Args:
        share: which experts are this rank's; None: all.
    """
    seen: set[int] = set()
    experts = set() if share is None else set(transformers_api.names_of_experts(model))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield _shard(name, tensor, share if name in experts else None)


def _shard(name: str, tensor: Any, share: ExpertShare | None) -> LocalShard:
    if not isinstance(tensor, DTensor):
        assert not isinstance(tensor, nn.Parameter), f"{name} is not sharded"
        return LocalShard(name, tensor, tensor, (0,) * tensor.dim(), tuple(tensor.shape))
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local, (first, *others) = tensor._local_tensor.detach(), tensor.shape
    if share is None:
        return LocalShard(name, tensor, local, tuple(offsets), (first, *others))
    begin = (share.index * first + offsets[0], *offsets[1:])
    return LocalShard(name, tensor, local, begin, (share.size * first, *others), share.size)
