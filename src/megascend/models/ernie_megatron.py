"""ERNIE 4.5 with experts for mcore-bridge, whose model has no correction bias for softmax scores. Import after Megatron."""

from __future__ import annotations

from typing import Any

import torch
from mcore_bridge.bridge import GPTBridge
from mcore_bridge.model.modules import TopKRouter
from mcore_bridge.model.register import ModelLoader, ModelMeta, register_model
from torch import Tensor


class ErnieRouter(TopKRouter):
    """Router that chooses by softmax scores plus a correction bias, and weights by the chosen scores divided by their sum.

    Megatron-Core 0.16 knows the bias with sigmoid scores only, so the configuration claims no bias and the router has one.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._smallest_sum = getattr(config.hf_config, "moe_norm_min", 1e-12)
        del self.expert_bias  # None, an attribute in the buffer's way
        # A row of one, as in checkpoints.
        self.register_buffer("expert_bias", torch.zeros(1, config.num_moe_experts, device=torch.cuda.current_device()))

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        scores = logits.view(-1, logits.shape[-1]).float().softmax(dim=-1)
        chosen = indices = torch.topk(scores.detach() + self.expert_bias, self.topk, dim=-1).indices
        if self.router_replay is not None:
            _, chosen = self.router_replay.get_replay_topk(
                scores, self.topk, default_compute_topk=lambda *args, **options: (scores.gather(1, indices), indices)
            )
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=self._smallest_sum)
        probabilities = torch.zeros_like(scores).scatter(1, chosen, weights).type_as(logits)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        return probabilities, routing_map


class ErnieBridge(GPTBridge):
    """Names of ERNIE's correction bias, a row of one for the layer."""

    hf_expert_bias_key = "moe_statics.e_score_correction_bias"

    def _set_router(self, mg_mlp: Any, hf_state_dict: Any, to_mcore: bool, **kwargs: Any) -> None:
        super()._set_router(mg_mlp, hf_state_dict, to_mcore, moe_router_enable_expert_bias=True)


class ErnieLoader(ModelLoader):
    """Layers with :class:`ErnieRouter`."""

    def _replace_router(self, transformer_layer_spec: Any, mlp_key: str = "mlp") -> None:
        super()._replace_router(transformer_layer_spec, mlp_key)
        for layer_spec in transformer_layer_spec.layer_specs:
            mlp_spec = getattr(layer_spec.submodules, mlp_key)
            submodules: Any = getattr(mlp_spec, "submodules", None) or getattr(mlp_spec, "keywords", {}).get(
                "submodules"
            )
            if getattr(submodules, "router", None) is not None:
                submodules.router = ErnieRouter


register_model(ModelMeta("megascend_ernie_moe", ["ernie4_5_moe"], bridge_cls=ErnieBridge, loader=ErnieLoader))
