"""Which keys a query sees in the fused attention: ``sparse_mode``, ``atten_mask``, ``pre_tockens``, ``next_tockens``.

The rules are those of the public documentation of ``npu_fusion_attention`` and of the kernel's shape checks:

====  =================  =====================================================================================
mode  name               atten_mask (True = hidden)
====  =================  =====================================================================================
0     default            [Sq, Skv], with pre/next tokens counted from the upper left
1     all                [Sq, Skv]; tokens are not used
2     leftUpCausal       compressed [2048, 2048] triangle; the diagonal starts in the upper left
3     rightDownCausal    compressed [2048, 2048] triangle; the diagonal ends in the lower right
4     band               compressed [2048, 2048] triangle; pre/next tokens counted from the lower right
5     prefix             [batch, 1 or heads, Sq, Skv], with ``prefix``; not with TND
6     prefix compressed  [3072, 2048]; causal (lower right), and the first ``prefix`` keys are always seen
7     band at the end    TND, compressed: as 3, and the last sequence as 4
8     band at the start  TND, compressed: as 2, and the first sequence as 4
====  =================  =====================================================================================

**Without atten_mask nothing is hidden, whatever sparse_mode says.**
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from simnpu.operators.attention_layout import Layout
from simnpu.operators.refusal import Refusal

COMPRESSED = 2048
PREFIX_ROWS = 3072
MAX_PREFIXES = 32
DEFAULT, ALL, LEFT_UP, RIGHT_DOWN, BAND, PREFIX, PREFIX_COMPRESSED, RIGHT_DOWN_BAND, BAND_LEFT_UP = range(9)
DENSE = (DEFAULT, ALL, PREFIX)
TRIANGULAR = (LEFT_UP, RIGHT_DOWN, BAND, RIGHT_DOWN_BAND, BAND_LEFT_UP)


def hidden_keys(
    layout: Layout,
    atten_mask: Tensor | None,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    prefix: Sequence[int] | None,
    refuse: Refusal,
) -> list[Tensor | None]:
    """Return the hidden pairs of each block: bool, broadcastable to [batch, heads, Sq, Skv]; None hides nothing."""
    check_mode(layout, sparse_mode, refuse)
    if atten_mask is None:
        return [None] * len(layout.q_lengths)
    check_mask(layout, atten_mask, sparse_mode, refuse)
    if sparse_mode in (PREFIX, PREFIX_COMPRESSED):
        check_prefix(layout, prefix, refuse)
    check_bands(layout, sparse_mode, pre_tokens, next_tokens, refuse)
    mask = atten_mask.bool()
    if sparse_mode in TRIANGULAR:
        check_triangle(mask, sparse_mode, refuse)
    if sparse_mode == PREFIX_COMPRESSED:
        return prefix_blocks(layout, prefix or ())
    band_at = band_number(layout, sparse_mode)
    blocks: list[Tensor | None] = []
    for number, (q_length, kv_length) in enumerate(zip(layout.q_lengths, layout.kv_lengths, strict=True)):
        if sparse_mode in TRIANGULAR:
            mode = BAND if number == band_at else sparse_mode
            blocks.append(hidden_in_block(mode, q_length, kv_length, pre_tokens, next_tokens))
        else:
            part = dense_part(layout, mask, number)
            if sparse_mode == DEFAULT:
                part = part | outside_band(q_length, kv_length, pre_tokens, next_tokens, 0)
            blocks.append(part)
    if layout.packed and sparse_mode in (DEFAULT, ALL):
        check_rows(blocks, refuse)
    return blocks


def check_mode(layout: Layout, sparse_mode: int, refuse: Refusal) -> None:
    """Refuse modes that torch_npu does not take for this layout."""
    if layout.packed:
        if not DEFAULT <= sparse_mode <= BAND_LEFT_UP or sparse_mode == PREFIX:
            refuse(f"The sparse_mode value must be in range of [0,5) or (5,8], but got {sparse_mode}")
    elif not DEFAULT <= sparse_mode <= PREFIX_COMPRESSED:
        refuse(f"The sparse_mode value must be in range of [0,6], but got {sparse_mode}")


def check_mask(layout: Layout, mask: Tensor, sparse_mode: int, refuse: Refusal) -> None:
    """Type and shape of the mask, as the kernel checks them."""
    if mask.dtype not in (torch.bool, torch.uint8):
        refuse.kernel(f"invalid attenMask dtype[{mask.dtype}], only support bool or uint8.")
    shape = tuple(mask.shape)
    if mask.dim() not in (2, 4):
        refuse.kernel(f"atten mask dim should be 2 or 4, but got {mask.dim()}")
    if layout.packed and mask.dim() != 2:
        refuse.kernel(f"get unsupported atten_mask shape, the shape is {list(shape)}: TND takes [maxSq, maxSkv]")
    if sparse_mode in TRIANGULAR:
        if shape[-2:] != (COMPRESSED, COMPRESSED):
            refuse.kernel(
                "In the attenmask compression, please set the atten_mask_shape to [2048,2048]. (sparse_mode "
                f"{sparse_mode}, atten_mask {list(shape)})"
            )
        return
    if sparse_mode == PREFIX_COMPRESSED:
        if shape[-2:] != (PREFIX_ROWS, COMPRESSED):
            refuse.kernel(
                "In the prefix attenmask compression, please set the atten_mask_shape to [3072,2048]. (atten_mask "
                f"{list(shape)})"
            )
        return
    block = (layout.max_q, layout.max_kv)
    by_batch = [(layout.batch, 1, *block), (layout.batch, layout.heads, *block)]
    if sparse_mode == PREFIX:
        accepted = by_batch
    else:
        accepted = [block] if layout.packed else [block, (1, 1, *block), *by_batch]
    if shape not in accepted:
        refuse.kernel(
            f"get unsupported atten_mask shape, the shape is {list(shape)}; accepted here: "
            f"{', '.join(str(list(size)) for size in dict.fromkeys(accepted))}"
        )


def check_triangle(mask: Tensor, sparse_mode: int, refuse: Refusal) -> None:
    """Check a compressed mode's mask. It reads tiles of a triangle from the mask: anything else gives wrong results on hardware.

    A dense mask of a sequence of 2048 has the right shape, so that only its content gives it away.
    """
    words = mask.reshape(-1, COMPRESSED, COMPRESSED)[0].contiguous().view(torch.int64)  # eight at a time, in every call
    if not torch.equal(words, triangle().view(torch.int64)):
        refuse(
            f"atten_mask with sparse_mode {sparse_mode} must be the compressed causal mask, torch.triu(torch.ones("
            "[2048, 2048], dtype=torch.bool), diagonal=1). The kernel does not check its content and would read this "
            "one wrongly; pass a dense mask with sparse_mode 1"
        )


@cache
def triangle() -> Tensor:
    """Return the compressed causal mask."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)


