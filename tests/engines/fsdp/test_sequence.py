"""Ulysses sequence parallelism and the mesh, without a model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megascend.engines.fsdp.attention import HeadExchange, check_heads
from megascend.engines.fsdp.sharding import mesh_ranks
from megascend.errors import TopologyError
from megascend.testing import run_distributed


def test_head_exchange_keeps_the_order_of_the_samples():
    """Exchange two packed samples of 4 and 8 tokens, whose numbers encode head and position; gradients return the same way."""
    ranks, lengths, heads = 2, (4, 8), 4
    numbers = 100.0 * torch.arange(heads)[:, None] + torch.arange(sum(lengths))

    def on_rank() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rank = dist.get_rank()
        exchange = HeadExchange(dist.distributed_c10d._get_default_group())
        part_of_rank = torch.cat([part.chunk(ranks, dim=1)[rank] for part in numbers.split(lengths, dim=1)], dim=1)
        states = part_of_rank[None, :, :, None].clone().requires_grad_()
        by_head = exchange.to_heads(states)
        order = exchange.order(lengths)
        back = exchange.to_tokens(by_head.index_select(2, order).index_select(2, order.argsort()))
        (back * states.detach()).sum().backward()
        assert states.grad is not None
        return (
            by_head.index_select(2, order)[0, :, :, 0].detach(),
            (back - states).detach(),
            states.grad - states.detach(),
        )

    for rank, (by_head, difference, grad_difference) in enumerate(run_distributed(on_rank, ranks)):
        assert torch.equal(by_head, numbers.chunk(ranks)[rank])
        assert not difference.any()
        assert not grad_difference.any()


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 3), (6, 4, 2), (8, 3, 2)])
def test_heads_that_ranks_cannot_divide_are_refused(heads, kv_heads, size):
    with pytest.raises(TopologyError, match=rf"parallel.context={size} does not divide the model's {heads}"):
        check_heads(heads, kv_heads, size)
    check_heads(32, 4, 8)


def test_copies_of_the_model_are_neighbours():
    assert mesh_ranks(8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(TopologyError, match="replicate=3 does not divide the 8"):
        mesh_ranks(8, 3)
