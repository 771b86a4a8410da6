"""Megatron's all-to-all token dispatcher with indices in place of masks, splits and concatenations.

Where one rank has all experts nothing waits for the device. Under expert parallelism the sizes of the exchanges are read, as
upstream, and nothing else.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megascend.engines.megatron.expert_weights import ExpertSegments
from megascend.kernels.token_rows import Combine, Moved, Spread, TokenRows, chunk_order, token_rows


class IndexedDispatcher(MoEAlltoAllTokenDispatcher):
    """Takes the place of a dispatcher that a layer has been built with.

    Attributes:
        rows: the rows of the present micro batch before the exchange.
        order: which row of those received comes to each place, and the inverse; None: they are in order.
    """

    def __init__(self, built: MoEAlltoAllTokenDispatcher) -> None:
        vars(self).update(vars(built))
        self.rows: TokenRows | None = None
        self.order: tuple[Tensor, Tensor] | None = None
        self._alone = self.tp_size == self.ep_size == 1

    def preprocess(self, routing_map: Tensor) -> Tensor:
        counts = super().preprocess(routing_map)
        self._counts, self._received = counts, getattr(self, "num_global_tokens_per_local_expert", None)
        return counts

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Any:
        return tokens_per_expert if self._alone else super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)  # type: ignore[reportArgumentType]

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [tokens * k, h] by expert, and their probabilities."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        hidden = hidden_states.view(-1, hidden_states.shape[-1])
        self.hidden_shape_before_permute = hidden.shape
        self.tokens_per_expert = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        self.rows = rows = token_rows(routing_map, self.config.moe_router_topk)
        self.reversed_local_input_permutation_mapping = rows.token
        spread: Any = Spread.apply(hidden, rows.token, rows.place)
        return spread, probs.reshape(-1).index_select(0, rows.choice)

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, ExpertSegments, Tensor]:
        """What has been received, by expert; which rows are whose; and their probabilities."""
        tokens, probs = self.gather_slices(global_input_tokens), self.gather_slices(global_probs)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        self.tokens_per_expert, self.order = None, None
        if self.num_local_experts > 1 and not self._alone:
            assert self._received is not None
            self.order = chunk_order(self._received.view(-1, self.num_local_experts), len(tokens))
        segments = ExpertSegments(self._counts.cumsum(0).int())
        return self.sort_received(tokens), segments, self.sort_received(probs)

    def gather_slices(self, values: Tensor) -> Tensor:
        """``values`` of all tensor parallel ranks that share these experts."""
        if self.tp_size == 1:
            return values
        splits = None if self.output_splits_tp is None else self.output_splits_tp.tolist()
        return gather_from_sequence_parallel_region(values, group=self.tp_group, output_split_sizes=splits)

    def sort_received(self, values: Tensor) -> Tensor:
        """Received rows, which lie by (source, expert), by expert."""
        if self.order is None:
            return values
        sorted_rows: Any = Moved.apply(values, *self.order)
        return sorted_rows

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The way back of :meth:`dispatch_postprocess`."""
        if self.order is not None:
            order, place = self.order
            hidden_states = Moved.apply(hidden_states, place, order)  # type: ignore[reportAssignmentType]
        if self.tp_size > 1:
            splits = None if self.output_splits_tp is None else self.output_splits_tp.tolist()
            dtype = hidden_states.dtype
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs.dtype), group=self.tp_group, input_split_sizes=splits
            ).to(dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """The sum of each token's rows, in the shape of the layer's input."""
        assert self.rows is not None
        combined: Any = Combine.apply(permutated_local_input_tokens, self.rows.token, self.rows.place)
        return combined.view(self.hidden_shape)
