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
from megascend.kernels.host_copy import to_device
from megascend.lora.grouped import Segments
from megascend.lora.segments import TokenSegments, by_adapter_and_expert


class ExpertRows:
    """The adapters of the rows that one layer's experts of this rank compute at the moment."""

    def __init__(self) -> None:
        self.adapter_index: Tensor | None = None
        self._grouped: tuple[Tensor | None, Segments] | None = None

    def take(self, adapter_index: Tensor | None) -> None:
        """Remember the rows' adapters (None: all have the same)."""
        self.adapter_index, self._grouped = adapter_index, None

    def grouped(self, counts: Any, adapters: int, experts: int, device: torch.device) -> tuple[Tensor | None, Segments]:
        """The order that sorts the rows by (adapter, expert), None if they are sorted, and the segments in that order."""
        if self._grouped is not None:
            return self._grouped
        if isinstance(counts, Segments):  # of moe.experts: grouped
            self._grouped = self._on_device(counts, adapters, experts)
            return self._grouped
        rows = [int(count) for count in counts]
        if self.adapter_index is None:
            self._grouped = None, Segments.of(rows, device)
            return self._grouped
        repeats = to_device(torch.tensor(rows), device)
        expert = torch.arange(experts, device=device).repeat_interleave(repeats, output_size=sum(rows))
        self._grouped = by_adapter_and_expert(self.adapter_index, expert, adapters, experts)
        return self._grouped

    def _on_device(self, segments: Segments, adapters: int, experts: int) -> tuple[Tensor | None, Segments]:
        """The same from segments whose sizes the CPU does not know. Waits for no device."""
        if self.adapter_index is None:
            return None, segments
        row = torch.arange(len(self.adapter_index), device=segments.ends.device)
        expert = torch.searchsorted(segments.ends, row.int(), right=True)
        return by_adapter_and_expert(self.adapter_index, expert, adapters, experts)


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
    rows = ExpertRows()
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
