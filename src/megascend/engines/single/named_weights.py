"""A transformers model's weights under the names of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from megascend.huggingface.exported import LAYER


def named_weights(model: Any, merge: Callable[[str, Tensor], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint, tensor) of everything that a checkpoint has, a layer at a time; tied weights once.

    transformers fuses experts that many checkpoints keep apart: they are taken apart again, as ``save_pretrained`` does.
    """
    persistent = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    kept = {name: tensor for name, tensor in persistent.items() if first.setdefault(id(tensor), name) == name}

    def layer(name: str) -> str:
        found = LAYER.search(name)
        return found[0] if found else ""

    for _, names in groupby(kept, key=layer):
        for name, tensor in revert_weight_conversion(model, {name: kept[name].detach() for name in names}).items():
            yield name, tensor if merge is None else merge(name, tensor)
