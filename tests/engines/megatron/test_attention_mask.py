"""Masks of the NPU's fused attention are checked by value, not by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megascend.errors import DataError

S = 8


@pytest.fixture(autouse=True)
def _needs_bootstrap(megatron_imported):
    """Import Megatron first, which megascend.engines.megatron needs."""


def kernel_mask(mask, mask_type="causal", shape=(2, 4, S, S), **options):
    from megascend.engines.megatron.attention_mask import AttentionShape, kernel_mask

    return kernel_mask(mask, AttentionShape(*shape), mask_type, **options)


def triangle(size=S):
    return torch.ones(size, size, dtype=torch.bool).triu(1)


def test_no_mask_stays_no_mask():
    assert kernel_mask(None) is None


@pytest.mark.parametrize("form", [(S, S), (1, 1, S, S), (2, 1, S, S), (2, 4, S, S)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_dense_causal_mask_is_dropped(form, dtype):
    assert kernel_mask(triangle().expand(form).to(dtype)) is None


def test_a_sequence_of_2048_tokens_is_no_exception():
    """Refuse a mask that the kernel would accept and read as the compressed triangle."""
    assert kernel_mask(triangle(2048)[None, None], shape=(1, 1, 2048, 2048)) is None


def test_trailing_padding_needs_no_kernel_mask():
    mask = triangle().expand(2, 1, S, S).clone()
    mask[1, :, :, 5:] = True  # as Hugging Face collators build it
    assert kernel_mask(mask) is None
    mask[1, :, 5:, :] = True  # rows of padding blocked altogether
    assert kernel_mask(mask) is None


def blocked(mask, *index):
    mask = mask.clone()
    mask[index] = True
    return mask


REFUSED = {
    "padding on the left": (
        blocked(triangle().expand(2, 1, S, S), 0, slice(None), slice(None), slice(3)),
        "causal",
        "pad on the right with weight 0",
    ),
    "separate samples": (blocked(triangle(), slice(4, None), slice(4)), "causal", "not the causal triangle"),
    "the future": (torch.zeros(S, S, dtype=torch.bool), "causal", "not the causal triangle"),
    "a mask of keys": (
        torch.zeros(2, 1, 1, S, dtype=torch.bool),
        "causal",
        r"\[2, 1, 1, 8\].*\[8, 8\], \[1, 1, 8, 8\], \[2, 1, 8, 8\], \[2, 4, 8, 8\]",
    ),
    "floats": (
        torch.zeros(S, S).masked_fill(triangle(), -torch.inf),
        "causal",
        r"torch\.float32: the NPU kernel takes bool or uint8",
    ),
    "a row without keys": (blocked(torch.zeros(S, S, dtype=torch.bool), 3), "general", "allows no key at all"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_masks_are_refused(name):
    mask, mask_type, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        kernel_mask(mask, mask_type)


def test_a_context_parallel_rank_holds_rows_of_the_triangle():
    positions = torch.tensor([0, 1, 6, 7])  # rank 0 of 2: the first and the last chunk
    rows = triangle()[positions][None, None]
    assert kernel_mask(rows, shape=(1, 4, 4, S), positions=positions) is None
    with pytest.raises(DataError, match="not the causal triangle"):
        kernel_mask(rows, shape=(1, 4, 4, S), positions=torch.tensor([2, 3, 4, 5]))


def test_mask_with_packing_is_refused():
    with pytest.raises(DataError, match="separates them by their lengths"):
        kernel_mask(triangle(), packed=True)


def test_a_general_mask_passes_in_the_kernels_shapes_only():
    mask = torch.zeros(2, 1, S, S, dtype=torch.bool)
    mask[:, :, :, 6:] = True
    assert kernel_mask(mask, "general") is mask
    with pytest.raises(DataError, match=r"\[2, 1, 1, 8\].*expand it to one of them"):
        kernel_mask(mask[:, :, :1], "general")
    with pytest.raises(DataError, match="pass the mask"):
        kernel_mask(None, "general")


@pytest.mark.parametrize("settings", [{}, {"attention_mask_type": "causal"}], ids=["another provider", "MindSpeed"])
def test_model_gets_no_causal_mask_whichever_provider_made_it(settings):
    """Only MindSpeed's configuration has the kind of mask."""
    from megascend.engines.megatron.attention_mask import install

    class Decoder(torch.nn.Module):
        def forward(self, input_ids, position_ids, attention_mask):
            return attention_mask

    decoder, tokens = Decoder(), torch.zeros(2, S, dtype=torch.int64)
    sizes = {"num_attention_heads": 4, "tensor_model_parallel_size": 1, "context_parallel_size": 1}
    install([decoder], SimpleNamespace(**sizes, **settings))
    assert decoder(tokens, tokens, None) is None
    assert decoder(tokens, tokens, triangle()) is None
    with pytest.raises(DataError, match="not the causal triangle"):
        decoder(tokens, tokens, torch.zeros(S, S, dtype=torch.bool))
