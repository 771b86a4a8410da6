"""Rows of experts by indices: Megatron's own permutations, and sums and gradients written out. ``tests/gpu`` has the kernels."""

from __future__ import annotations

import pytest
import torch

from megascend.training.kernels.token_rows import Combine, Permutation, Spread, chunk_order, gather_sum, token_rows

pytestmark = pytest.mark.usefixtures("megatron_imported")

TOKENS, EXPERTS, K, WIDTH = 23, 6, 3, 5


def routing() -> torch.Tensor:
    """Return a routing map, bool [tokens, experts]; expert 2 has no token."""
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    scores[:, 2] = -1.0
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(K).indices, True)


def normal(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_rows_lie_as_megatron_lays_them():
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    routing_map, hidden, probs = routing(), normal(TOKENS, WIDTH), normal(TOKENS, EXPERTS)
    rows = token_rows(routing_map, K)
    expected, expected_probs, token = permute(hidden, routing_map, probs=probs)
    assert torch.equal(rows.token, token)
    assert torch.equal(Spread.apply(hidden, rows.token, rows.row_index), expected)
    assert torch.equal(probs.view(-1)[rows.choice], expected_probs)
    torch.testing.assert_close(
        Combine.apply(expected, rows.token, rows.row_index),
        unpermute(expected, token, hidden.shape, routing_map=routing_map),
    )


def test_chunks_are_sorted_as_megatron_sorts_them():
    from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

    sources = 4
    counts = torch.randint(0, 4, (sources, EXPERTS), generator=torch.Generator().manual_seed(2))
    counts[1] = 0
    total = int(counts.sum())
    values = normal(total, WIDTH)
    by_expert = torch.arange(sources * EXPERTS).view(sources, EXPERTS).T.ravel()
    expected, _ = sort_chunks_by_idxs(values, counts.ravel(), by_expert)
    order, inverse = chunk_order(counts, total)
    assert torch.equal(Permutation.apply(values, order, inverse), expected)
    assert torch.equal(expected[inverse], values)
    no_order, _ = chunk_order(torch.zeros_like(counts), 0)
    assert no_order.numel() == 0


def test_gradients_are_those_of_indexing():
    rows = token_rows(routing(), K)
    order = torch.randperm(TOKENS * K, generator=torch.Generator().manual_seed(3))
    weight = normal(TOKENS * K, 1, seed=4)

    def there_and_back(hidden: torch.Tensor) -> torch.Tensor:
        moved = Permutation.apply(Spread.apply(hidden, rows.token, rows.row_index) * weight, order, order.argsort())
        return Combine.apply(Permutation.apply(moved, order.argsort(), order), rows.token, rows.row_index)

    assert torch.autograd.gradcheck(there_and_back, normal(TOKENS, WIDTH).requires_grad_())


def test_sums_of_bf16_rows_are_rounded_once():
    values = torch.cat([torch.full((1, 4), 256.0), torch.ones(3, 4)]).bfloat16()
    summed = gather_sum(values, torch.tensor([[0, 1, 2, 3]]))
    assert summed.dtype == torch.bfloat16
    assert summed.tolist() == [[260.0] * 4], "one after the other in bf16 they would be 256"


@pytest.mark.parametrize("count", [K - 1, K + 1])
def test_another_number_of_experts_is_no_silent_loss_of_rows(count):
    with pytest.raises(RuntimeError, match=f"tokens must have {count} experts each"):
        token_rows(routing(), count)
