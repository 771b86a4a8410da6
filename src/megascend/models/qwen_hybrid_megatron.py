"""Qwen3-Next and the text models of Qwen3.5 for mcore-bridge, which knows the latter with a vision tower only.

Import after Megatron.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from mcore_bridge.model.gpts.qwen3_next_gdn import Qwen3NextGDNBridgeMixin, Qwen3NextLoader
from mcore_bridge.model.modules import GatedDeltaNet
from mcore_bridge.model.register import ModelMeta, register_model
from torch import Tensor

from megascend.changes import patch

TEXT_TYPES = ["qwen3_5_text", "qwen3_5_moe_text"]


class TensorParallelGatedDeltaNet(GatedDeltaNet):
    """mcore-bridge's layer, whose norms' gradients are wrong under tensor parallelism.

    With sequence parallelism the layer gathers its input, so that every rank computes the whole gradient of the input norm, which
    is then summed over ranks as if each had computed a part. Without it, every rank computes its own heads' part of the output
    norm's gradient, which is never summed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.tp_size == 1:
            return
        if self.config.sequence_parallel:
            self.in_proj.layer_norm_weight.sequence_parallel = False
        else:
            # Megatron sums gradients over TP by the names of norms in softmax attention, and has no mark for others.
            self.out_norm.weight.register_hook(self._sum_over_tensor_ranks)

    def _sum_over_tensor_ranks(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=self.pg_collection.tp)
        return total


class Qwen35TextBridge(Qwen3NextGDNBridgeMixin):
    """Names of the text models' checkpoints, which are those of a plain decoder."""


patch(Qwen3NextLoader, "gated_delta_net", TensorParallelGatedDeltaNet, "gradients of its norms are right with TP")
register_model(ModelMeta("megascend_qwen3_5_text", TEXT_TYPES, bridge_cls=Qwen35TextBridge, loader=Qwen3NextLoader))
