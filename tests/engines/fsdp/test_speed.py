"""Fast paths of the FSDP engine that a CPU can test: choice of attention, compilation, selective recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascend import Fsdp, Recompute
from megascend.engines.fsdp import attention, recomputation
from megascend.testing.parity import TrainingCurve, case_checkpoint, differences, hf_reference, token_lists
from megascend.training.kernels import varlen
from support.forked_programs import run_forked

PROGRAM = Path(__file__).with_name("speed_ranks.py")
COMPILED = Fsdp(compile=True)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "kernel"),
    [
        ("cuda", torch.bfloat16, (9, 0), True),
        ("cuda", torch.float16, (8, 0), True),
        ("cuda", torch.float32, (9, 0), False),
        ("cuda", torch.bfloat16, (7, 5), False),
        ("cpu", torch.bfloat16, (9, 0), False),
    ],
)
def test_the_kernel_for_packed_samples_is_for_16_bits_on_cuda(monkeypatch, device, dtype, capability, kernel):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert varlen.available(torch.device(device), dtype) == kernel


@pytest.mark.parametrize(
    ("width", "value_width", "dropout", "fits"),
    [
        (128, 128, 0.0, True),
        (12, 12, 0.0, False),
        (192, 128, 0.0, False),
        (128, 128, 0.1, False),
        (512, 512, 0.0, False),
    ],
)
def test_other_heads_and_dropout_take_a_call_a_sample(width, value_width, dropout, fits):
    query, value = torch.empty(1, 1, 1, width), torch.empty(1, 1, 1, value_width)
    assert varlen.fits(query, value, dropout) == fits


def test_sample_lengths_are_on_the_host_and_the_device():
    cpu = torch.device("cpu")
    lengths = attention.sample_lengths((3, 5, 2), None, cpu, torch.float32)
    assert not lengths.one_kernel
    assert lengths.starts is not None
    assert lengths.longest is not None
    assert (lengths.starts.tolist(), lengths.starts.dtype) == ([0, 3, 8, 10], torch.int32)
    assert lengths.longest.tolist() == [5, 5]
    assert attention.sample_lengths(None, None, cpu, torch.float32).starts is None


def test_the_kernel_for_packed_samples_is_for_short_ones(monkeypatch):
    """Check the measured limit: docs/fsdp.md."""
    monkeypatch.setattr(varlen, "available", lambda device, dtype: True)
    for lengths, one_kernel in (((64,) * 9, True), ((1024, 1024), True), ((4096, 4096), False), ((4096, 100), False)):
        for compiled in (False, True):
            layout = attention.sample_lengths(lengths, None, torch.device("cpu"), torch.bfloat16, compiled=compiled)
            assert layout.one_kernel == (one_kernel or compiled)


def test_selective_recomputation_keeps_attention_and_every_second_product():
    """Count the products of a block of four matrices and attention in the backward pass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: dict[Any, int] = {}

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls[func] = calls.get(func, 0) + 1
            return func(*args, **kwargs or {})

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.matrices = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(4))

        def forward(self, x):
            q, k, v = (matrix(x)[None] for matrix in self.matrices[:3])
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.matrices[3](mixed[0]).sigmoid()

    forward_only = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    counts = {}
    for granularity in ("none", "selective", "full"):
        block = Block()
        recomputation.recompute([block], granularity)
        loss = block(torch.ones(1, 5, 8, requires_grad=True)).sum()
        calls.clear()
        with Counted():
            loss.backward()
        counts[granularity] = (calls[torch.ops.aten.mm.default], calls.get(forward_only, 0))
    assert counts == {"none": (8, 0), "selective": (8 + 2, 0), "full": (8 + 4, 1)}


def hold_against_hugging_face(folder: Path, tmp_path: Path, backend: str, layouts: list[Any], steps: int) -> None:
    jobs = []
    for arch, world_size, options in layouts:
        checkpoint = str(case_checkpoint(folder, arch))
        jobs.append(("trajectory", (checkpoint, world_size, backend, steps), options))
    torch.save(jobs, tmp_path / "job")
    completed = run_forked(PROGRAM, tmp_path / "job", tmp_path / "result", timeout_s=800)
    assert completed.returncode == 0, completed.stderr[-6000:]
    problems = []
    for (_, (checkpoint, *_), options), results in zip(jobs, torch.load(tmp_path / "result"), strict=True):
        full = hf_reference(folder, checkpoint, token_lists(), steps=steps)
        reference = TrainingCurve(full.losses, full.grad_norms, [])
        difference = differences(TrainingCurve(results["losses"], results["norms"], []), reference)
        print(
            f"{Path(checkpoint).name} {options}: loss {difference.loss:.1e}, norm {difference.grad_norm:.1e}, "
            f"{results['graphs']}"
        )
        one_graph = 0 < results["graphs"][0] == results["graphs"][-1] and not results["breaks"]
        if difference.loss > 1e-5 or difference.grad_norm > 1e-4 or not one_graph:
            problems.append((checkpoint, options, difference, results["graphs"], results["breaks"]))
    assert not problems


@pytest.mark.nightly  # covered: eager layers; compiled ones are nightly only
def test_compiled_layers_compute_the_same(parity_folder, tmp_path):
    """Compile packed micro batches of different lengths once, in the first step, as full graphs, without code generation."""
    recomputed = {"fsdp": COMPILED, "recompute": Recompute(granularity="selective")}
    hold_against_hugging_face(parity_folder, tmp_path, "aot_eager", [("qwen3", 1, recomputed)], 3)
