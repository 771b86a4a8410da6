"""Qwen3-Next and the text models of Qwen3.5 for mcore-bridge, which knows the latter with a vision tower only.

Import after Megatron.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch.distributed as dist
from mcore_bridge.model.gpts.qwen3_next_gdn import Qwen3NextGDNBridgeMixin, Qwen3NextLoader
from mcore_bridge.model.mm_gpts.qwen3_5_gdn import Qwen3_5Bridge
from mcore_bridge.model.modules import GatedDeltaNet, gated_delta_net
from mcore_bridge.model.register import ModelMeta, register_model
from torch import Tensor

from megascend.changes import patch
from megascend.reference import fla as reference_fla
from megascend.reference.fla.delta_rule import exact_in_fp32

TEXT_TYPES = ["qwen3_5_text", "qwen3_5_moe_text"]


class TensorParallelGatedDeltaNet(GatedDeltaNet):
    """mcore-bridge's layer with right gradients under tensor parallelism, and decays in fp32.

    With sequence parallelism mcore-bridge gathers the layer's input and divides its output again; each rank then computes the
    whole gradient of the input norm, and Megatron sums it as if each had computed a part. Here the projections gather and
    divide, as those of attention do, which also communicates half as much. Without sequence parallelism each rank computes its
    own heads' part of the output norm's gradient, which nobody sums.

    Rates of decay are exponentials of fp32, as in transformers: in 16 bits they would be off by up to 0.4 %, at every token of a
    sample by as much.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.tp_size == 1:
            return
        if self.config.sequence_parallel:
            # Read by this layer's forward pass alone: the projections have been built with the original.
            # A copy: the configuration is shared with all layers.
            self.config = copy.copy(self.config)
            self.config.sequence_parallel = False
        else:
            # Megatron sums gradients over TP by the names of norms in softmax attention, and has no mark for others.
            self.out_norm.weight.register_hook(self._sum_over_tensor_ranks)

    # Wraps: the KV cache knows a gated delta rule by the functions that its forward pass calls.
    @functools.wraps(GatedDeltaNet.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # An instance's attribute precedes the module's parameter, which has the model's dtype.
        self.__dict__["A_log"] = self._parameters["A_log"].float()  # type: ignore[union-attr]
        try:
            return super().forward(*args, **kwargs)
        finally:
            del self.__dict__["A_log"]

    def _sum_over_tensor_ranks(self, gradient: Tensor) -> Tensor:
        # A hook must not change its argument, which autograd may use elsewhere.
        total = gradient.clone()
        dist.all_reduce(total, group=self.pg_collection.tp)
        return total


class Qwen35TextBridge(Qwen3NextGDNBridgeMixin):
    """Names of the text models' checkpoints, which are those of a plain decoder."""


# None where fla is missing; the reference is exact already.
if gated_delta_net.chunk_gated_delta_rule is not None and not reference_fla.is_installed():
    exact = exact_in_fp32(gated_delta_net.chunk_gated_delta_rule)
    patch(gated_delta_net, "chunk_gated_delta_rule", exact, "fp32 is computed in fp32, not in TF32")
patch(
    Qwen3_5Bridge,
    "_get_hf_experts_attr",
    lambda self, is_mtp=False: (False, False),
    "experts are exported one by one; megascend joins them where the checkpoint has them fused",
)
patch(Qwen3NextLoader, "gated_delta_net", TensorParallelGatedDeltaNet, "gradients of its norms are right with TP")
register_model(ModelMeta("megascend_qwen3_5_text", TEXT_TYPES, bridge_cls=Qwen35TextBridge, loader=Qwen3NextLoader))
