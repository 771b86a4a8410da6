"""Attention over shared prefixes, against attention of each sample by itself, in float64."""

import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megascend.training.kernels.prefix_attention import Packed, PrefixLayout

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


class Parts:
    """Attention in parts as a kernel computes it, with the gradients that follow from output and log-sum-exps of all parts."""

    def forward(self, query, key, value, packed: Packed, causal: bool):
        outs, sums = [], []
        for q, k, v in self.sequences(packed, query, key, value):
            scores = self.scores(q, k, causal)
            sums.append(scores.logsumexp(-1).T)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return torch.cat(outs), torch.cat(sums)

    def backward(self, grad, query, key, value, out, log_sums, packed: Packed, causal: bool):
        grads = [torch.zeros_like(states) for states in (query, key, value)]
        of_queries = self.sequences(packed, query, key, value, grad, out, log_sums, *grads)
        for q, k, v, g, o, sums, dq, dk, dv in of_queries:
            weights = (self.scores(q, k, causal) - sums.T[..., None]).exp()
            mean = torch.einsum("qhd,qhd->hq", g, o)[..., None]
            of_scores = weights * (torch.einsum("qhd,khd->hqk", g, v) - mean) / 2
            dq += torch.einsum("hqk,khd->qhd", of_scores, k)
            dk += torch.einsum("hqk,qhd->khd", of_scores, q)
            dv += torch.einsum("hqk,qhd->khd", weights, g)
        return tuple(grads)

    @staticmethod
    def sequences(packed: Packed, query, key, value, *more):
        """Yield each sequence's states; ``more``: grad, out and log-sums of queries, then gradients of all three."""
        lengths = [end - start for start, end in packed.queries], [end - start for start, end in packed.keys]
        assert [0, *torch.tensor(lengths[0]).cumsum(0).tolist()] == packed.query_starts.tolist()
        assert [0, *torch.tensor(lengths[1]).cumsum(0).tolist()] == packed.key_starts.tolist()
        assert packed.longest == (max(lengths[0]), max(lengths[1]))
        sides = [0, 1, 1, 0, 0, 0, 0, 1, 1]
        states = (query, key, value, *more)
        return zip(*(part.split(lengths[side]) for part, side in zip(states, sides, strict=False)), strict=True)

    @staticmethod
    def scores(query, key, causal: bool):
        scores = torch.einsum("qhd,khd->hqk", query, key) / 2  # the square root of the head dim of 4
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        return scores.masked_fill(~mask, float("-inf")) if causal else scores


@pytest.mark.parametrize("way", ["attend", "merge"])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_outputs_and_gradients_equal_those_of_separate_samples(depth: int, seed: int, way: str) -> None:
    rows, own = tree(seed, depth)
    layout = PrefixLayout.of(rows, own, CPU)
    count = sum(own)
    query, key, value = (torch.randn(count, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    factors = torch.randn(count, 2, 4, dtype=torch.float64)

    def compute(query, keys, values):
        parts = zip(query.split(layout.queries), keys.split(layout.keys), values.split(layout.keys), strict=True)
        return torch.cat([causal(*part) for part in parts])

    mixed = layout.attend(query, key, value, compute) if way == "attend" else layout.merge(query, key, value, Parts())
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


def test_groups_are_nodes_with_all_their_responses_below() -> None:
    """Two prompts of 10 and 4 tokens with 3 and 2 responses, and a conversation whose turns continue each other."""
    rows, own = [], []
    for first, prompt, responses in ((0, 10, 3), (22, 4, 2)):
        for number in range(responses):
            start = first + prompt + 4 * number
            mine = torch.arange(start, start + 4)
            rows.append(torch.cat([torch.arange(first, first + prompt), mine]))
            own.append(14 if not number and prompt == 10 else 8 if not number else 4)
    rows += [torch.arange(34, 40), torch.arange(34, 45)]
    own += [6, 5]
    layout = PrefixLayout.of(rows, own, CPU)
    prompts = [(0, 10), (22, 26)]
    responses = [(10, 14), (14, 18), (18, 22), (26, 30), (30, 34)]
    assert layout.nodes.queries == layout.nodes.keys == tuple(sorted([*prompts, *responses, (34, 45)]))
    (level,) = layout.levels
    assert level.keys == tuple(prompts)
    assert level.queries == ((10, 22), (26, 34))


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