def check_rows(blocks: list[Tensor | None], refuse: Refusal) -> None:
    """Refuse a packed call with a query that sees no key (documented: no row of ones)."""
    for number, block in enumerate(blocks):
        if block is not None and bool(block.all(-1).any()):
            refuse(
                f"atten_mask hides every key from a query of sequence {number}: with TND no row of the mask may be "
                "all True"
            )


def dense_part(layout: Layout, mask: Tensor, number: int) -> Tensor:
    """Return the part of a mask without compression that belongs to a block."""
    if not layout.packed:
        return mask
    return mask[: layout.q_lengths[number], : layout.kv_lengths[number]]


def hidden_in_block(mode: int, q_length: int, kv_length: int, pre_tokens: int, next_tokens: int) -> Tensor:
    """Return the mask that a compressed mode stands for, in full."""
    if mode in (LEFT_UP, BAND_LEFT_UP):
        return outside_band(q_length, kv_length, None, 0, 0)
    if mode in (RIGHT_DOWN, RIGHT_DOWN_BAND):
        return outside_band(q_length, kv_length, None, 0, kv_length - q_length)
    return outside_band(q_length, kv_length, pre_tokens, next_tokens, kv_length - q_length)


def outside_band(q_length: int, kv_length: int, pre: int | None, next_: int, shift: int) -> Tensor:
    """Keys more than ``next_`` after, or ``pre`` before, the key that lies on a query's diagonal (query + shift)."""
    distance = torch.arange(kv_length) - (torch.arange(q_length) + shift).unsqueeze(1)
    hidden = distance > next_
    return hidden if pre is None else hidden | (-distance > pre)


def check_prefix(layout: Layout, prefix: Sequence[int] | None, refuse: Refusal) -> None:
    """Check the number of prefixes, and that each has a length that the kernel takes."""
    if prefix is None or len(prefix) != layout.batch:
        count = None if prefix is None else len(prefix)
        refuse.kernel(f"prefixN is invalid, it should be the same size as bSize[{layout.batch}], but it is {count}.")
    if layout.batch > MAX_PREFIXES:
        refuse.kernel(f"with prefix the batch must be at most {MAX_PREFIXES}, but is {layout.batch}")
    for number, length in enumerate(prefix):
        block = number if layout.packed else 0
        q_length, kv_length = layout.q_lengths[block], layout.kv_lengths[block]
        if not max(0, kv_length - q_length) <= length <= kv_length:
            refuse.kernel(f"prefix must be in [{max(0, kv_length - q_length)}, {kv_length}], but got {length}")


def check_bands(layout: Layout, sparse_mode: int, pre: int, next_: int, refuse: Refusal) -> None:
    """Refuse a band that leaves every query of a block without a key."""
    band_at = band_number(layout, sparse_mode)
    for number, (q_length, kv_length) in enumerate(zip(layout.q_lengths, layout.kv_lengths, strict=True)):
        if not q_length or (sparse_mode not in (DEFAULT, BAND) and number != band_at):
            continue
        shift = 0 if sparse_mode == DEFAULT else kv_length - q_length
        if pre + next_ < 0 or q_length - 1 + shift + next_ < 0 or shift - pre >= kv_length:
            refuse.kernel(
                f"pre_tokens {pre} and next_tokens {next_} with sparse_mode {sparse_mode} make an empty band of "
                f"{q_length} queries and {kv_length} keys"
            )


def band_number(layout: Layout, sparse_mode: int) -> int | None:
    """Return the number of the one block that modes 7 and 8 treat as a band."""
    return {RIGHT_DOWN_BAND: last_used(layout), BAND_LEFT_UP: first_used(layout)}.get(sparse_mode)


def prefix_blocks(layout: Layout, prefix: Sequence[int]) -> list[Tensor | None]:
    """Causal from the lower right, with the first ``prefix[b]`` keys of batch ``b`` seen by all."""
    blocks = []
    for q_length, kv_length in zip(layout.q_lengths, layout.kv_lengths, strict=True):
        causal = outside_band(q_length, kv_length, None, 0, kv_length - q_length)
        numbers = prefix if not layout.packed else [prefix[len(blocks)]]
        visible = torch.arange(kv_length) < torch.tensor(list(numbers)).view(-1, 1, 1, 1)
        blocks.append(causal & ~visible)
    return blocks


def first_used(layout: Layout) -> int:
    return next((number for number, length in enumerate(layout.q_lengths) if length), 0)


def last_used(layout: Layout) -> int:
    return max((number for number, length in enumerate(layout.q_lengths) if length), default=0)
