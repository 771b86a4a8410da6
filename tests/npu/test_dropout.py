"""Attention dropout under MindSpeed: every tensor parallel rank drops its own positions."""

from __future__ import annotations

import pytest

from megascend.config import Batching, Parallel
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists

pytestmark = pytest.mark.usefixtures("npu")


def kernel_seeds(checkpoint, parallel):
    """Return the seeds that the simulated kernel drew in one forward and backward pass."""
    from megascend.backends import MegatronBackend
    from simnpu.operators import attention

    seeds, draw = [], attention.draw_seed

    def remember(*arguments):
        seed, offset = draw(*arguments)
        seeds.append(seed)
        return seed, offset

    attention.draw_seed = remember
    backend = MegatronBackend(
        checkpoint, parallel, "fp32", batching=Batching(packing=False), platform="npu", timeout_s=60, self_check=False
    )
    backend.forward_backward(backend.shard(causal_samples(token_lists())))
    backend.close()
    return seeds


@pytest.mark.nightly_cases("TP2")  # covered: TP2 + SP
@pytest.mark.parametrize("sequence", [False, True], ids=["TP2", "TP2 + SP"])
def test_tensor_parallel_ranks_draw_different_masks(sequence, parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3", attention_dropout=0.2)
    seeds_0, seeds_1 = run_distributed(kernel_seeds, 2, checkpoint, Parallel(tensor=2, sequence=sequence), init=False)
    assert len(seeds_0) == len(seeds_1) >= 4
    assert not set(seeds_0) & set(seeds_1)
