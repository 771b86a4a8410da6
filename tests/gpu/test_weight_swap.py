"""The kernel that exchanges weights in place with an update, against plain indexing.

On CUDA, or in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_weight_swap.py
"""

from __future__ import annotations

import os

import pytest
import torch

from weightwire.digest import has_triton
from weightwire.vllm import contract
from weightwire.vllm.exchange import Exchange, ExchangePart, swap_kernel, swap_tables

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SPANS = [  # two first bytes, and a length
    (0, 64, 200_000),
    (300_000, 300_016, 131_072),
    (600_000, 600_002, 1234),
    (700_001, 700_004, 777),
    (800_000, 800_004, 100_000),
    (950_016, 950_032, 16),
]


@pytest.fixture
def device() -> torch.device:
    if not has_triton():
        pytest.skip("no Triton")
    if not torch.cuda.is_available() and not INTERPRETED:
        pytest.skip("no GPU, and TRITON_INTERPRET is not 1")
    return torch.device("cpu" if INTERPRETED else "cuda")


def test_rows_are_exchanged_and_nothing_else(device: torch.device) -> None:
    from weightwire.vllm.swap_triton import swap_rows

    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(0, 256, (2**20,), dtype=torch.uint8, generator=generator).to(device) for _ in range(2))
    expected_left, expected_right = left.clone(), right.clone()
    for first, second, size in SPANS:
        expected_left[first : first + size] = right[second : second + size]
        expected_right[second : second + size] = left[first : first + size]
    tables = swap_tables((left.data_ptr() + first, right.data_ptr() + second, size) for first, second, size in SPANS)
    assert [width for _, width in tables] == [16, 4, 2, 1]
    for table, width in tables:
        swap_rows(table.to(device), width)
    assert torch.equal(left, expected_left)
    assert torch.equal(right, expected_right)


def test_kernels_are_checked_before_they_are_used(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightwire.vllm import swap_triton

    swap_triton.check_kernels(device)
    swap_rows = swap_triton.swap_rows

    def partly(table: torch.Tensor, width: int) -> None:
        shorter = table.clone()
        shorter[:, 2] -= 4 * (width == 2)
        swap_rows(shorter, width)

    monkeypatch.setattr(swap_triton, "swap_rows", partly)
    with pytest.raises(RuntimeError, match="words of 2 bytes has not exchanged"):
        swap_triton.check_kernels(device)


@pytest.mark.parametrize("kernel", ["0", "1"], ids=["copies", "kernel"])
def test_exchange_on_a_gpu_writes_new_weights_and_undo_the_old_ones(
    device: torch.device, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cuda":
        pytest.skip("no GPU")
    monkeypatch.setenv(contract.SWAP_KERNEL, kernel)
    swap_kernel.cache_clear()
    assert (swap_kernel(device) is not None) == (kernel == "1")
    weights = [torch.randn(shape, device=device).bfloat16() for shape in ((4096, 1024), (7, 3), (1024,), (513, 5))]
    new = [torch.randn_like(weight) for weight in weights]
    staging = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in new])
    parts, start = [], 0
    for weight in weights:
        parts.append(ExchangePart(weight, weight.dtype, start, tuple(weight.shape), weight.stride()))
        start += weight.nbytes
    before, received = [weight.clone() for weight in weights], staging.clone()
    exchange = Exchange(parts, keep=True)
    exchange.run(staging)
    assert all(map(torch.equal, weights, new))
    exchange.undo()
    assert all(map(torch.equal, weights, before))
    # Copies leave the old weights in the staging memory.
    staging.copy_(received)
    exchange.run(staging)
    exchange.refill(staging)
    assert all(map(torch.equal, weights, new))
    assert torch.equal(staging, received)
