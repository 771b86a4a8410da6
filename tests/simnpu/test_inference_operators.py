"""Cross entropy, gating, Gemma's norm and rotary embedding in place: against the formulas in float64, and their limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError

pytestmark = pytest.mark.usefixtures("sim_npu")


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LABELS = [3, 0, 4, 2, 3, 1]


def losses(logits: Tensor, labels: list[int], weight: list[float], smoothing: float) -> list[float]:
    """Compute each row's loss, a sum over classes written out."""
    row_losses = []
    for row, label in zip(logits.double().tolist(), labels, strict=True):
        total = math.log(sum(math.exp(value) for value in row))
        target = -weight[label] * (row[label] - total)
        spread = sum(-w * (value - total) for w, value in zip(weight, row, strict=True)) / len(row)
        row_losses.append((1 - smoothing) * target + smoothing * spread)
    return row_losses


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(npu: Any, reduction: str, smoothing: float) -> None:
    logits, weight = make(6, 5), torch.tensor([0.1, 0.5, 1.0, 0.7, 0.3])
    labels = torch.tensor(LABELS)
    loss, log_prob, *empty = npu.npu_cross_entropy_loss(
        logits.npu(), labels.npu(), weight.npu(), reduction, ignore_index=2, label_smoothing=smoothing
    )
    rows = [
        0.0 if y == 2 else v for y, v in zip(LABELS, losses(logits, LABELS, weight.tolist(), smoothing), strict=True)
    ]
    weights = sum(float(weight[y]) for y in LABELS if y != 2)
    expected = {"mean": [sum(rows) / weights], "sum": [sum(rows)], "none": rows}[reduction]
    assert loss.tolist() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(log_prob.cpu().double(), logits.double().log_softmax(-1), atol=1e-6, rtol=1e-6)
    assert [tensor.numel() for tensor in empty] == [0, 0]


def test_cross_entropys_gradient(npu: Any) -> None:
    logits = make(6, 5).npu().requires_grad_()
    npu.npu_cross_entropy_loss(logits, torch.tensor(LABELS).npu())[0].backward()
    expected = make(6, 5).double().softmax(-1)
    for row, label in enumerate(LABELS):
        expected[row, label] -= 1
    torch.testing.assert_close(logits.grad.cpu().double(), expected / 6, atol=1e-7, rtol=1e-5)


def test_what_cross_entropy_refuses(npu: Any) -> None:
    logits, labels = make(6, 5).npu(), torch.tensor(LABELS).npu()
    ignored = torch.tensor([-100, *LABELS[1:]]).npu()
    with pytest.raises(
        RuntimeError, match=r"target must be in \[0, 5\), but holds -100; a negative ignore_index \(-100\)"
    ):
        npu.npu_cross_entropy_loss(logits, ignored)
    with pytest.raises(RuntimeError, match="ignore_index must be less than C 5, but got 5"):
        npu.npu_cross_entropy_loss(logits, labels, ignore_index=5)
    leaf = logits.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="with a gradient label_smoothing must be 0, but got"):
        npu.npu_cross_entropy_loss(leaf, labels, reduction="sum", label_smoothing=0.1)
    with pytest.raises(RuntimeError, match="with a gradient and reduction mean, weight and ignore_index must have"):
        npu.npu_cross_entropy_loss(leaf, labels, ignore_index=1)
    with pytest.raises(RuntimeError, match=r"target must be int64, but got torch\.int32"):
        npu.npu_cross_entropy_loss(logits, labels.int())
    with pytest.raises(RuntimeError, match=r"N must be in \(0, 200000\], but got 200001"):
        npu.npu_cross_entropy_loss(torch.zeros(200001, 1).npu(), torch.zeros(200001, dtype=torch.int64).npu())
    with pytest.raises(NotSimulatedError, match="z-loss"):
        npu.npu_cross_entropy_loss(logits, labels, return_zloss=True)


def test_gating_by_softmax(npu: Any) -> None:
    x, finished = make(4, 8), torch.tensor([False, True, False, False])
    values, experts, rows = npu.npu_moe_gating_top_k_softmax(x.npu(), finished.npu(), k=3)
    for row, scores in enumerate(x.double().tolist()):
        total = sum(map(math.exp, scores))
        ranked = sorted(range(8), key=lambda expert: (-scores[expert], expert))[:3]
        assert values[row].tolist() == pytest.approx([math.exp(scores[expert]) / total for expert in ranked], rel=1e-5)
        assert experts[row].tolist() == ([8, 8, 8] if row == 1 else ranked)
        assert rows[row].tolist() == [row, 4 + row, 8 + row]
    assert experts.dtype == rows.dtype == torch.int32
    with pytest.raises(RuntimeError, match=r"The k should be in \[1, 8\], but got 9"):
        npu.npu_moe_gating_top_k_softmax(x.npu(), k=9)
    with pytest.raises(RuntimeError, match=r"finished must be bool \[4\]"):
        npu.npu_moe_gating_top_k_softmax(x.npu(), finished[:2].npu())


