"""The exchange of tokens between ranks with different experts, without a model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascend.engines.fsdp.expert_parallel import ExpertShare, compute_on_expert_ranks, keep_local_experts
from megascend.errors import ConfigError
from megascend.testing import run_distributed

EXPERTS, WIDTH, TOKENS = 4, 3, 5


class Experts(nn.Module):
    """Each expert is one matrix."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.num_experts, self.weight = len(weight), nn.Parameter(weight)


def products(module: Experts, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute experts without any exchange, as the reference."""
    outputs = torch.einsum("th,tkho->tko", hidden, module.weight[index])
    return (outputs * weights[..., None]).sum(1)


def inputs(rank: int, busy: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    draws = torch.rand(TOKENS, len(busy), generator=generator).argsort(1)[:, :2]
    return hidden, torch.tensor(busy)[draws], torch.rand(TOKENS, 2, generator=generator, dtype=torch.float64)


def matrices() -> Tensor:
    return torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("busy", [(0, 1, 2, 3), (0, 1), (3, 0)], ids=["all experts", "two", "two of different ranks"])
def test_expert_parallel_ranks_match_one_process(size: int, busy: tuple[int, ...]) -> None:
    """Compare values, and gradients of states, routing weights and experts; some ranks have no token to compute."""

    def on_rank() -> tuple[Tensor, ...]:
        rank = dist.get_rank()
        module = nn.Sequential(Experts(matrices()))
        share = ExpertShare(dist.group.WORLD, size, rank)
        keep_local_experts(module, share.size, lambda child: isinstance(child, Experts))
        part = matrices().chunk(size)[rank]
        assert module[0].weight.shape == part.shape
        module[0].weight.data = part
        hidden, index, weights = inputs(rank, busy)
        hidden.requires_grad_()
        weights.requires_grad_()
        out = compute_on_expert_ranks(module[0], hidden, index, weights, share, products)
        out.square().sum().backward()
        return out.detach(), hidden.grad, weights.grad, module[0].weight.grad

    ranks = run_distributed(on_rank, size)
    all_experts, total = Experts(matrices()), torch.zeros(())
    for rank, (out, hidden_grad, weights_grad, _) in enumerate(ranks):
        hidden, index, weights = inputs(rank, busy)
        hidden.requires_grad_()
        weights.requires_grad_()
        expected = products(all_experts, hidden, index, weights)
        total = total + expected.square().sum()
        expected_hidden, expected_weights = torch.autograd.grad(
            expected.square().sum(), [hidden, weights], retain_graph=True
        )
        assert torch.allclose(out, expected, atol=1e-12)
        assert torch.allclose(hidden_grad, expected_hidden, atol=1e-12)
        assert torch.allclose(weights_grad, expected_weights, atol=1e-12)
    (expected_experts,) = torch.autograd.grad(total, [all_experts.weight])
    assert torch.allclose(torch.cat([grad for *_, grad in ranks]), expected_experts, atol=1e-12)


def test_experts_that_cannot_be_divided_are_refused() -> None:
    share = ExpertShare(None, 3, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"parallel\.expert=3 cannot divide 0, 4 experts of Experts"):
        keep_local_experts(nn.Sequential(Experts(matrices())), share.size, lambda child: isinstance(child, Experts))
