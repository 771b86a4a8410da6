"""DotProductAttention against a dense softmax over every pair of tokens, in fp64 loops of plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megascend.errors import ConfigError, DataError, PlatformError
from megascend.reference.te.attention import DotProductAttention
from megascend.reference.te.attention_core import chunk_starts, unzigzag

HEADS, GROUPS, DIM, VALUE_DIM = 4, 2, 8, 6


def attention(**kwargs: Any) -> DotProductAttention:
    defaults: dict[str, Any] = {"num_gqa_groups": GROUPS}
    return DotProductAttention(HEADS, (DIM, VALUE_DIM), **{**defaults, **kwargs})


def qkv(*lead: int, kv_lead: tuple[int, ...] | None = None, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kv_lead = kv_lead or lead
    shapes = [(*lead, HEADS, DIM), (*kv_lead, GROUPS, DIM), (*kv_lead, GROUPS, VALUE_DIM)]
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def dense(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attend for one sequence: ``[q, heads, d]``, ``[k, groups, d]``, ``keep`` ``[q, k]`` -> ``[q, heads * e]``."""
    outputs = []
    for head in range(query.shape[1]):
        shared = head // (query.shape[1] // key.shape[1])
        scores = query[:, head].double() @ key[:, shared].double().T / math.sqrt(DIM)
        if bias is not None:
            scores = scores + bias[head].double()
        weights = torch.exp(scores - scores.detach().amax(dim=1, keepdim=True)) * keep
        total = weights.sum(dim=1, keepdim=True)
        outputs.append(weights / torch.where(total == 0, 1.0, total) @ value[:, shared].double())
    return torch.cat(outputs, dim=1).float()


def causal(queries: int, keys: int | None = None, left: int = -1, right: int = 0, shift: int = 0) -> Tensor:
    keep = torch.zeros(queries, keys or queries, dtype=torch.bool)
    for i in range(queries):
        for j in range(keep.shape[1]):
            distance = j - (i + shift)
            keep[i, j] = (left < 0 or distance >= -left) and (right < 0 or distance <= right)
    return keep


def check(result: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=2e-6)
    weighting = torch.sin(torch.arange(expected.numel(), dtype=expected.dtype)).view_as(expected)
    grads = torch.autograd.grad((result * weighting).sum(), leaves)
    expected_grads = torch.autograd.grad((expected * weighting).sum(), leaves)
    for g, w in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=5e-6)


