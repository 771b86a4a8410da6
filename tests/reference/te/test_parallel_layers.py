"""Tensor and context parallel layers on real gloo ranks, against plain calculations on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megascend.errors import DistributedTestError, PlatformError
from megascend.reference.te.attention import DotProductAttention
from megascend.reference.te.linear import LayerNormLinear, Linear
from megascend.testing import run_distributed

TOKENS, HIDDEN, OUT = 8, 6, 4
EPS = 1e-5
TIMEOUT_S = 30.0


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def shard(value: Tensor, dim: int) -> Tensor:
    return value.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()].contiguous()


def loss_weights(out: Tensor) -> Tensor:
    return torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)


def column_rank(sequence_parallel: bool, with_norm: bool) -> dict[str, Tensor]:
    world = dist.group.WORLD
    kwargs: dict[str, Any] = {
        "parallel_mode": "column",
        "tp_group": world,
        "tp_size": dist.get_world_size(),
        "sequence_parallel": sequence_parallel,
    }
    if with_norm:
        layer: Any = LayerNormLinear(
            HIDDEN, OUT, eps=EPS, normalization="RMSNorm", return_layernorm_output=True, **kwargs
        )
        fill(layer.layer_norm_weight, draw(HIDDEN, seed=4))
    else:
        layer = Linear(HIDDEN, OUT, **kwargs)
    fill(layer.weight, shard(draw(OUT, HIDDEN, seed=1), 0))
    fill(layer.bias, shard(draw(OUT, seed=2), 0))
    x = draw(TOKENS, HIDDEN, seed=3)
    x = (shard(x, 0) if sequence_parallel else x).requires_grad_()
    result = layer(x)
    out, normed = result if with_norm else (result, x)
    (out * shard(loss_weights(torch.empty(TOKENS, OUT)), 1)).sum().backward()
    grads = {"out": out, "normed": normed, "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    if with_norm:
        grads["norm"] = layer.layer_norm_weight.grad
    return {name: value.detach() for name, value in grads.items()}


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_parallel(sequence_parallel: bool, with_norm: bool) -> None:
    weight, bias, x = (
        v.requires_grad_() for v in (draw(OUT, HIDDEN, seed=1), draw(OUT, seed=2), draw(TOKENS, HIDDEN, seed=3))
    )
    norm = draw(HIDDEN, seed=4).requires_grad_()
    normed = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * norm if with_norm else x
    out = F.linear(normed, weight, bias)
    (out * loss_weights(out)).sum().backward()

    ranks = run_distributed(column_rank, 2, sequence_parallel, with_norm, timeout_s=TIMEOUT_S)

    def joined(name: str, dim: int) -> Tensor:
        return torch.cat([rank[name] for rank in ranks], dim)

    torch.testing.assert_close(joined("out", 1), out)
    torch.testing.assert_close(joined("weight", 0), weight.grad)
    torch.testing.assert_close(joined("bias", 0), bias.grad)
    if sequence_parallel:
        torch.testing.assert_close(joined("x", 0), x.grad)
        torch.testing.assert_close(joined("normed", 0), normed)  # each rank's own tokens, not gathered
        if with_norm:
            # Partial on each rank: this is why the weight is marked ``sequence_parallel``.
            torch.testing.assert_close(ranks[0]["norm"] + ranks[1]["norm"], norm.grad)
    else:
        for rank in ranks:
            torch.testing.assert_close(rank["x"], x.grad)
            torch.testing.assert_close(rank["normed"], normed)
            if with_norm:
                torch.testing.assert_close(rank["norm"], norm.grad)


def row_rank(sequence_parallel: bool) -> dict[str, Tensor]:
    layer = Linear(
        HIDDEN,
        OUT,
        parallel_mode="row",
        tp_group=dist.group.WORLD,
        tp_size=dist.get_world_size(),
        sequence_parallel=sequence_parallel,
    )
    fill(layer.weight, shard(draw(OUT, HIDDEN, seed=1), 1))
    fill(layer.bias, draw(OUT, seed=2))
    x = shard(draw(TOKENS, HIDDEN, seed=3), 1).requires_grad_()
    out = layer(x)
    weighting = loss_weights(torch.empty(TOKENS, OUT))
    (out * (shard(weighting, 0) if sequence_parallel else weighting)).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    return {"out": out.detach(), "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_row_parallel(sequence_parallel: bool) -> None:
    weight, bias, x = (
        v.requires_grad_() for v in (draw(OUT, HIDDEN, seed=1), draw(OUT, seed=2), draw(TOKENS, HIDDEN, seed=3))
    )
    out = F.linear(x, weight, bias)
    (out * loss_weights(out)).sum().backward()
    ranks = run_distributed(row_rank, 2, sequence_parallel, timeout_s=TIMEOUT_S)
    torch.testing.assert_close(torch.cat([rank["x"] for rank in ranks], 1), x.grad)
    torch.testing.assert_close(torch.cat([rank["weight"] for rank in ranks], 1), weight.grad)
    if sequence_parallel:
        torch.testing.assert_close(torch.cat([rank["out"] for rank in ranks], 0), out)
        torch.testing.assert_close(ranks[0]["bias"] + ranks[1]["bias"], bias.grad)
    else:
        for rank in ranks:
            torch.testing.assert_close(rank["out"], out)
            torch.testing.assert_close(rank["bias"], bias.grad)


HEADS, GROUPS, DIM = 4, 2, 8
LENGTHS = (16, 8, 24)  # packed sequences, each a multiple of 2 * size
REAL = (13, 8, 17)  # tokens of them that are not padding


def qkv(*lead: int) -> list[Tensor]:
    return [draw(*lead, heads, DIM, seed=index) for index, heads in enumerate((HEADS, GROUPS, GROUPS))]


def zigzag(value: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's share of one sequence ``[s, ...]``."""
    chunks = value.chunk(2 * size, dim=0)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def packed_zigzag(value: Tensor, rank: int, size: int) -> Tensor:
    return torch.cat([zigzag(piece, rank, size) for piece in value.split(list(LENGTHS))])


