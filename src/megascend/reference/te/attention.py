"""DotProductAttention: sbhd, bshd and packed thd, grouped queries, masks, window, bias, context parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascend.errors import ConfigError, DataError
from megascend.reference.te.attention_core import MaskRule, Window, attend, check_window, chunk_starts, unzigzag
from megascend.reference.te.base import ReferenceModule, TrackerGetter
from megascend.reference.te.collectives import gather_from_ranks
from megascend.reference.te.unsupported import refuse

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)


def _forgive_missing_extra_state(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Accept checkpoints without attention's extra state, as Transformer Engine does: megatron-core does not save it."""
    missing = [key for key in incompatible_keys.missing_keys if not key.endswith("core_attention._extra_state")]
    incompatible_keys.missing_keys[:] = missing


class DotProductAttention(ReferenceModule):
    """Attention over the heads of one rank.

    Shapes (``h`` query heads and ``g`` key/value heads of this tensor parallel rank, ``d`` and ``e`` head sizes of
    keys and values): ``sbhd`` takes ``[s, b, h, d]``, ``[s, b, g, d]``, ``[s, b, g, e]`` and returns
    ``[s, b, h * e]``; ``bshd`` swaps ``s`` and ``b``; ``thd`` takes ``[t, h, d]`` and returns ``[t, h * e]``.

    With context parallelism every rank passes its zigzag share of each sequence (see :mod:`.attention_core`), and
    ``cu_seqlens`` refer to full sequences. Keys and values are all-gathered for every ``cp_comm_type``: the result is the same.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: TrackerGetter | None = None,
        tp_group: dist.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: dist.ProcessGroup | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_forgive_missing_extra_state)
        if softmax_type not in ("vanilla", "learnable"):
            refuse(
                f"softmax_type={softmax_type!r}",
                "use softmax_type='vanilla' or 'learnable', or run on CUDA with transformer-engine",
            )
        if return_max_logit:
            refuse("return_max_logit", "switch qk_clip and log_max_attention_logit off")
        check_window(window_size)
        self._set_tp(tp_group, tp_size)
        self.softmax_type = softmax_type
        self.softmax_offset = None
        if softmax_type == "learnable":  # of this rank's heads, as Transformer Engine has it
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // tp_size))
        groups = num_gqa_groups or num_attention_heads
        if num_attention_heads % groups:
            raise ConfigError(
                f"num_attention_heads={num_attention_heads} must be a multiple of num_gqa_groups={groups}"
            )
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = groups
        self.layer_number = layer_number or 1
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size or ((-1, 0) if "causal" in attn_mask_type else (-1, -1))
        self.bottom_right_diagonal = bottom_right_diagonal
        self.attention_type = attention_type
        self.attention_dropout = attention_dropout
        key_size = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1.0 / math.sqrt(key_size) if softmax_scale is None else softmax_scale
        # Under sequence parallelism Transformer Engine draws the dropout from the default stream, not the tracker's.
        self._tracker = None if sequence_parallel or get_rng_state_tracker is None else get_rng_state_tracker
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | None,
        cp_global_ranks: list[int] | None,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Set, change or (None) remove the context parallel group."""
        if isinstance(cp_group, (list, tuple)):
            refuse("hierarchical context parallelism", "use cp_comm_type='p2p', 'all_gather' or 'a2a'")
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        num_splits: int | None = 1,
    ) -> Tensor:
        """Compute attention.

        Args:
            attention_mask: True where masked **out**. ``[b, 1, 1, s]`` for mask types with "padding" (a pair for queries
                and keys, if their masks differ), broadcastable to ``[b, h, s_q, s_kv]`` for "arbitrary"; ignored by the
                other types.
            cu_seqlens_q, cu_seqlens_kv: thd only: ``[sequences + 1]`` cumulative lengths without padding.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: starts of the sequences, if there is padding between them.
            core_attention_bias: ``post_scale_bias`` only: broadcastable to ``[b, h, s_q, s_kv]``.
            max_seqlen_q, max_seqlen_kv, fast_zero_fill, pad_between_seqs, num_splits: hints for kernels; unused.
        """
        if checkpoint_core_attention:
            refuse("checkpoint_core_attention", "let megatron-core recompute it (recompute_modules: core_attn)")
        if inference_params is not None:
            refuse("inference_params", "use an inference engine")
        if alibi_slopes is not None or core_attention_bias_type not in ("no_bias", "post_scale_bias"):
            refuse(f"core_attention_bias_type={core_attention_bias_type!r}", "pass a post_scale_bias")
        bias = core_attention_bias if core_attention_bias_type == "post_scale_bias" else None
        rule, mask_type = self._rule(attn_mask_type, window_size, bottom_right_diagonal)
        layout = qkv_format or self.qkv_format
        if layout == "thd":
            return self._packed(
                (query_layer, key_layer, value_layer),
                rule,
                mask_type,
                bias,
                (_totals(cu_seqlens_q, "cu_seqlens_q"), _totals(cu_seqlens_kv, "cu_seqlens_kv")),
                (cu_seqlens_q_padded, cu_seqlens_kv_padded),
            )
        if layout not in ("sbhd", "bshd"):
            raise ConfigError(f"qkv_format must be 'sbhd', 'bshd' or 'thd', got {layout!r}")
        if layout == "bshd":  # computed as sbhd
            query_layer, key_layer, value_layer = (x.transpose(0, 1) for x in (query_layer, key_layer, value_layer))
        keep = _keep(attention_mask, mask_type)
        padding = "padding" in mask_type
        out = self._dense(query_layer, key_layer, value_layer, rule, keep, bias, padding)  # [s, b, h, e]
        return (out.transpose(0, 1) if layout == "bshd" else out).flatten(2)

    def _rule(self, mask_type: str | None, window: Window | None, bottom_right: bool | None) -> tuple[MaskRule, str]:
        mask_type = (mask_type or self.attn_mask_type).replace(",", "_")
        mask_type = {"causal_padding": "padding_causal"}.get(mask_type, mask_type)
        if mask_type not in MASK_TYPES:
            raise ConfigError(f"attn_mask_type must be one of {MASK_TYPES}, got {mask_type!r}")
        check_window(window)
        window = window or self.window_size
        left, right = window
        causal = "causal" in mask_type
        if not causal and (left, right) == (-1, 0):
            right = -1  # Transformer Engine treats (-1, 0) as "no window" for a mask that is not causal
        if min(left, right) < -1 or (not causal and (left < 0) != (right < 0)):
            raise ConfigError(f"window_size={window} does not go with attn_mask_type={mask_type!r}")
        if causal:
            bottom_right = "bottom_right" in mask_type
        else:
            chosen = self.bottom_right_diagonal if bottom_right is None else bottom_right
            bottom_right = True if chosen is None else chosen
        return MaskRule(causal, (left, right), bottom_right), mask_type

    def _cp(self) -> tuple[int, int]:
        return (0, 1) if self.cp_group is None else (self.cp_group.rank(), self.cp_group.size())

    def _dropout(self) -> tuple[float, Any]:
        """Return the current dropout probability and the context of its random stream."""
        if not self.training or self.attention_dropout == 0.0:
            return 0.0, nullcontext()
        return self.attention_dropout, nullcontext() if self._tracker is None else self._tracker().fork()

    def _dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: MaskRule,
        keep: Tensor | None,
        bias: Tensor | None,
        padding: bool,
    ) -> Tensor:
        """Attend for one sequence a sample: ``[s, b, heads, dim]`` each -> ``[s, b, h, e]``."""
        rank, size = self._cp()
        if size > 1:
            if keep is not None or bias is not None:
                refuse(
                    "an attention mask or bias together with context parallelism",
                    "use a causal mask with padding at the end of each sample, or pack the samples (thd)",
                )
            if query.shape[0] % 2:
                raise DataError(f"{query.shape[0]} tokens per context parallel rank must be even (two zigzag chunks)")
        local = key.shape[0]
        key, value = (unzigzag(x, 0, local) for x in self._gather(key, value))
        limited = rule.causal or rule.window != (-1, -1)
        if limited and rule.bottom_right and padding and query.shape[0] != key.shape[0]:
            refuse("a bottom-right mask with padding between different query and key lengths", "pack the samples (thd)")
        start = key.shape[0] - query.shape[0] * size if rule.bottom_right else 0
        return self._chunks(query, key, value, rule, start, keep, bias, chunk_starts(query.shape[0] * size, rank, size))

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values of all context parallel ranks: ``[t, ...]`` -> ``[size, t, ...]``."""
        if self.cp_group is None or self.cp_group.size() == 1:
            return key[None], value[None]
        size = self.cp_group.size()
        key, value = (gather_from_ranks(x, self.cp_group).unflatten(0, (size, x.shape[0])) for x in (key, value))
        return key, value

    def _chunks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: MaskRule,
        start: int,
        keep: Tensor | None,
        bias: Tensor | None,
        chunks: list[tuple[int, int]],
    ) -> Tensor:
        """Attend chunk by chunk of the queries of one sequence; all tensors are ``[s, b, heads, dim]``."""
        dropout, stream = self._dropout()
        # torch's attention takes [b, heads, s, dim].
        key, value = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
        pieces, first = [], 0
        with stream:
            for position, count in chunks:
                piece = query[first : first + count].permute(1, 2, 0, 3)
                offset = start + position
                visible = key.shape[2]
                if rule.causal and keep is None and bias is None:
                    visible = max(0, min(visible, offset + count))  # skip keys after the chunk, which are masked out
                out = attend(
                    piece,
                    key[:, :, :visible],
                    value[:, :, :visible],
                    rule,
                    self.softmax_scale,
                    dropout,
                    offset,
                    keep,
                    bias,
                    self.softmax_offset,
                )
                pieces.append(out.permute(2, 0, 1, 3))
                first += count
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _packed(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        rule: MaskRule,
        mask_type: str,
        bias: Tensor | None,
        totals: tuple[list[int], list[int]],
        padded: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """Attend for each packed sequence: ``[t, heads, dim]`` each -> ``[t, h * e]``; padding gets zeros."""
        if bias is not None or mask_type == "arbitrary":
            refuse("an attention bias or an arbitrary mask with packed (thd) sequences", "pad the batch instead")
        query, key, value = qkv
        rank, size = self._cp()
        lengths = [_differences(ends) for ends in totals]
        starts = [
            unpadded if with_padding is None else _totals(with_padding, "cu_seqlens_padded")
            for unpadded, with_padding in zip(totals, padded, strict=True)
        ]
        room = [_differences(ends) for ends in starts]
        _check_packing(lengths, room, starts, size, query.shape[0], key.shape[0])
        # One gather for all sequences: a rank's keys of every sequence are in one tensor.
        keys, values = self._gather(key[:, None], value[:, None])  # [size, t, 1, heads, dim]
        pieces, end = [], 0
        for index, (query_count, key_count) in enumerate(zip(*lengths, strict=True)):
            # Every rank has an equal share of each padded sequence: starts are divided like lengths.
            q_begin, q_room = starts[0][index] // size, room[0][index] // size
            k_begin, k_room = starts[1][index] // size, room[1][index] // size
            if q_begin > end:
                pieces.append(query.new_zeros(q_begin - end, 1, query.shape[1], value.shape[-1]))
            # Only after the chunks are in order is the padding at the end, where it can be cut.
            full_key = unzigzag(keys, k_begin, k_room)[:key_count]
            full_value = unzigzag(values, k_begin, k_room)[:key_count]
            corner = key_count - query_count if rule.bottom_right else 0
            chunks = chunk_starts(room[0][index], rank, size)
            parts, row = [], q_begin
            for position, count in chunks:
                # What follows in the chunk is padding, which gets zeros.
                real = max(0, min(count, query_count - position))
                if real:
                    piece = query[row : row + real, None]
                    parts.append(
                        self._chunks(piece, full_key, full_value, rule, corner, None, None, [(position, real)])
                    )
                if count > real:
                    parts.append(query.new_zeros(count - real, 1, query.shape[1], value.shape[-1]))
                row += count
            pieces += parts
            end = q_begin + q_room
        if end < query.shape[0]:
            pieces.append(query.new_zeros(query.shape[0] - end, 1, query.shape[1], value.shape[-1]))
        return torch.cat(pieces).flatten(1)


def _keep(mask: Tensor | tuple[Tensor, Tensor] | None, mask_type: str) -> Tensor | None:
    """Convert the caller's mask (True = masked out) to True = visible; None for mask types that do not use it."""
    if "padding" not in mask_type and mask_type != "arbitrary":
        return None
    if mask is None:
        raise DataError(f"attn_mask_type={mask_type!r} needs an attention_mask")
    if mask_type == "arbitrary":
        if isinstance(mask, tuple):
            raise DataError("attn_mask_type='arbitrary' takes one mask")
        return ~mask.bool()
    query_mask, key_mask = mask if isinstance(mask, tuple) else (mask, mask)
    for padding in (query_mask, key_mask):
        if padding.dim() != 4 or padding.shape[1] != 1 or padding.shape[2] != 1:
            raise DataError(f"a padding mask must be [batch, 1, 1, length], got {tuple(padding.shape)}")
    return ~(query_mask.bool().transpose(2, 3) | key_mask.bool())


def _totals(cu_seqlens: Tensor | None, name: str) -> list[int]:
    if cu_seqlens is None:
        raise DataError(f"qkv_format='thd' needs {name}")
    return [int(total) for total in cu_seqlens.tolist()]


def _differences(totals: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(totals)]


def _check_packing(
    lengths: list[list[int]], room: list[list[int]], starts: list[list[int]], size: int, queries: int, keys: int
) -> None:
    """Raise DataError unless every sequence fits its padded length, and these fit the tokens of this rank."""
    for real, available, begin, tokens in zip(lengths, room, starts, (queries, keys), strict=True):
        if len(real) != len(available) or any(n < 0 or n > r for n, r in zip(real, available, strict=False)):
            raise DataError(f"packed lengths {real} do not fit the padded lengths {available}")
        if begin[-1] // size > tokens:
            raise DataError(f"cu_seqlens end at {begin[-1]}, but this rank holds {tokens} tokens of 1/{size} of them")
        if size > 1 and any(r % (2 * size) for r in available):
            raise DataError(
                f"context parallel size {size} needs packed lengths that are multiples of {2 * size}, got {available}"
            )
