"""Attention over shared prefixes, against attention of each sample by itself, in float64."""

import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megascend.training.kernels.prefix_attention import PrefixLayout

CPU = torch.device("cpu")


def tree(seed: int, depth: int) -> tuple[list[torch.Tensor], list[int]]:
    """Return the rows of samples, and how many of each are its own: a sample continues any beginning of the one before it."""
    numbers, row = random.Random(seed), 0
    rows, own = [], []
    for _ in range(2**depth):
        prefix = rows[-1][: numbers.randint(0, len(rows[-1]))] if rows else torch.arange(0)
        # A sample without tokens of its own is the beginning of another one.
        count = numbers.randint(0 if len(prefix) else 1, 5)
        rows.append(torch.cat([prefix, torch.arange(row, row + count)]))
        own.append(count)
        row += count
    return rows, own


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute attention [queries, heads, d] whose queries are the last tokens of the keys."""
    mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    return scaled_dot_product_attention(*(states.transpose(0, 1) for states in (query, key, value)), mask).transpose(
        0, 1
    )


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_outputs_and_gradients_equal_those_of_separate_samples(depth: int, seed: int) -> None:
    rows, own = tree(seed, depth)
    layout = PrefixLayout.of(rows, own, CPU)
    count = sum(own)
    query, key, value = (torch.randn(count, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    factors = torch.randn(count, 2, 4, dtype=torch.float64)

    def compute(query, keys, values):
        parts = zip(query.split(layout.queries), keys.split(layout.keys), values.split(layout.keys), strict=True)
        return torch.cat([causal(*part) for part in parts])

    mixed = layout.attend(query, key, value, compute)
    gradients = torch.autograd.grad((mixed * factors).sum(), (query, key, value))
    expected = torch.zeros_like(mixed)
    for tokens, last in zip(rows, own, strict=True):
        if last:
            expected = expected.index_copy(0, tokens[-last:], causal(query[tokens], key[tokens], value[tokens])[-last:])
    expected_gradients = torch.autograd.grad((expected * factors).sum(), (query, key, value))
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-14)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        # Of keys and values they are summed in fp32, as every kernel returns them.
        torch.testing.assert_close(gradient, reference, rtol=1e-6, atol=1e-6)


def test_backward_pass_keeps_rows_and_not_their_copies_in_every_sample() -> None:
    prefix, branches = torch.arange(100), 8
    rows = [torch.cat([prefix, torch.tensor([100 + number])]) for number in range(branches)]
    layout = PrefixLayout.of(rows, [101, *[1] * (branches - 1)], CPU)
    count = 100 + branches
    key, value = (torch.randn(count, 1, 4, requires_grad=True) for _ in range(2))
    saved: list[int] = []
    kept: list[torch.Tensor] = []

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, keys, values):
            ctx.save_for_backward(keys.transpose(0, 1), values)
            saved.append(keys.numel() + values.numel())
            return query * 1

        @staticmethod
        def backward(ctx, grad):
            kept.extend(ctx.saved_tensors)
            keys, values = ctx.saved_tensors
            return grad, torch.ones_like(keys.transpose(0, 1)), torch.ones_like(values)

    graph = layout.attend(torch.randn(count, 1, 4, requires_grad=True), key, value, Kernel.apply)
    held = graph.grad_fn._raw_saved_tensors
    assert saved == [2 * branches * 101 * 4]
    assert all(tensor.data[0].shape == (count, 1, 4) for tensor in held if hasattr(tensor, "data"))
    graph.sum().backward()
    torch.testing.assert_close(kept[0], key[layout.rows].transpose(0, 1))
    # A prefix's key has a gradient from every sample.
    assert key.grad is not None
    assert key.grad[:100].unique().tolist() == [float(branches)]
    assert key.grad[100:].unique().tolist() == [1.0]
