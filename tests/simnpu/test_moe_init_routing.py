"""``npu_moe_init_routing_v2`` against a loop over tokens and experts, and the checks of both versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError

pytestmark = pytest.mark.usefixtures("sim_npu")
ROWS, K, HIDDEN, EXPERTS = 7, 3, 5, 6


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, HIDDEN, generator=generator)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:K] for _ in range(ROWS)])
    return x, experts.int()


def by_expert(experts: Tensor, start: int, end: int) -> list[tuple[int, int, int]]:
    """(expert, row, copy) of every active copy, in the order of the experts."""
    return [
        (expert, row, row * K + k)
        for expert in range(start, end)
        for row in range(ROWS)
        for k in range(K)
        if int(experts[row, k]) == expert
    ]


@pytest.mark.parametrize(("start", "end"), [(0, EXPERTS), (2, 5)])
@pytest.mark.parametrize("row_idx_type", [0, 1])
def test_rows_go_to_their_experts(npu: Any, start: int, end: int, row_idx_type: int) -> None:
    x, experts = inputs()
    scale = torch.arange(ROWS).float()
    rows, places, counts, scales = npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), scale=scale.npu(), expert_num=EXPERTS, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[start, end], row_idx_type=row_idx_type,
    )  # fmt: skip
    order = by_expert(experts, start, end)
    assert rows.shape == (ROWS * K, HIDDEN)
    assert counts.tolist() == [sum(e == expert for e, _, _ in order) for expert in range(start, end)]
    assert counts.dtype == torch.int64
    assert places.dtype == torch.int32
    for number, (_, row, copy) in enumerate(order):
        assert torch.equal(rows[number].cpu(), x[row])
        assert scales[number] == row
        assert (places[number] if row_idx_type else places[copy]) == (copy if row_idx_type else number)
    assert rows[len(order) :].isnan().all()  # not initialised, by the documentation
    if not row_idx_type:
        inactive = set(range(ROWS * K)) - {copy for _, _, copy in order}
        assert all(places[copy] == -1 for copy in inactive)


def test_a_limit_on_all_rows_and_the_other_counts(npu: Any) -> None:
    x, experts = inputs()
    order = by_expert(experts, 0, EXPERTS)
    results = npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), active_num=4, expert_num=EXPERTS, expert_tokens_num_flag=True
    )
    torch.testing.assert_close(results[0].cpu(), torch.stack([x[row] for _, row, _ in order[:4]]))
    sizes = [sum(e == expert for e, _, _ in order) for expert in range(EXPERTS)]
    assert results[2].tolist() == [sum(sizes[: n + 1]) for n in range(EXPERTS)]
    pairs = npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), expert_num=EXPERTS + 2, expert_tokens_num_type=2, expert_tokens_num_flag=True
    )[2]
    expected = [[expert, size] for expert, size in enumerate(sizes) if size]
    assert pairs.tolist() == expected + [[0, 0]] * (EXPERTS + 2 - len(expected))


def test_capacity_drops_and_pads(npu: Any) -> None:
    x, experts = inputs()
    capacity = 2
    rows, places, counts, _ = npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), expert_capacity=capacity, expert_num=EXPERTS, drop_pad_mode=1,
        expert_tokens_num_type=1, expert_tokens_num_flag=True,
    )  # fmt: skip
    expected = torch.zeros(EXPERTS, capacity, HIDDEN)
    slots = torch.full((ROWS * K,), -1)
    used = [0] * EXPERTS
    for expert, row, copy in by_expert(experts, 0, EXPERTS):
        if used[expert] < capacity:
            expected[expert, used[expert]] = x[row]
            slots[copy] = expert * capacity + used[expert]
        used[expert] += 1
    torch.testing.assert_close(rows.cpu(), expected)
    assert places.tolist() == slots.tolist()
    assert counts.tolist() == used


@pytest.mark.parametrize("smooth", [False, True])
def test_dynamic_quantisation_to_int8(npu: Any, smooth: bool) -> None:
    x, experts = inputs()
    factor = torch.rand(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(5)) + 0.5
    rows, _, _, scales = npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), scale=factor.npu() if smooth else None, expert_num=EXPERTS, quant_mode=1
    )
    assert rows.dtype == torch.int8
    for number, (expert, row, _) in enumerate(by_expert(experts, 0, EXPERTS)):
        smoothed = x[row].double() * (factor[expert].double() if smooth else 1)
        assert float(scales[number]) == pytest.approx(float(smoothed.abs().max()) / 127, rel=1e-6)
        assert (rows[number].cpu().double() * float(scales[number]) - smoothed).abs().max() <= float(
            scales[number]
        ) * 0.5001


def test_static_quantisation_to_int8(npu: Any) -> None:
    x, experts = inputs()
    scale, offset = torch.tensor([20.0]), torch.tensor([3.0])
    rows = npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), scale=scale.npu(), offset=offset.npu(), expert_num=EXPERTS, quant_mode=0
    )[0]
    for number, (_, row, _) in enumerate(by_expert(experts, 0, EXPERTS)):
        assert rows[number].tolist() == (x[row] * 20 + 3).round().clamp(-128, 127).int().tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_num": 0}, r"expert_num must be in \[1, 10240\], but got 0"),
        ({"expert_num": 6000, "expert_tokens_num_type": 2}, r"expert_num must be in \[1, 5120\], but got 6000"),
        ({"active_expert_range": [2, 9]}, r"active_expert_range \[2, 9\) must lie in \[0, expert_num 6\)"),
        ({"expert_num": 3}, r"expert_idx must lie in \[0, expert_num 3\), found up to 5"),
        ({"drop_pad_mode": 1}, r"with drop_pad_mode expert_capacity must be in \[1, 7\], but got -1"),
        ({"row_idx_type": 2}, "row_idx_type and drop_pad_mode 0 or 1"),
        ({"quant_mode": 0}, "quant_mode 0 needs scale and offset"),
        ({"scale": torch.ones(3)}, r"without quantisation scale must be \[7\], but got \[3\]"),
    ],
)
def test_what_the_documentation_excludes(npu: Any, changes: dict[str, Any], message: str) -> None:
    x, experts = inputs()
    changes = {name: value.npu() if isinstance(value, Tensor) else value for name, value in changes.items()}
    with pytest.raises(RuntimeError, match=message):
        npu.npu_moe_init_routing_v2(x.npu(), experts.npu(), **{"expert_num": EXPERTS, **changes})
    with pytest.raises(RuntimeError, match=r"expert_idx must be int32, but got torch\.int64"):
        npu.npu_moe_init_routing_v2(x.npu(), experts.long().npu(), expert_num=EXPERTS)


def test_what_is_not_simulated_says_so(npu: Any) -> None:
    x, experts = inputs()
    with pytest.raises(NotSimulatedError, match="quant_mode 3 is not simulated"):
        npu.npu_moe_init_routing_v2(x.npu(), experts.npu(), expert_num=EXPERTS, quant_mode=3)


@pytest.mark.parametrize("fault", ["repeated", "too large", "negative"])
def test_the_older_version_refuses_a_row_idx_that_is_no_numbering(npu: Any, fault: str) -> None:
    """On such a row_idx the kernel writes only some of its outputs; the others keep what the memory held."""
    x, experts = inputs()
    numbers = torch.arange(ROWS * K, dtype=torch.int32).view(K, ROWS).t().contiguous()
    rows, places, row_experts = npu.npu_moe_init_routing(x.npu(), numbers.npu(), experts.npu(), ROWS)
    for number, expert in enumerate(row_experts.tolist()):  # copies of an expert come in the order of its rows
        assert torch.equal(rows[number].cpu(), x[by_expert(experts, 0, EXPERTS)[number][1]])
        assert expert == by_expert(experts, 0, EXPERTS)[number][0]
    assert sorted(places.tolist()) == list(range(ROWS * K))
    numbers[0, 0] = {"repeated": 1, "too large": ROWS * K, "negative": -1}[fault]
    with pytest.raises(RuntimeError, match=r"row_idx must hold every number from 0 to 20 once"):
        npu.npu_moe_init_routing(x.npu(), numbers.npu(), experts.npu(), ROWS)
