"""Optimizer state in page-locked host memory: numbers equal to state on the GPU, memory smaller by it. Needs a CUDA GPU."""

from __future__ import annotations

import hashlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import megascend
from megascend.engines.common import offloaded_adam
from megascend.engines.common.checkpoints import engine_state
from megascend.engines.common.offloaded_adam import SLOTS, OffloadedAdam
from megascend.testing.parity import case_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

CHUNK = 2**20
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 16384}


def torch_adam(groups: list[dict[str, Any]]) -> Any:
    return torch.optim.AdamW(groups, **ADAM)


def transformer_engine_adam(groups: list[dict[str, Any]]) -> Any:
    megascend.bootstrap("cuda")
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(groups, adam_w_mode=True, **ADAM)


@pytest.mark.parametrize("adam", [torch_adam, transformer_engine_adam])
def test_streamed_steps_are_those_on_the_device_bit_for_bit(adam: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the device busy before every step, and read its result at once: a copy that overtakes another shows."""
    # Chunks of many sizes, more of them than buffers, in several blocks of host memory.
    monkeypatch.setattr(offloaded_adam, "CHUNK", 2**18)
    monkeypatch.setattr(offloaded_adam, "SLAB", 2**21)
    device, counts = torch.device("cuda"), [3_000_001, 77, 262_144, 1_234_567, 16, 500_000]
    generator = torch.Generator(device).manual_seed(0)
    values = [torch.randn(count, device=device, generator=generator) for count in counts]
    plain, streamed = ([value.clone() for value in values] for _ in range(2))
    model, weights = ([value.bfloat16() for value in values] for _ in range(2))
    expected = adam([{"params": plain}])
    by_main = {id(main): weight for main, weight in zip(streamed, weights, strict=True)}
    optimizer = OffloadedAdam(adam([{"params": streamed}]), by_main, share=1.0, page_locked=True, stored_count=int)
    rows = torch.randn(4096, 4096, device=device, generator=generator)
    for _ in range(20):
        for main, streamed_main in zip(plain, streamed, strict=True):
            main.grad = torch.randn(main.shape, device=device, generator=generator)
            streamed_main.grad = torch.empty_like(main.grad)
        for _ in range(20):
            rows = (rows @ rows).clamp_(-1, 1)
        for main, streamed_main in zip(plain, streamed, strict=True):
            assert main.grad is not None
            assert streamed_main.grad is not None
            streamed_main.grad.copy_(main.grad)  # after the products
        optimizer.step()
        reread = [weight.clone() for weight in weights]
        for streamed_main in streamed:
            assert streamed_main.grad is not None
            streamed_main.grad.fill_(float("nan"))
        expected.step()
        torch._foreach_copy_(model, plain)
        assert all(torch.equal(weight, copy) for weight, copy in zip(model, reread, strict=True))
    for main, streamed_main in zip(plain, streamed, strict=True):
        runs = [tensors for _, tensors in optimizer.state_of(streamed_main).runs()]
        assert all(tensor.is_pinned() for tensors in runs for tensor in tensors.values())
        state = {
            "param": main,
            "exp_avg": expected.state[main]["exp_avg"],
            "exp_avg_sq": expected.state[main]["exp_avg_sq"],
        }
        for name, values_on_device in state.items():
            assert torch.equal(torch.cat([tensors[name] for tensors in runs]), values_on_device.cpu()), name


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def train(checkpoint: Path, offload: bool, precision: str) -> tuple[Any, int, int]:
    """Return norms and digests of weights and state after five steps, the peak of a training step, and the parameters."""
    offloaded_adam.CHUNK = CHUNK
    with megascend.MegatronBackend(
        model=checkpoint,
        platform="cuda",
        precision=precision,  # type: ignore[arg-type]
        self_check=False,
        optimizer=megascend.Adam(lr=1e-3, offload=offload),
        batching=megascend.Batching(packing=False, micro_batch_tokens=200),  # packed ones have no fp32 kernels
    ) as backend:
        engine: Any = backend.engine
        parameters = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
        generator, norms = torch.Generator("cuda").manual_seed(0), []
        for step in range(5):
            for parameter in parameters:
                parameter.main_grad.normal_(generator=generator)
            norms.append(engine.optimizer.step(step, True).grad_norm)
        digests = {name: digest(tensor) for name, tensor in backend.named_weights()}
        for name, tensor in engine_state(engine, loading=True).items():
            if hasattr(tensor, "slices"):
                parts = sorted(tensor.slices, key=lambda entry: entry[0])
                digests[name] = digest(torch.cat([part.float().cpu().reshape(-1) for _, part in parts]))
        samples = [megascend.Sample.causal(list(range(40)), prompt_length=4)]
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            backend.forward_backward(samples)
            assert not backend.optimizer_step().skipped
        return (norms, digests), torch.cuda.max_memory_allocated(), sum(p.numel() for p in parameters)


def in_new_process(checkpoint: Path, offload: bool, precision: str) -> tuple[Any, int, int]:
    """Train with memory that nothing else has used, and before anything has used cuBLAS, which fp32 needs."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(train, checkpoint, offload, precision).result(timeout=240)


@pytest.mark.parametrize(("precision", "state_bytes"), [("bf16", 12), ("fp32", 8)])
def test_run_is_equal_and_its_peak_smaller_by_the_state(parity_folder: Path, precision: str, state_bytes: int) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3", **SIZES)
    (norms, digests), peak, parameters = in_new_process(checkpoint, False, precision)
    (other_norms, other_digests), other_peak, _ = in_new_process(checkpoint, True, precision)
    assert other_norms == norms
    assert other_digests == digests
    saved, buffers = state_bytes * parameters, SLOTS * 3 * 4 * CHUNK
    print(
        f"{precision}: peak {peak / 2**20:.0f} MiB, with offload {other_peak / 2**20:.0f}; state {saved / 2**20:.0f} MiB"
    )
    assert peak - other_peak == pytest.approx(saved - buffers, rel=0.05)
