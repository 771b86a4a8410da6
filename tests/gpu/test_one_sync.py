"""A training step makes the host wait for the device once. Needs a CUDA GPU."""

import warnings

import pytest
import torch

import megascend
from megascend.testing.parity import causal_samples, token_lists
from megascend.testing.tiny_models import write_tiny_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_a_step_waits_once(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path, "qwen3")
    backend = megascend.MegatronBackend(
        model=checkpoint, platform="cuda", batching=megascend.Batching(micro_batch_tokens=64)
    )
    samples = causal_samples(token_lists())

    def step():
        result = backend.forward_backward(samples)
        return result, backend.optimizer_step()

    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result, outcome = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [entry for entry in caught if "synchronizing" in str(entry.message)]
    places = [f"{entry.filename}:{entry.lineno}" for entry in waits]
    assert len(waits) == 1, places
    assert result.loss > 0
    assert outcome.grad_norm > 0
    backend.close()