def attention(**kwargs: Any) -> DotProductAttention:
    return DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, **kwargs)


def over_context() -> dict[str, Any]:
    ranks = list(range(dist.get_world_size()))
    return {"cp_group": dist.group.WORLD, "cp_global_ranks": ranks, "cp_stream": None, "cp_comm_type": "p2p"}


def attend_by_hand(query: Tensor, key: Tensor, value: Tensor, left: int = -1) -> Tensor:
    """Compute causal attention of one sequence over all pairs: ``[s, heads, d]`` -> ``[s, heads * d]``."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
    distance = torch.arange(len(query))[:, None] - torch.arange(len(key))[None]
    hidden = (distance < 0) | ((distance > left) if left >= 0 else torch.zeros_like(distance, dtype=torch.bool))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).flatten(1)


def dense_rank(window: tuple[int, int] | None) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    leaves = [zigzag(x, rank, size).contiguous().requires_grad_() for x in qkv(16, 2)]
    out = attention(window_size=window, **over_context())(*leaves, attn_mask_type="causal")
    (out * zigzag(loss_weights(torch.empty(16, 2, HEADS * DIM)), rank, size)).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_context_parallel_padded_batch(window: tuple[int, int] | None, size: int) -> None:
    leaves = [x.requires_grad_() for x in qkv(16, 2)]
    left = -1 if window is None else window[0]
    out = torch.stack([attend_by_hand(*(x[:, b] for x in leaves), left) for b in range(2)], dim=1)
    (out * loss_weights(out)).sum().backward()
    for rank, (result, *grads) in enumerate(run_distributed(dense_rank, size, window, timeout_s=TIMEOUT_S)):
        torch.testing.assert_close(result, zigzag(out, rank, size), rtol=1e-5, atol=2e-6)
        for grad, leaf in zip(grads, leaves, strict=True):
            torch.testing.assert_close(grad, zigzag(leaf.grad, rank, size), rtol=1e-5, atol=5e-6)


def totals(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed_rank(with_padding: bool) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    leaves = [packed_zigzag(x, rank, size).contiguous().requires_grad_() for x in qkv(sum(LENGTHS))]
    counts = {"cu_seqlens_q": totals(LENGTHS), "cu_seqlens_kv": totals(LENGTHS)}
    if with_padding:
        counts = {
            "cu_seqlens_q": totals(REAL),
            "cu_seqlens_kv": totals(REAL),
            "cu_seqlens_q_padded": totals(LENGTHS),
            "cu_seqlens_kv_padded": totals(LENGTHS),
        }
    out = attention(**over_context())(*leaves, qkv_format="thd", attn_mask_type="padding_causal", **counts)
    (out * packed_zigzag(loss_weights(torch.empty(sum(LENGTHS), HEADS * DIM)), rank, size)).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("with_padding", [False, True])
def test_context_parallel_packed(with_padding: bool) -> None:
    leaves = [x.requires_grad_() for x in qkv(sum(LENGTHS))]
    pieces = []
    for start, length, real in zip(totals(LENGTHS).tolist()[:-1], LENGTHS, REAL, strict=True):
        count = real if with_padding else length
        out = attend_by_hand(*(x[start : start + count] for x in leaves))
        pieces.append(F.pad(out, (0, 0, 0, length - count)))
    out = torch.cat(pieces)
    (out * loss_weights(out)).sum().backward()
    for rank, (result, *grads) in enumerate(run_distributed(packed_rank, 2, with_padding, timeout_s=TIMEOUT_S)):
        torch.testing.assert_close(result, packed_zigzag(out, rank, 2), rtol=1e-5, atol=2e-6)
        for grad, leaf in zip(grads, leaves, strict=True):
            torch.testing.assert_close(grad, packed_zigzag(leaf.grad, rank, 2), rtol=1e-5, atol=5e-6)


def masked_rank() -> None:
    masked = torch.zeros(2, 1, 1, 8, dtype=torch.bool)
    attention(**over_context())(*qkv(8, 2), attention_mask=masked, attn_mask_type="padding_causal")


def test_padding_mask_with_context_parallelism_is_refused() -> None:
    with pytest.raises(DistributedTestError, match="together with context parallelism") as caught:
        run_distributed(masked_rank, 2, timeout_s=TIMEOUT_S)
    assert isinstance(caught.value.__cause__, PlatformError)
