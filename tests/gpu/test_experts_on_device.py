"""Grouped experts of the Megatron engine: products, permutations and sums against float64. Needs a CUDA GPU."""

from __future__ import annotations

import pytest
import torch

from megascend.training.kernels.token_rows import Combine, Permutation, Spread, chunk_order, gather_sum, token_rows
from megascend.training.lora.grouped import Segments, accumulate, kernel_of, product

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

TOKENS, EXPERTS, K, WIDTH = 1000, 16, 4, 136


def routing(device: str) -> torch.Tensor:
    """Return a routing map, bool [tokens, experts]; experts 3 and the last have no tokens."""
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    scores[:, [3, EXPERTS - 1]] = -1.0
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, scores.topk(K).indices, True).to(device)


def normal(*size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def test_rows_equal_the_cpu_without_synchronization():
    device_map, expected = routing("cuda"), token_rows(routing("cpu"), K)
    counts = torch.randint(0, 9, (4, EXPERTS), generator=torch.Generator().manual_seed(1))
    on_device, total = counts.cuda(), int(counts.sum())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows, order = token_rows(device_map, K), chunk_order(on_device, total)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name in ("token", "choice", "row_index"):
        assert torch.equal(getattr(rows, name).cpu(), getattr(expected, name)), name
    for result, expected_order in zip(order, chunk_order(counts, total), strict=True):
        assert torch.equal(result.cpu(), expected_order)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [WIDTH, 2048, 5000])
def test_sums_of_rows(dtype, width):
    rows = token_rows(routing("cuda"), K)
    values = normal(TOKENS * K, width, seed=2, dtype=dtype)
    exact = values.double()[rows.row_index].sum(1)
    assert error(gather_sum(values, rows.row_index), exact) < (1e-6 if dtype == torch.float32 else 3e-3)


def test_permutations_and_their_gradients():
    rows = token_rows(routing("cuda"), K)
    hidden, grad = normal(TOKENS, WIDTH, seed=3).requires_grad_(), normal(TOKENS, WIDTH, seed=4)
    weight = normal(TOKENS * K, 1, seed=5)
    order, position = (
        index.cuda() for index in (torch.randperm(TOKENS * K), torch.empty(TOKENS * K, dtype=torch.long))
    )
    position[order] = torch.arange(TOKENS * K, device="cuda")
    spread = Spread.apply(hidden, rows.token, rows.row_index)
    there_and_back = Permutation.apply(Permutation.apply(spread, order, position), position, order)
    out = Combine.apply(there_and_back * weight, rows.token, rows.row_index)
    out.backward(grad)
    x = hidden.detach().double().requires_grad_()
    exact = torch.zeros_like(x).index_add(0, rows.token, x[rows.token] * weight.double())
    exact.backward(grad.double())
    assert error(out, exact.detach()) < 6e-3
    assert error(hidden.grad, x.grad) < 6e-3


@pytest.mark.parametrize(("inside", "out"), [(128, 256), (2048, 1536), (768, 2048)])
def test_products_and_their_gradients(inside, out):
    """Compare forward, input gradient and the accumulated weight gradient; two experts have no rows."""
    if kernel_of(torch.device("cuda", 0)) != "torch":
        pytest.skip("torch's grouped products need compute capability 9.0")
    counts = routing("cpu").sum(0).tolist()
    segments = Segments(torch.tensor(counts, device="cuda").cumsum(0).int())
    x, grad = normal(TOKENS * K, inside, seed=6), normal(TOKENS * K, out, seed=7)
    weights = normal(EXPERTS, out, inside, seed=8)
    target = normal(EXPERTS, out, inside, seed=9, dtype=torch.float32)
    before = target.double()
    not_numbers = torch.full((EXPERTS * out * inside,), float("nan"), dtype=torch.bfloat16, device="cuda")
    del not_numbers  # so the memory that the kernels get next is not zero
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        products = product(x, weights.mT, segments)
        below = product(grad, weights, segments)
        accumulate(target, grad, x, segments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    parts = list(zip(x.double().split(counts), grad.double().split(counts), weights.double(), strict=True))
    assert error(products, torch.cat([part @ weight.T for part, _, weight in parts])) < 5e-3
    assert error(below, torch.cat([part @ weight for _, part, weight in parts])) < 5e-3
    exact = torch.stack([part.T @ rows for rows, part, _ in parts])
    assert error(target - before.float(), exact) < 5e-3
    assert torch.equal(target[3], before[3].float()), "an expert without rows has no gradient"
