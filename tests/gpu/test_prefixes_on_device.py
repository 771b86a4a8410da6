"""Attention over shared prefixes, with sinks too, by the GPU's kernel, against attention of each sample by itself in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megascend.engines.common.sample_attention import prefix_attention
from megascend.reference.attention_sinks import attention_with_sinks
from megascend.training.kernels.prefix_attention import PrefixLayout

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

HEADS, KV_HEADS, WIDTH = 8, 2, 128
PREFIX, OWN = 300, (1, 130, 64, 257)
"""Tokens of a prompt, and of each response; the second continues half of the first one's neighbour."""


def sequences() -> tuple[list[Tensor], list[int]]:
    """Return the rows of a prompt with responses, and of a branch in the middle of one, and the numbers of own tokens."""
    own = [PREFIX + OWN[0], *OWN[1:], 90]
    rows, row = [torch.arange(own[0])], own[0]
    for count in own[1:-1]:
        rows.append(torch.cat([torch.arange(PREFIX), torch.arange(row, row + count)]))
        row += count
    rows.append(torch.cat([rows[-1][: PREFIX + 100], torch.arange(row, row + own[-1])]))
    return rows, own


@pytest.mark.parametrize(
    ("window", "with_sinks", "parts"),
    [(None, False, False), (None, False, True), (None, True, False), (150, False, False), (150, True, False)],
)
def test_kernel_computes_each_sample(window: int | None, with_sinks: bool, parts: bool) -> None:
    rows, own = sequences()
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(sum(own), heads, WIDTH, generator=generator).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    factors = torch.randn(sum(own), HEADS, WIDTH, generator=generator).bfloat16()
    exact += [torch.randn(HEADS, generator=generator) * 3] if with_sinks else []
    states = [part.cuda().requires_grad_() for part in exact]
    layout = PrefixLayout.of(rows, own, states[0].device)
    query, key, value = (part.transpose(0, 1)[None] for part in states[:3])
    sinks = states[3] if with_sinks else None
    if parts:
        pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")
        from megascend.training.kernels.te_attention import TransformerEngineParts

        mixed = layout.merge(*states, TransformerEngineParts(None, deterministic=False))
    else:
        mixed = prefix_attention(query, key, value, layout, None, window, sinks)[0].transpose(0, 1)
    gradients = torch.autograd.grad((mixed * factors.cuda()).sum(), states)
    wide = [part.double().requires_grad_() for part in exact]
    samples = []
    for tokens, count in zip(rows, own, strict=True):
        distance = torch.arange(len(tokens))[-count:, None] - torch.arange(len(tokens))
        mask = (distance >= 0) & (distance < (window or len(tokens)))
        query, key, value = (part[tokens].transpose(0, 1)[None] for part in wide[:3])
        own_query = query[:, :, -count:]
        if with_sinks:
            part = attention_with_sinks(own_query, key, value, mask, wide[3], enable_gqa=True)
        else:
            part = scaled_dot_product_attention(own_query, key, value, mask, enable_gqa=True)
        samples.append(part[0].transpose(0, 1))
    expected = torch.cat(samples)
    expected_gradients = torch.autograd.grad((expected * factors.double()).sum(), wide)
    for values, reference in zip((mixed, *gradients), (expected, *expected_gradients), strict=True):
        error = (values.cpu().double() - reference).norm() / reference.norm()
        assert error < 0.01, float(error)
