"""Segmented products with low-rank matrices: the Triton kernels against float64. Needs a CUDA GPU."""

from __future__ import annotations

import pytest
import torch

from megascend.training.lora.grouped import Segments, accumulate, kernel_for, product

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

ROUNDED = {torch.bfloat16: 3e-3, torch.float16: 4e-4}
SIZES = [(2048, 16), (16, 2048), (1536, 48), (24, 768), (32, 12288), (256, 512), (2048, 192), (20, 52)]


def normal(*size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def segments_of(count: int) -> tuple[Segments, torch.Tensor]:
    """Return ``count`` segments of unequal sizes, the second and the last empty, and each row's segment, int64 [rows]."""
    sizes = torch.randint(0, max(8, 3000 // count), (count,), generator=torch.Generator().manual_seed(count))
    sizes[0] += 100
    sizes[[1, -1]] = 0
    owner = torch.arange(count).repeat_interleave(sizes).cuda()
    return Segments(sizes.cumsum(0).int().cuda()), owner


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(3, torch.bfloat16), (32, torch.bfloat16), (32, torch.float16), (1024, torch.bfloat16), (2050, torch.bfloat16)],
)
@pytest.mark.parametrize(("k", "m"), SIZES)
def test_products_and_gradients(k, m, count, dtype):
    """Use any number of segments (torch's grouped product supports fewer than 1024), without synchronization."""
    if k * m * count > 2**30:
        pytest.skip("the float64 reference would take more than 8 GiB")
    segments, owner = segments_of(count)
    rows, base, grads = (normal(len(owner), size, seed=seed, dtype=dtype) for seed, size in enumerate((k, m, m)))
    weights = normal(count, m, k, seed=4, dtype=dtype).mT
    target = normal(count, k, m, seed=5, dtype=torch.float32)
    if kernel_for(rows, weights) != "triton":
        pytest.skip("the kernels are used on GPUs of compute capability 9.0")
    exact, summed, start = torch.empty(len(owner), m, dtype=torch.float64, device="cuda"), target.double(), 0
    for number, end in enumerate(segments.ends.tolist()):
        exact[start:end] = rows[start:end].double() @ weights[number].double()
        summed[number] += rows[start:end].double().T @ grads[start:end].double()
        start = end
    torch.cuda.set_sync_debug_mode("error")
    try:
        products, added = product(rows, weights, segments), product(rows, weights, segments, base)
        accumulate(target, rows, grads, segments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert error(products, exact) < ROUNDED[dtype]
    assert error(added, exact + base.double()) < ROUNDED[dtype]
    assert error(target, summed) < 1e-5, "added up in fp32"


def test_strided_weights_of_expert_adapters():
    """Use segments by (expert, adapter) and matrices by (adapter, expert)."""
    segments, owner = segments_of(128 * 8)
    rows, grads = normal(len(owner), 2048, seed=1), normal(len(owner), 16, seed=2)
    weights = normal(8, 128, 16, 2048, seed=3).mT.transpose(0, 1)
    target = torch.zeros(8, 128, 16, 2048, device="cuda").mT.transpose(0, 1)
    if kernel_for(rows, weights) != "triton":
        pytest.skip("the kernels are used on GPUs of compute capability 9.0")
    flat = weights.flatten(0, 1).contiguous()
    assert torch.equal(product(rows, weights, segments), product(rows, flat, segments))
    accumulate(target, rows, grads, segments)
    expected = torch.zeros(1024, 2048, 16, device="cuda")
    accumulate(expected, rows, grads, segments)
    assert error(target.flatten(0, 1), expected.double()) < 1e-6


@pytest.mark.parametrize(("k", "m"), [(2048, 16), (16, 2048)])
def test_values_of_a_segment_do_not_affect_others(k, m):
    segments, owner = segments_of(32)
    rows, grads, weights = normal(len(owner), k, seed=1), normal(len(owner), m, seed=2), normal(32, k, m, seed=3)
    others_rows = owner != 0
    clean, clean_sums = product(rows, weights, segments), torch.zeros(32, k, m, device="cuda")
    accumulate(clean_sums, rows, grads, segments)
    rows[~others_rows], weights[0], sums = torch.nan, torch.inf, torch.zeros(32, k, m, device="cuda")
    spoiled = product(rows, weights, segments)
    accumulate(sums, rows, grads, segments)
    assert torch.equal(clean[others_rows], spoiled[others_rows])
    assert torch.equal(clean_sums[1:], sums[1:])
    assert spoiled[~others_rows].isnan().all()
