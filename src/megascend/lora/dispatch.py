"""Which adapter each row belongs to that a mixture-of-experts layer sends to an expert.

The token dispatcher permutes tokens by expert and exchanges them over expert parallel ranks. The indices of their adapters
take the same way beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megascend.changes import patch
from megascend.errors import ConfigError
from megascend.lora.grouped import Segments
from megascend.lora.segments import ExpertAdapterRows, TokenSegments, by_expert_and_adapter


class ExpertRows:
    """The adapters of the rows that one layer's experts of this rank compute at the moment.

    Args:
        in_order: rows of an expert lie as their tokens do, which lie by adapter.
    """

    def __init__(self, *, in_order: bool) -> None:
        self.adapter_index: Tensor | None = None
        self._in_order = in_order
        self._grouped: ExpertAdapterRows | None = None

    def take(self, adapter_index: Tensor | None) -> None:
        """Remember the rows' adapters (None: all have the same)."""
        self.adapter_index, self._grouped = adapter_index, None

    def grouped(self, counts: Any, adapters: int, experts: int, device: torch.device) -> ExpertAdapterRows:
        """The rows by expert and adapter.

        Args:
            counts: rows of each expert; or, of ``moe.experts: grouped``, segments whose sizes the CPU need not know.
        """
        if self._grouped is None:
            self._grouped = self._group(counts, adapters, experts, device)
        return self._grouped

    def _group(self, counts: Any, adapters: int, experts: int, device: torch.device) -> ExpertAdapterRows:
        segments = counts if isinstance(counts, Segments) else Segments.of([int(count) for count in counts], device)
        if self.adapter_index is None:
            return ExpertAdapterRows(segments)
        row = torch.arange(len(self.adapter_index), device=segments.ends.device)
        expert = torch.searchsorted(segments.ends, row.int(), right=True)
        # On NPUs rows are sorted: the assertion that they need not be has not been tried there, and MindSpeed dispatches itself.
        in_order = self._in_order and device.type != "npu"
        return by_expert_and_adapter(expert, self.adapter_index, experts, adapters, in_order=in_order)


def follow(moe: Any, mixed: Callable[[], TokenSegments | None]) -> ExpertRows:
    """Send adapters' indices along with the tokens of a mixture-of-experts layer, from now on.

    Args:
        mixed: whose the tokens of the micro batch are, or None if they are all of one adapter, or of none.
    """
    dispatcher = moe.token_dispatcher
    if not isinstance(dispatcher, MoEAlltoAllTokenDispatcher) or dispatcher.config.moe_permute_fusion:
        raise ConfigError(
            f"adapters on experts need Megatron's all-to-all token dispatcher, unfused; this model has "
            f"{type(dispatcher).__name__}"
        )
    rows = ExpertRows(in_order=dispatcher.ep_size == dispatcher.tp_size == 1)
    preprocess, postprocess = dispatcher.dispatch_preprocess, dispatcher.dispatch_postprocess
    permuted: list[Tensor | None] = [None]

    def dispatch_preprocess(*args: Any, **options: Any) -> Any:
        result = preprocess(*args, **options)
        permuted[0], segments = None, mixed()
        if segments is not None:
            mine = segments.adapter_index[segments.mine]
            permuted[0] = mine[dispatcher.reversed_local_input_permutation_mapping]
        return result

    def dispatch_postprocess(*args: Any, **options: Any) -> Any:
        result = postprocess(*args, **options)
        adapter_index, permuted[0] = permuted[0], None
        rows.take(None if adapter_index is None else exchange(dispatcher, adapter_index))
        return result

    why = "tells which adapter each token that is sent to an expert belongs to"
    patch(dispatcher, "dispatch_preprocess", dispatch_preprocess, why)
    patch(dispatcher, "dispatch_postprocess", dispatch_postprocess, why)
    return rows


def exchange(dispatcher: MoEAlltoAllTokenDispatcher, adapter_index: Tensor) -> Tensor:
    """What the dispatcher has just done to the permuted tokens, done to their adapters' indices [rows]."""
    column = adapter_index[:, None].float()  # small enough to be exact
    if dispatcher.ep_size > 1:
        column = all_to_all(dispatcher.ep_group, column, dispatcher.output_splits, dispatcher.input_splits)
    if dispatcher.tp_size > 1:
        splits = dispatcher.output_splits_tp
        column = gather_from_sequence_parallel_region(
            column, group=dispatcher.tp_group, output_split_sizes=None if splits is None else splits.tolist()
        )
    if (sort_received := getattr(dispatcher, "sort_received", None)) is not None:  # of moe.experts: grouped
        column = sort_received(column)
    elif dispatcher.num_local_experts > 1:
        column, _ = sort_chunks_by_idxs(
            column, dispatcher.num_global_tokens_per_local_expert.ravel(), dispatcher.sort_input_by_local_experts
        )
    return column[:, 0].long()
