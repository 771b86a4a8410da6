"""A rank that fails while the others communicate over NCCL: its error becomes known, and no rank waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascend.errors import DistributedTestError
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_backend, case_checkpoint, causal_samples, token_lists

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@pytest.mark.parametrize("waits_for", ["objects", "gradients"])
def test_error_of_a_rank_ends_all_of_them(waits_for: str, tmp_path: Path) -> None:
    """The others wait for it in a channel on Gloo, or on the device, where only the end of its process helps them."""
    case = Case("DP2", 2, precision="bf16")
    checkpoint = case_checkpoint(tmp_path, case.arch)

    def train() -> None:
        with case_backend(case, checkpoint, platform="cuda") as backend:
            samples = backend.shard(causal_samples(token_lists()))
            backend.forward_backward(samples)
            backend.optimizer_step()
            if backend.groups.rank == 0:
                raise ValueError("this rank fails")
            if waits_for == "objects":
                backend.forward_backward(samples)
            else:
                total = torch.ones(1, device="cuda")
                torch.distributed.all_reduce(total)
                total.item()

    with pytest.raises(DistributedTestError, match="ValueError: this rank fails"):
        run_distributed(train, 2, init=False, timeout_s=100)
