"""DeepSeek-V2 for mcore-bridge, with the routing of its large models (``group_limited_greedy``). Import after Megatron."""

from __future__ import annotations

from typing import Any

import torch
from mcore_bridge.model.register import ModelMeta, register_model
from torch import Tensor

from megascend.models.families.routers_megatron import RouterLoader, SoftmaxRouter


class GroupLimitedRouter(SoftmaxRouter):
    """Router that chooses among the experts of the groups whose best expert scores highest, and leaves scores undivided.

    DeepSeek-V2, arXiv:2405.04434, section 2.2.2. Megatron-Core ranks groups by the sum of several of their experts.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        hf = config.hf_config
        self._groups, self._group_topk, self._factor = hf.n_group, hf.topk_group, hf.routed_scaling_factor

    def choose(self, scores: Tensor) -> Tensor:
        by_group = scores.view(len(scores), self._groups, -1)
        groups = torch.topk(by_group.amax(dim=-1), self._group_topk, dim=-1).indices
        in_groups = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(1, groups, True)
        # Scores of a softmax are above 0: experts of the other groups, whose scores become 0, are never chosen.
        return torch.topk((by_group * in_groups[..., None]).flatten(1), self.topk, dim=-1).indices

    def weigh(self, chosen_scores: Tensor) -> Tensor:
        return chosen_scores * self._factor


class DeepSeekV2Loader(RouterLoader):
    """Layers with Megatron-Core's router, or with :class:`GroupLimitedRouter` if the configuration has groups."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.hf_config.topk_method == "group_limited_greedy":
            self.router = GroupLimitedRouter  # type: ignore[misc]


register_model(ModelMeta("megascend_deepseek_v2", ["deepseek_v2"], loader=DeepSeekV2Loader))
