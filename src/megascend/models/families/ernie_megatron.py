"""ERNIE 4.5 with experts for mcore-bridge, whose model has no correction bias for softmax scores. Import after Megatron."""

from __future__ import annotations

from typing import Any

import torch
from mcore_bridge.bridge import GPTBridge
from mcore_bridge.model.register import ModelMeta, register_model
from torch import Tensor

from megascend.models.families.routers_megatron import RouterLoader, SoftmaxRouter


class ErnieRouter(SoftmaxRouter):
    """Router that chooses by softmax scores plus a correction bias, and weights by the chosen scores divided by their sum.

    Megatron-Core 0.16 knows the bias with sigmoid scores only, so the configuration claims no bias and the router has one.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._smallest_sum = getattr(config.hf_config, "moe_norm_min", 1e-12)
        del self.expert_bias  # None, an attribute in the buffer's way
        # A row of one, as in checkpoints.
        self.register_buffer("expert_bias", torch.zeros(1, config.num_moe_experts, device=torch.cuda.current_device()))

    def choose(self, scores: Tensor) -> Tensor:
        return torch.topk(scores + self.expert_bias, self.topk, dim=-1).indices

    def weigh(self, chosen_scores: Tensor) -> Tensor:
        return chosen_scores / chosen_scores.sum(dim=-1, keepdim=True).clamp(min=self._smallest_sum)


class ErnieBridge(GPTBridge):
    """Names of ERNIE's correction bias, a row of one for the layer."""

    hf_expert_bias_key = "moe_statics.e_score_correction_bias"

    def _set_router(self, mg_mlp: Any, hf_state_dict: Any, to_mcore: bool, **kwargs: Any) -> None:
        super()._set_router(mg_mlp, hf_state_dict, to_mcore, moe_router_enable_expert_bias=True)


class ErnieLoader(RouterLoader):
    """Layers with :class:`ErnieRouter`."""

    router = ErnieRouter


register_model(ModelMeta("megascend_ernie_moe", ["ernie4_5_moe"], bridge_cls=ErnieBridge, loader=ErnieLoader))
