"""A transformers model's weights under the names of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megascend.engines.fsdp.sources import layer_of
from megascend.engines.fsdp.transformers_api import in_checkpoint


def named_weights(
    model: Any,
    stored: Collection[str],
    merge: Callable[[str, Tensor], Tensor] | None = None,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint, tensor) of everything that a checkpoint has, a layer at a time; tied weights once.

    Args:
        stored: names of the checkpoint's tensors; see :func:`megascend.engines.fsdp.transformers_api.in_checkpoint`.
        device: where to; default: where the model is.
    """
    persistent = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    kept = {name: tensor for name, tensor in persistent.items() if first.setdefault(id(tensor), name) == name}
    describes = device is not None and torch.device(device).type == "meta"
    for _, names in groupby(kept, key=layer_of):
        layer = {name: kept[name].detach() for name in names}
        if describes:
            layer = {name: tensor.to("meta") for name, tensor in layer.items()}
        for name, tensor in in_checkpoint(model, layer, stored).items():
            merged = tensor if merge is None else merge(name, tensor)
            yield name, merged if device is None else merged.to(device)