def batched(leaves: list[Tensor], keeps: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """Attend with one dense calculation per sample: ``[s, b, ...]`` -> ``[s, b, h * e]``."""
    samples = [dense(*(x[:, b] for x in leaves), keeps[b], bias) for b in range(len(keeps))]
    return torch.stack(samples, dim=1)


@pytest.mark.parametrize(
    ("mask_type", "window", "keep"),
    [
        ("causal", None, causal(11)),
        ("causal", (3, 0), causal(11, left=3)),
        ("no_mask", None, causal(11, right=-1)),
        ("no_mask", (2, 1), causal(11, left=2, right=1)),
        ("causal_bottom_right", None, causal(11)),
    ],
)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_dense_layouts(mask_type: str, window: tuple[int, int] | None, keep: Tensor, layout: str) -> None:
    leaves = qkv(11, 2)
    module = attention(attn_mask_type=mask_type, window_size=window, qkv_format=layout)
    if layout == "sbhd":
        out = module(*leaves)
    else:
        out = module(*(x.transpose(0, 1) for x in leaves)).transpose(0, 1)
    assert out.shape == (11, 2, HEADS * VALUE_DIM)
    check(out, batched(leaves, [keep, keep]), leaves)


@pytest.mark.parametrize("mask_type", ["padding", "padding_causal"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_masks(mask_type: str, side: str) -> None:
    leaves, lengths = qkv(9, 3), (9, 5, 1)
    masked = torch.zeros(3, 1, 1, 9, dtype=torch.bool)
    for sample, length in enumerate(lengths):
        padding = slice(length, 9) if side == "right" else slice(0, 9 - length)
        masked[sample, ..., padding] = True
    position = causal(9) if "causal" in mask_type else causal(9, right=-1)
    keeps = [position & ~row[0, 0, :, None] & ~row[0, 0, None, :] for row in masked]
    out = attention(attn_mask_type=mask_type)(*leaves, attention_mask=masked)
    check(out, batched(leaves, keeps), leaves)
    assert torch.equal(out[masked[:, 0, 0].T], torch.zeros_like(out[masked[:, 0, 0].T]))


def test_arbitrary_mask_and_bias() -> None:
    leaves = qkv(7, 2)
    masked = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(5)) > 0.6
    masked[0, 0, 3] = True  # a query that may look nowhere
    bias = torch.randn(1, HEADS, 7, 7, generator=torch.Generator().manual_seed(6)).requires_grad_()
    out = attention()(
        *leaves,
        attention_mask=masked,
        attn_mask_type="arbitrary",
        core_attention_bias_type="post_scale_bias",
        core_attention_bias=bias,
    )
    check(out, batched(leaves, [~masked[0, 0], ~masked[1, 0]], bias[0]), [*leaves, bias])


def packed_reference(leaves: list[Tensor], starts: list[int], lengths: list[int], keeps: list[Tensor]) -> Tensor:
    """Attend for every packed sequence separately; padding gets zeros."""
    rows = [torch.zeros(leaves[0].shape[0], HEADS * VALUE_DIM)]
    for start, length, keep in zip(starts, lengths, keeps, strict=True):
        out = dense(*(x[start : start + length] for x in leaves), keep)
        rows.append(torch.nn.functional.pad(out, (0, 0, start, leaves[0].shape[0] - start - length)))
    return torch.stack(rows).sum(0)


@pytest.mark.parametrize("window", [None, (2, 0)])
def test_packed_sequences_do_not_attend_to_each_other(window: tuple[int, int] | None) -> None:
    leaves, totals = qkv(14), torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    out = attention(window_size=window)(
        *leaves, qkv_format="thd", cu_seqlens_q=totals, cu_seqlens_kv=totals, attn_mask_type="padding_causal"
    )
    left = -1 if window is None else window[0]
    keeps = [causal(n, left=left) for n in (5, 1, 7)]
    check(out, packed_reference(leaves, [0, 5, 6], [5, 1, 7], keeps), leaves)


def test_packed_with_padding_between() -> None:
    leaves = qkv(16)
    real, padded = torch.tensor([0, 3, 8]), torch.tensor([0, 6, 14])
    out = attention()(
        *leaves,
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        attn_mask_type="padding_causal",
    )
    check(out, packed_reference(leaves, [0, 6], [3, 5], [causal(3), causal(5)]), leaves)


def test_softmax_of_bf16_is_wide() -> None:
    leaves = [x.detach().bfloat16() for x in qkv(64, 1)]
    out = attention()(*leaves)
    expected = batched(leaves, [causal(64)])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=8e-3, atol=8e-3)


def test_dropout_only_in_training_and_unbiased() -> None:
    query, key, value = (x.detach() for x in qkv(16, 1))
    module = attention(attention_dropout=0.4)
    exact = batched([query, key, value], [causal(16)])
    torch.testing.assert_close(module.eval()(query, key, value), exact, rtol=1e-5, atol=2e-6)
    module.train()
    torch.manual_seed(0)
    first = module(query, key, value)
    torch.manual_seed(0)
    assert torch.equal(first, module(query, key, value))
    assert (first - exact).abs().max() > 0.1
    mean = torch.stack([module(query, key, value) for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, exact, rtol=0, atol=0.15)


def test_zigzag_layout() -> None:
    """Split a sequence of eight over two ranks: rank 0 gets 0 1 6 7, rank 1 gets 2 3 4 5."""
    assert chunk_starts(8, 0, 2) == [(0, 2), (6, 2)]
    assert chunk_starts(8, 1, 2) == [(2, 2), (4, 2)]
    gathered = torch.tensor([[9, 0, 1, 6, 7], [9, 2, 3, 4, 5]])
    assert unzigzag(gathered, 1, 4).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"softmax_type": "off-by-one"}, "softmax_type"),
        ({"return_max_logit": True}, "qk_clip"),
        ({"cp_group": [None, None]}, "hierarchical"),
    ],
)
def test_refused_at_construction(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(PlatformError, match=named):
        attention(**kwargs)


def test_refused_calls() -> None:
    leaves, totals = qkv(4), torch.tensor([0, 4])
    module = attention()
    with pytest.raises(DataError, match="cu_seqlens_q"):
        module(*leaves, qkv_format="thd")
    with pytest.raises(DataError, match="this rank holds 4 tokens"):
        module(*leaves, qkv_format="thd", cu_seqlens_q=totals * 2, cu_seqlens_kv=totals * 2)
    with pytest.raises(DataError, match="needs an attention_mask"):
        module(*qkv(4, 1), attn_mask_type="padding_causal")
    with pytest.raises(ConfigError, match="attn_mask_type"):
        module(*qkv(4, 1), attn_mask_type="diagonal")
    with pytest.raises(ConfigError, match="window_size"):
        module(*qkv(4, 1), attn_mask_type="no_mask", window_size=(3, -1))