@pytest.mark.parametrize("norm_type", [0, 1])
@pytest.mark.parametrize("group_select_mode", [0, 1])
def test_gating_by_groups(npu: Any, norm_type: int, group_select_mode: int) -> None:
    x, bias, groups, k_group, k, factor = make(5, 12), make(12, seed=1), 3, 2, 4, 2.5
    weights, experts, scores = npu.npu_moe_gating_top_k(
        x.npu(), k, bias=bias.npu(), k_group=k_group, group_count=groups, group_select_mode=group_select_mode,
        norm_type=norm_type, out_flag=True, routed_scaling_factor=factor,
    )  # fmt: skip
    for row, values in enumerate(x.double().tolist()):
        total = sum(map(math.exp, values))
        plain = [1 / (1 + math.exp(-v)) if norm_type else math.exp(v) / total for v in values]
        biased = [score + float(b) for score, b in zip(plain, bias.double(), strict=True)]
        members = [range(start, start + 4) for start in (0, 4, 8)]
        group_scores = [sum(sorted((biased[e] for e in m), reverse=True)[: 1 + group_select_mode]) for m in members]
        best = sorted(range(groups), key=lambda group: -group_scores[group])[:k_group]
        chosen = sorted((e for group in best for e in members[group]), key=lambda expert: -biased[expert])[:k]
        assert experts[row].tolist() == chosen
        share = sum(plain[e] for e in chosen) if norm_type else 1.0
        assert weights[row].tolist() == pytest.approx([factor * plain[e] / share for e in chosen], rel=1e-5)
        assert scores[row].tolist() == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 9, "k_group": 2, "group_count": 3}, r"k must be in \[1, 8\], the experts of 2 groups, but got 9"),
        ({"k": 1, "group_count": 5}, "12 experts must divide into group_count groups of more than 2, but got 5"),
        ({"k": 1, "group_count": 6}, "groups of more than 2, but got 6"),
        ({"k": 1, "k_group": 4, "group_count": 3}, r"k_group must be in \[1, group_count 3\], but got 4"),
        ({"k": 1, "renorm": 1}, "renorm must be 0"),
    ],
)
def test_what_gating_refuses(npu: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        npu.npu_moe_gating_top_k(make(2, 12).npu(), **options)
    with pytest.raises(RuntimeError, match="x must have at most 2048 experts, but got 2049"):
        npu.npu_moe_gating_top_k(torch.zeros(1, 2049).npu(), 1)
    with pytest.raises(RuntimeError, match="The dtype of x and bias should be same"):
        npu.npu_moe_gating_top_k(make(2, 12).npu(), 1, bias=make(12).half().npu())


def test_gemmas_norm(npu: Any) -> None:
    x, gamma = make(3, 8), make(8, seed=1)
    result, rstd = npu.npu_gemma_rms_norm(x.npu(), gamma.npu(), epsilon=1e-5)
    root = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(result.cpu().double(), x.double() * root * (1 + gamma.double()), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rstd.cpu().double(), root, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_rotation_in_place(npu: Any, layout: str) -> None:
    leading = (2, 3) if layout == "BSND" else (6,)
    query, key, angles = make(*leading, 4, 64), make(*leading, 2, 64, seed=1), make(*leading, 1, 64, seed=2)
    on_device = query.npu(), key.npu()
    results = npu.npu_apply_rotary_pos_emb(*on_device, angles.cos().npu(), angles.sin().npu(), layout=layout)
    cos, sin = angles.cos().double(), angles.sin().double()
    for before, operand, result in zip((query, key), on_device, results, strict=True):
        first, second = before.double().chunk(2, -1)
        expected = before.double() * cos + torch.cat((-second, first), -1) * sin
        assert result.data_ptr() == operand.data_ptr()
        torch.testing.assert_close(operand.cpu().double(), expected, atol=1e-6, rtol=1e-6)


def test_what_rotation_in_place_refuses(npu: Any) -> None:
    q, cos = make(1, 2, 3, 64).npu(), make(1, 2, 1, 64).npu()
    with pytest.raises(
        RuntimeError, match="takes layout BSND or TND and rotary_mode half, but got BSND and interleave"
    ):
        npu.npu_apply_rotary_pos_emb(q, q, cos, cos, rotary_mode="interleave")
    with pytest.raises(RuntimeError, match="the last dimension must be 64 or 128, but got 32"):
        npu.npu_apply_rotary_pos_emb(q[..., :32], q[..., :32], cos[..., :32], cos[..., :32])
    with pytest.raises(RuntimeError, match="must have one type, but got"):
        npu.npu_apply_rotary_pos_emb(q.half(), q.half(), cos, cos)
    with pytest.raises(RuntimeError, match="do not fit together"):
        npu.npu_apply_rotary_pos_emb(q, q, cos[:, :1], cos[:, :1])
