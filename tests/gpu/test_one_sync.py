"""In a training step the host waits for the device once. Needs a CUDA GPU."""

import warnings

import pytest
import torch

import megascend
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")


def places_of_waits(step):
    """Return the code positions where the host waits in the third ``step``."""
    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{entry.filename}:{entry.lineno}" for entry in caught if "synchronizing" in str(entry.message)]


@pytest.mark.parametrize("adapters", [(), ("a",), ("a", "b")], ids=["model", "adapter", "adapters with dropout"])
def test_step_synchronizes_once(adapters, parity_folder):
    backend = megascend.MegatronBackend(
        model=case_checkpoint(parity_folder, "qwen3"),
        platform="cuda",
        batching=megascend.Batching(micro_batch_tokens=64),
        adapters=megascend.Adapters() if adapters else None,
    )
    for name in adapters:
        backend.add_adapter(name, megascend.Lora(rank=8, dropout=0.1 if len(adapters) > 1 else 0.0))
    samples = causal_samples(token_lists())
    for position, sample in enumerate(samples if adapters else []):
        sample.adapter = adapters[position % len(adapters)]

    def step():
        return backend.forward_backward(samples), backend.optimizer_step()

    places = places_of_waits(step)
    assert len(places) == 1, places
    result, outcome = step()
    assert result.loss > 0
    assert outcome.grad_norm > 0
    backend.close()


def test_step_with_offloaded_optimizer_state_synchronizes_once(parity_folder):
    with megascend.MegatronBackend(
        model=case_checkpoint(parity_folder, "qwen3"),
        platform="cuda",
        optimizer=megascend.Adam(offload=True),
        batching=megascend.Batching(micro_batch_tokens=64),
    ) as backend:
        samples = causal_samples(token_lists())
        places = places_of_waits(lambda: (backend.forward_backward(samples), backend.optimizer_step()))
        assert len(places) == 1, places


@pytest.mark.parametrize("adapters", [(), ("a", "b")], ids=["model", "adapters"])
def test_step_of_grouped_experts_synchronizes_once(adapters, parity_folder):
    backend = megascend.MegatronBackend(
        model=case_checkpoint(parity_folder, "qwen3_moe"),
        platform="cuda",
        batching=megascend.Batching(micro_batch_tokens=64),
        moe=megascend.Moe(experts="grouped"),
        adapters=megascend.Adapters() if adapters else None,
    )
    for name in adapters:
        backend.add_adapter(name, megascend.Lora(rank=8))
    samples = causal_samples(token_lists())
    for position, sample in enumerate(samples if adapters else []):
        sample.adapter = adapters[position % len(adapters)]
    places = places_of_waits(lambda: (backend.forward_backward(samples), backend.optimizer_step()))
    assert len(places) == 1, places
    backend.close()
