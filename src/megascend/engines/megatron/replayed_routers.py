"""Router replay in Megatron's routers, by the hook that megatron-core 0.16 has for it (``TopKRouter.router_replay``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megascend.changes import patch
from megascend.engines.common.router_replay import ExpertLayers, ReplayedPass, RouterReplay
from megascend.engines.megatron.routers import router_rows
from megascend.runtime.distributed.process_groups import ProcessGroups
from megascend.training.batch.micro_batch import MicroBatch


class MegatronRouterReplay(RouterReplay):
    """Router replay of this rank's model chunks."""

    def __init__(self, chunks: Sequence[Any], layers: ExpertLayers, groups: ProcessGroups) -> None:
        super().__init__(layers, groups.device)
        self._groups = groups
        for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
            assert router.layer_number is not None
            column = layers.numbers.index(router.layer_number - 1)
            patch(router, "router_replay", _Source(self, column), "samples may carry the experts to choose")

    def enter(self, batch: MicroBatch) -> None:
        """Set the micro batch that a chunk computes next."""
        routed = batch.routed_experts
        if routed is None:  # as in a captured step, whose micro batch has no padding column either
            self._pass = ReplayedPass(None, None)
            return
        rows = router_rows(self.layers.columns(routed), batch, self._groups)
        self._pass = ReplayedPass(rows, router_rows(batch.real, batch, self._groups))

    def leave(self, output: Tensor) -> None:
        """Note that the chunk has run, and restore its micro batch when its backward pass begins."""
        current, self._pass = self._pass, None
        assert current is not None
        current.complete = True
        if output.requires_grad:
            # Recomputed layers run in the backward pass, when another micro batch may have been entered. Without choices of its
            # own, this one must not find another's.
            output.register_hook(lambda _: setattr(self, "_pass", current))

    def replay(self, column: int, scores: Tensor, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores and numbers of the experts that a layer's tokens are sent to."""
        current = self._pass
        if current is None or current.routed is None:
            return values, indices
        chosen = self.choose(indices, current.routed[:, column], None if current.complete else current.real)
        return scores.gather(1, chosen), chosen


@dataclass(frozen=True)
class _Source:
    """Object in the place of Megatron's ``RouterReplay``: the replay of one layer's router."""

    replay: MegatronRouterReplay
    column: int

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert default_compute_topk is not None
        values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return self.replay.replay(self.column, scores, values, indices)


def expert_layers(config: Any) -> ExpertLayers | None:
    """Return the layers with experts of a model's configuration; None for a dense model."""
    if not config.num_moe_experts:
        return None
    frequency = config.moe_layer_freq
    pattern = (
        frequency
        if isinstance(frequency, list)
        else [int(layer % frequency == 0) for layer in range(config.num_layers)]
    )
    numbers = tuple(layer for layer, has_experts in enumerate(pattern) if has_experts)
    return ExpertLayers(config.num_layers, numbers, config.num_moe_experts, config.moe_router_topk)


def unsupported_reason(config: Any, *, graphs: bool) -> str | None:
    """Return the reason why this model's routers cannot replay, or None."""
    if "router_replay" not in inspect.signature(moe_utils.topk_routing_with_score_function).parameters:
        return "this megatron-core has no router replay (0.16 has)"
    if config.moe_router_fusion:
        return "moe_router_fusion computes the choice in a kernel"
    return "batching.cuda_graphs captures the routers" if graphs else None
