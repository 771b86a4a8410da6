"""Routers that Megatron-Core's top-k cannot express, and a loader that puts one into a model. Import after Megatron."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from mcore_bridge.model.modules import TopKRouter
from mcore_bridge.model.register import ModelLoader
from torch import Tensor


class SoftmaxRouter(TopKRouter):
    """Router that scores experts by a softmax over all of them; subclasses choose by these scores, and weigh the chosen."""

    def choose(self, scores: Tensor) -> Tensor:
        """Return the experts of each token, int64 [tokens, k]. ``scores``: fp32 [tokens, experts], without a gradient."""
        raise NotImplementedError

    def weigh(self, chosen_scores: Tensor) -> Tensor:
        """Return the weights of the chosen experts' outputs. ``chosen_scores``: fp32 [tokens, k]."""
        raise NotImplementedError

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        scores = logits.view(-1, logits.shape[-1]).float().softmax(dim=-1)
        chosen = preferred = self.choose(scores.detach())
        replay = getattr(self, "router_replay", None)  # megatron-core 0.15 has none
        if replay is not None:
            _, chosen = replay.get_replay_topk(
                scores,
                self.topk,
                default_compute_topk=lambda *args, **options: (scores.gather(1, preferred), preferred),
            )
        weights = self.weigh(scores.gather(1, chosen))
        probabilities = torch.zeros_like(scores).scatter(1, chosen, weights).type_as(logits)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        return probabilities, routing_map


class RouterLoader(ModelLoader):
    """Layers whose router is of :attr:`router`; of Megatron-Core's class where it is None."""

    router: ClassVar[type[TopKRouter] | None] = None

    def _replace_router(self, transformer_layer_spec: Any, mlp_key: str = "mlp") -> None:
        super()._replace_router(transformer_layer_spec, mlp_key)
        for layer_spec in transformer_layer_spec.layer_specs if self.router is not None else ():
            mlp_spec = getattr(layer_spec.submodules, mlp_key)
            submodules: Any = getattr(mlp_spec, "submodules", None) or getattr(mlp_spec, "keywords", {}).get(
                "submodules"
            )
            if getattr(submodules, "router", None) is not None:
                submodules.router = self.router
