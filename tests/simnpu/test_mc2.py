"""Matrix products fused with a collective, on two ranks, against float64 products of all ranks' matrices."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascend.testing.distributed import run_distributed

pytestmark = pytest.mark.usefixtures("sim_npu")
WORLD, M, K, N = 2, 6, 256, 8


def matrices(rank: int) -> tuple[Tensor, Tensor]:
    """x1 [M, K] and x2 [K, N] of a rank, in bfloat16."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(M, K, generator=generator).bfloat16(), torch.randn(K, N, generator=generator).bfloat16()


def on_ranks(body: Callable[[int, str], Any]) -> list[Any]:
    """``body(rank, hcom)`` on ranks whose default group is hccl."""

    def start() -> Any:
        rank = int(os.environ["RANK"])
        torch.npu.set_device(rank)
        store = dist.FileStore(os.environ["MEGASCEND_STORE"], WORLD)
        dist.init_process_group("hccl", store=store, rank=rank, world_size=WORLD)
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
        return body(rank, backend.get_hccl_comm_name(rank))

    return run_distributed(start, WORLD, init=False, timeout_s=90)


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for one rounding to bfloat16."""
    torch.testing.assert_close(actual.double(), expected, rtol=2**-7, atol=2**-7)


def test_gather_before_and_scatter_and_reduce_behind() -> None:
    import torch_npu

    def body(rank: int, hcom: str) -> list[Tensor]:
        x1, x2 = (matrix.npu() for matrix in matrices(rank))
        residual, gamma = (
            torch.ones(M, N, dtype=torch.bfloat16).npu(),
            torch.full((N,), 0.5, dtype=torch.bfloat16).npu(),
        )
        gathered = torch_npu.npu_all_gather_base_mm(x1, x2, hcom, WORLD)
        from simnpu.operators.mc2 import npu_mm_all_reduce_add_rms_norm

        results = [
            *gathered,
            torch_npu.npu_mm_reduce_scatter_base(x1, x2, hcom, WORLD),
            torch_npu.npu_mm_all_reduce_base(x1.view(2, 3, K), x2, hcom, x3=residual.view(2, 3, N)),
            *npu_mm_all_reduce_add_rms_norm(x1, x2, residual, gamma, hcom, epsilon=1e-5),
        ]
        assert torch_npu.npu_all_gather_base_mm(x1, x2, hcom, WORLD, gather_output=False)[1].numel() == 0
        return [result.cpu() for result in results]

    outcomes = on_ranks(body)
    pairs = [[matrix.double() for matrix in matrices(rank)] for rank in range(WORLD)]
    rows = torch.cat([x1 for x1, _ in pairs])
    total = sum((x1 @ x2 for x1, x2 in pairs), torch.zeros(M, N, dtype=torch.float64))
    for rank, (output, gathered, shard, reduced, summed, normalised) in enumerate(outcomes):
        assert torch.equal(gathered.double(), rows)
        close(output, rows @ pairs[rank][1])
        close(shard, total[rank * M // WORLD : (rank + 1) * M // WORLD])
        close(reduced, (total + WORLD).view(2, 3, N))  # every rank adds its x3 before the sum
        close(summed, total + 1)
        close(normalised, (total + 1) * ((total + 1).square().mean(-1, keepdim=True) + 1e-5).rsqrt() * 0.5)


def test_int8_matrices_are_reduced_with_their_scales() -> None:
    import torch_npu

    def integers(rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 + rank)
        return (
            torch.randint(-128, 128, (M, K), generator=generator, dtype=torch.int8),
            torch.randint(-128, 128, (K, N), generator=generator, dtype=torch.int8),
        )

    scale = (torch.arange(N) + 1).bfloat16() / 1024

    def body(rank: int, hcom: str) -> Tensor:
        x1, x2 = (matrix.npu() for matrix in integers(rank))
        return torch_npu.npu_mm_all_reduce_base(x1, x2, hcom, dequant_scale=scale.npu()).cpu()

    expected = sum((a.double() @ b.double() for a, b in map(integers, range(WORLD))), torch.zeros(M, N).double())
    for outcome in on_ranks(body):
        assert outcome.dtype == torch.bfloat16
        close(outcome, expected * scale.double())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_parts_of_different_sizes(asynchronous: bool) -> None:
    import torch_npu

    def body(rank: int, hcom: str) -> list[Any]:
        uneven = torch_npu.distributed
        sizes = [3, 1]
        shard = torch.full((sizes[rank], 2), float(rank + 1)).npu()
        rows = torch.zeros(4, 2).npu()
        gathering = uneven.all_gather_into_tensor_uneven(rows, shard, sizes, async_op=asynchronous)
        reduced = torch.zeros(sizes[rank], 2).npu()
        joint = torch.arange(8.0).view(4, 2).npu() * (rank + 1)
        scattering = uneven.reduce_scatter_tensor_uneven(reduced, joint, sizes, async_op=asynchronous)
        for work in (gathering, scattering):
            assert (work is None) != asynchronous
            if work is not None:
                work.wait()
        with pytest.raises(ValueError, match=r"split sizes \[1, 1\] must be 2 numbers that sum to 4 rows"):
            uneven.all_gather_into_tensor_uneven(rows, shard, [1, 1])
        assert uneven.is_available()
        assert uneven.is_hccl_available()
        assert uneven.reinit_process_group() is dist.group.WORLD
        return [rows.tolist(), reduced.tolist()]

    outcomes = on_ranks(body)
    for rank, (rows, reduced) in enumerate(outcomes):
        assert rows == [[1, 1]] * 3 + [[2, 2]]
        assert reduced == [[3 * (2 * row), 3 * (2 * row + 1)] for row in ((0, 1, 2), (3,))[rank]]


REFUSED = [
    (lambda t, a, b, h: t.npu_all_gather_base_mm(a, b, h, 3), r"world_size should be in \[2, 4, 8, 16, 32\], but .* 3"),
    (lambda t, a, b, h: t.npu_all_gather_base_mm(a, b, h, 4), "world_size is 4, but the group of hcom has 2 ranks"),
    (lambda t, a, b, h: t.npu_all_gather_base_mm(a, b, "no such group", 2), "names no hccl group of this process"),
    (
        lambda t, a, b, h: t.npu_all_gather_base_mm(a[:, :255], b[:255], h, 2),
        r"k must be in \[256, 65535\), but got 255",
    ),
    (lambda t, a, b, h: t.npu_all_gather_base_mm(a, b[:9], h, 2), "the K-axis of x1 is 256 and the K-axis of x2 is 9"),
    (
        lambda t, a, b, h: t.npu_all_gather_base_mm(a.float(), b.float(), h, 2),
        "both inputs must be float16 or bfloat16",
    ),
    (lambda t, a, b, h: t.npu_all_gather_base_mm(a, b, h, 2, gather_index=1), "gather_index must be 0, but got 1"),
    (lambda t, a, b, h: t.npu_mm_reduce_scatter_base(a[:5], b, h, 2), "should be be divisible by world_size"),
    (lambda t, a, b, h: t.npu_mm_reduce_scatter_base(a, b, h, 2, bias=b[0]), "a bias other than 0 is not supported"),
    (lambda t, a, b, h: t.npu_mm_reduce_scatter_base(a, b, h, 2, reduce_op="max"), "reduce_op must be sum"),
    (lambda t, a, b, h: t.npu_mm_all_reduce_base(a, b[:9], h), "K of x1 and x2 should be same"),
    (lambda t, a, b, h: t.npu_mm_all_reduce_base(a.char(), b.char(), h), "dequantScale must be given"),
]


def test_what_they_refuse_before_anything_is_sent() -> None:
    import torch_npu

    def body(rank: int, hcom: str) -> list[str]:
        x1, x2 = (matrix.npu() for matrix in matrices(rank))
        messages = []
        for call, _ in REFUSED:
            with pytest.raises(RuntimeError) as refused:
                call(torch_npu, x1, x2, hcom)
            messages.append(str(refused.value))
        return messages

    import re

    for messages in on_ranks(body):
        for (_, expected), message in zip(REFUSED, messages, strict=True):
            assert re.search(expected, message), message
