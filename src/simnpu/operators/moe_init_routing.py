"""``npu_moe_init_routing`` and ``npu_moe_init_routing_v2``: rows in the order of their experts, for inference.

The formulas are those of torch_npu's reference (npu_moe_init_routing_v2), quantisation to int8 included; the float8 and
int4 modes are not simulated. What the documentation calls not initialised is NaN (float) or the smallest number here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError
from simnpu.operators.dispatch import on_host, operator
from simnpu.operators.refusal import Refusal

NO_QUANTISATION, STATIC, DYNAMIC = -1, 0, 1
CUMULATIVE, COUNT, KEY_VALUE = 0, 1, 2
GATHER, SCATTER = 0, 1


@operator
def npu_moe_init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of ``x`` in the order of their experts, where each went, and the sorted experts. Not differentiable.

    ``row_idx`` numbers the copies column by column: entry (row, k) is k * rows + row.
    """
    refuse = Refusal("npu_moe_init_routing", "aclnnMoeInitRouting")
    if expert_idx.shape[0] != x.shape[0] or row_idx.shape != expert_idx.shape:
        refuse.kernel(
            f"x must be [rows, hidden], expert_idx and row_idx [rows, k], but got {list(x.shape)}, "
            f"{list(expert_idx.shape)} and {list(row_idx.shape)}"
        )

    def route(x: Tensor, row_idx: Tensor, expert_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        copies = row_idx.numel()
        numbers = row_idx.flatten().long()
        if not torch.equal(numbers.sort().values, torch.arange(copies)):
            refuse.kernel(
                f"row_idx must hold every number from 0 to {copies - 1} once (entry (row, k) is k * rows + row); it "
                f"holds {len(numbers.unique())} different ones from {int(numbers.min())} to {int(numbers.max())}"
            )
        experts, order = torch.sort(expert_idx.flatten(), stable=True)
        sources = numbers[order]
        places = torch.empty_like(sources).scatter_(0, sources, torch.arange(copies))
        active = min(active_num, x.shape[0]) * expert_idx.shape[-1]
        return x[sources[:active] % x.shape[0]], places.int(), experts.int()

    return on_host(route)(x, row_idx, expert_idx)


@operator
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: tuple[int, int] = (),  # type: ignore[assignment]  # all
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of ``x`` [rows, H] in the order of their experts ``expert_idx`` [rows, k]. Not differentiable.

    Returns:
        the rows: [rows * k or active_num, H], or [experts, capacity, H] with ``drop_pad_mode``; where each copy went
        (gather) or which copy a row is (scatter), int32 [rows * k]; tokens of each expert, int64; scales of the rows.
    """
    refuse = Refusal("npu_moe_init_routing_v2", "aclnnMoeInitRoutingV3")
    check_v2(refuse, x, expert_idx, expert_num, drop_pad_mode, expert_capacity, expert_tokens_num_type, row_idx_type)
    if quant_mode not in (NO_QUANTISATION, STATIC, DYNAMIC):
        raise NotSimulatedError(f"npu_moe_init_routing_v2 with quant_mode {quant_mode} is not simulated")
    if quant_mode == STATIC and (scale is None or offset is None or scale.numel() != 1 or offset.numel() != 1):
        refuse.kernel("quant_mode 0 needs scale and offset of shape [1]")
    if quant_mode == NO_QUANTISATION and scale is not None and tuple(scale.shape) != (x.shape[0],):
        refuse.kernel(f"without quantisation scale must be [{x.shape[0]}], but got {list(scale.shape)}")
    start, end = tuple(active_expert_range) or (0, expert_num)
    if not 0 <= start < end <= expert_num:
        refuse.kernel(f"active_expert_range [{start}, {end}) must lie in [0, expert_num {expert_num})")
    copies, k = expert_idx.numel(), expert_idx.shape[1]

    def route(
        x: Tensor, expert_idx: Tensor, scale: Tensor | None, offset: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        experts = expert_idx.flatten().long()
        if int(experts.min()) < 0 or int(experts.max()) >= expert_num:
            refuse.kernel(f"expert_idx must lie in [0, expert_num {expert_num}), found up to {int(experts.max())}")
        active = (experts >= start) & (experts < end)
        order = torch.where(active, experts, expert_num).argsort(stable=True)[: int(active.sum())]
        counts = torch.bincount(experts[order], minlength=expert_num)
        if drop_pad_mode:
            rows = slots(experts, order, counts, expert_num, expert_capacity)
        elif active_num > 0:
            rows = order[:active_num]
        else:
            rows = order
        filled = rows >= 0
        row_copies = x[rows.clamp_min(0) // k]
        values, scales = quantise(row_copies, rows // k, experts[rows.clamp_min(0)] - start, quant_mode, scale, offset)
        values = torch.where(filled[:, None], values, torch.zeros_like(values))
        if drop_pad_mode:
            values = values.view(expert_num, expert_capacity, -1)
            scales = torch.where(filled, scales, torch.zeros_like(scales))
        else:
            size = min(active_num, copies) if active_num > 0 else copies
            values, scales = padded(values, size), padded(scales, size)
        places = torch.full((copies,), torch.iinfo(torch.int32).min if row_idx_type == SCATTER else -1)
        if row_idx_type == SCATTER:
            places[: len(order)] = order
        else:
            numbering = rows if drop_pad_mode else order
            places[numbering[numbering >= 0]] = torch.arange(len(numbering))[numbering >= 0]
        tokens = tokens_of(counts, start, end, expert_num, COUNT if drop_pad_mode else expert_tokens_num_type)
        if not expert_tokens_num_flag:
            tokens = torch.full_like(tokens, torch.iinfo(torch.int64).min)
        return values, places.int(), tokens, scales

    return on_host(route)(x, expert_idx, scale, offset)


def check_v2(
    refuse: Refusal, x: Tensor, expert_idx: Tensor, experts: int, drop: int, capacity: int, tokens_type: int, rows: int
) -> None:
    """Check the documentation's limits on shapes, types and modes."""
    if expert_idx.shape[0] != x.shape[0]:
        refuse.kernel(
            f"x must be [rows, H] and expert_idx [rows, k], but got {list(x.shape)} and {list(expert_idx.shape)}"
        )
    if tokens_type not in (CUMULATIVE, COUNT, KEY_VALUE) or rows not in (GATHER, SCATTER) or drop not in (0, 1):
        refuse.kernel(
            f"expert_tokens_num_type must be 0, 1 or 2, row_idx_type and drop_pad_mode 0 or 1, but got {tokens_type}, "
            f"{rows} and {drop}"
        )
    limit = 5120 if tokens_type == KEY_VALUE else 10240
    if not 0 < experts <= limit:
        refuse.kernel(f"expert_num must be in [1, {limit}], but got {experts}")
    if drop and not 0 < capacity <= x.shape[0]:
        refuse.kernel(f"with drop_pad_mode expert_capacity must be in [1, {x.shape[0]}], but got {capacity}")
    if drop and rows != GATHER:
        refuse.kernel("with drop_pad_mode row_idx_type must be 0")


def slots(experts: Tensor, order: Tensor, counts: Tensor, expert_num: int, capacity: int) -> Tensor:
    """Return the copy in every slot of every expert [expert_num * capacity]; -1 where there is none."""
    first = counts.cumsum(0) - counts
    rank = torch.arange(len(order)) - first[experts[order]]
    within_capacity = rank < capacity
    slot_rows = torch.full((expert_num * capacity,), -1)
    slot_rows[experts[order][within_capacity] * capacity + rank[within_capacity]] = order[within_capacity]
    return slot_rows


def quantise(
    rows: Tensor, sources: Tensor, experts: Tensor, mode: int, scale: Tensor | None, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the rows, unchanged or as int8, and one scale a row."""
    if mode == NO_QUANTISATION:
        scales = scale[sources.clamp_min(0)] if scale is not None else torch.full((len(rows),), torch.nan)
        return rows, scales.float()
    wide = rows.float()
    if mode == STATIC and scale is not None and offset is not None:  # both are there, by the check
        rounded = (wide * scale + offset).round().clamp(-128, 127)
        return rounded.to(torch.int8), torch.full((len(rows),), torch.nan)
    if scale is not None:
        wide = wide * (scale if scale.shape[0] == 1 else scale[experts.clamp_min(0)])
    scales = wide.abs().amax(-1) / 127
    return (wide / scales[:, None]).nan_to_num(0.0).round().to(torch.int8), scales


def tokens_of(counts: Tensor, start: int, end: int, expert_num: int, kind: int) -> Tensor:
    """Tokens of the active experts: summed up, counted, or as pairs of expert and count with zeros behind."""
    active = counts[start:end]
    if kind == CUMULATIVE:
        return active.cumsum(0)
    if kind == COUNT:
        return active
    pairs = torch.stack((torch.arange(start, end), active), -1)[active > 0]
    return torch.cat((pairs, torch.zeros(expert_num - len(pairs), 2, dtype=torch.int64)))


def padded(values: Tensor, rows: int) -> Tensor:
    """``values`` with rows behind that hold nothing: NaN, or the smallest integer."""
    filler = torch.nan if values.is_floating_point() else torch.iinfo(values.dtype).min
    missing = values.new_full((rows - len(values), *values.shape[1:]), filler)
    return torch.cat((values, missing))
