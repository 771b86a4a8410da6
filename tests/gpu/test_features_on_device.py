"""Features of engine megatron on GPUs, against the CPU, peft and transformers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend import Adapters, Batching, Parallel
from megascend.engines.common.blockwise_adamw import QUANTISED, BlockwiseAdamW
from megascend.testing import run_distributed
from megascend.testing.parity import (
    STEPS,
    Case,
    TrainingCurve,
    case_backend,
    case_checkpoint,
    causal_samples,
    differences,
    first_of_equals,
    hf_reference,
    run_case,
    token_lists,
)
from megascend.training.lora.quantised_weights import QuantisedWeights
from support import scalar_runs
from support.lora_parity import adapter_differences, case_adapter, peft_reference, train_one

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

QUANTISED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
PADDED: dict[str, Any] = {"packing": False, "micro_batch_tokens": 200}
"""Transformer Engine has no packed attention in fp32."""
GROUPS = [[*range(1, 101), *range(number, number + 20 * number)] for number in range(1, 6)]
"""Samples that begin with the same hundred tokens."""
CASES = {
    "nf4": (Case("nf4", overrides=SIZES | {"intermediate_size": 256}, **PADDED), "nf4"),
    "experts, fp8": (
        Case("fp8", arch="qwen3_moe", overrides=SIZES | {"moe_intermediate_size": 256}, **PADDED),
        "fp8",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


def dequantised_checkpoint(checkpoint: Path, method: Any, dtype: torch.dtype = torch.float32) -> Path:
    """Return a copy whose layers' matrices the CPU has quantised and dequantised (tests/training/lora compares that with NumPy).

    ``dtype``: of the weights that are quantised, as a run of that precision has them.
    """
    path = checkpoint.with_name(f"{checkpoint.name}-dequantised-{method}-{dtype}")
    if not path.exists():
        shutil.copytree(checkpoint, path)
        tensors = load_file(checkpoint / "model.safetensors")
        for name, tensor in tensors.items():
            if name.removesuffix(".weight").endswith(QUANTISED_LAYERS):
                tensors[name] = QuantisedWeights([tensor.to(dtype)], method).dequantised(0).to(tensor.dtype)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def train_adapter(case: Case, checkpoint: Path, adapter: Path, out: Path, method: Any) -> Any:
    """Train an adapter on one rank, on weights in the format ``method``."""
    with case_backend(case, checkpoint, adapters=Adapters(base_weights=method), platform="cuda") as backend:
        return train_one(backend, adapter, STEPS, out)


@pytest.mark.parametrize("name", CASES)
def test_adapters_on_quantised_weights_train_as_with_peft(name: str, folder: Path, tmp_path: Path) -> None:
    case, method = CASES[name]
    checkpoint = case_checkpoint(folder, case.arch, **case.overrides)
    adapter = case_adapter(checkpoint, case)
    ranks = run_distributed(train_adapter, 1, case, checkpoint, adapter, tmp_path / "out", method, init=False)
    reference = peft_reference(folder, dequantised_checkpoint(checkpoint, method), adapter, token_lists())
    difference = adapter_differences(first_of_equals(name, ranks), reference)
    print(f"{name}: {difference}")
    assert difference.loss <= case.loss_bound
    assert difference.grad_norm <= case.norm_bound
    assert difference.factors <= 1e-3


@pytest.mark.parametrize("method", ["fp8", "nf4"])
def test_quantised_experts_in_bf16_equal_their_dequantised_checkpoint(
    method: str, folder: Path, tmp_path: Path
) -> None:
    """Products are the same and of the same values, so only sums in another order differ."""
    case = replace(CASES["experts, fp8"][0], precision="bf16", packing=True, micro_batch_tokens=90, experts="grouped")
    checkpoint = case_checkpoint(folder, case.arch, **case.overrides)
    adapter = case_adapter(checkpoint, case)
    curves = []
    dequantised = dequantised_checkpoint(checkpoint, method, torch.bfloat16)
    for source, base in ((checkpoint, method), (dequantised, "unquantised")):
        out = tmp_path / f"{source.name}-{base}"
        curves += run_distributed(train_adapter, 1, case, source, adapter, out, base, init=False)
    print([curve.losses for curve in curves], [curve.grad_norms for curve in curves])
    assert curves[0].losses == pytest.approx(curves[1].losses, rel=1e-3)
    assert curves[0].grad_norms == pytest.approx(curves[1].grad_norms, rel=1e-2)


def test_sinks_and_biases_of_experts_train_packed_as_in_transformers(folder: Path) -> None:
    case = Case("packed, grouped", arch="gpt_oss", precision="bf16", experts="grouped")
    checkpoint, tokens = case_checkpoint(folder, case.arch), token_lists()
    ranks = run_distributed(run_case, 1, case, checkpoint, tokens, 3, init=False, platform="cuda")
    difference = differences(first_of_equals(case.name, ranks), hf_reference(folder, checkpoint, tokens, steps=3))
    print(f"{case.name}: {difference}")
    assert difference.loss <= 2e-2
    assert difference.grad_norm <= 0.1


def train_shared(case: Case, checkpoint: Path, platform: Any) -> TrainingCurve:
    """Train three steps on one rank, which computes the common tokens once."""
    losses, norms = [], []
    batching = Batching(micro_batch_tokens=512, share_prefixes=64)
    with case_backend(case, checkpoint, platform=platform, batching=batching) as backend:
        for _ in range(3):
            result = backend.forward_backward(causal_samples(GROUPS))
            assert result.shared_tokens >= 4 * 98
            losses.append(result.loss)
            norms.append(backend.optimizer_step().grad_norm)
    return TrainingCurve(losses, norms, [])


def test_megatron_trains_as_transformers_which_shares_nothing(folder: Path) -> None:
    """With heads of 64 the kernel is cuDNN's on Hopper."""
    case = Case("shared", precision="bf16", overrides={"head_dim": 64})
    checkpoint = case_checkpoint(folder, case.arch, **case.overrides)
    (curve,) = run_distributed(train_shared, 1, case, checkpoint, "cuda", init=False)
    reference = hf_reference(folder, checkpoint, GROUPS, steps=3)
    difference = differences(curve, TrainingCurve(reference.losses, reference.grad_norms, []))
    assert difference.loss <= 2e-2, difference
    assert difference.grad_norm <= 0.3, difference


@two_gpus
@pytest.mark.parametrize(("layout", "virtual"), [("Ettt|ttL", 1), ("E|tt|ttt|L", 2)])
def test_uneven_pipelines_train_as_transformers_does(layout: str, virtual: int, folder: Path) -> None:
    parallel = Parallel(pipeline=2, virtual_pipeline=virtual, pipeline_layout=layout)
    layers = layout.count("t")
    case = Case(layout, 2, parallel, arch="llama", overrides={"num_hidden_layers": layers}, **PADDED)
    checkpoint = case_checkpoint(folder, case.arch, **case.overrides)
    ranks = run_distributed(run_case, 2, case, checkpoint, token_lists(), init=False, platform="cuda")
    difference = differences(first_of_equals(layout, ranks), hf_reference(folder, checkpoint, token_lists()))
    print(f"{layout}: {difference}")
    assert difference.loss <= case.loss_bound
    assert difference.grad_norm <= case.norm_bound


def train_with_scalar_head(checkpoint: Path, kind: str) -> Any:
    """Train on one rank on a GPU."""
    import megascend

    megascend.bootstrap("cuda")
    return scalar_runs.trained(checkpoint, scalar_runs.LAYOUTS["single, padded"], kind)


@pytest.mark.parametrize("kind", scalar_runs.MODELS)
def test_scalar_heads_train_as_transformers_does(kind: str, folder: Path) -> None:
    checkpoint = scalar_runs.checkpoint_of(folder, kind)
    ranks = run_distributed(train_with_scalar_head, 1, checkpoint, kind, init=False)
    scalar_runs.assert_equal_to_transformers(ranks, scalar_runs.expected(folder, checkpoint, kind), kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", ["fp8", "nf4"])
@pytest.mark.parametrize("columns", [64, 200, 768, 2048, 5120])
def test_codes_and_values_equal_those_of_the_cpu(columns: int, method: Any, dtype: torch.dtype) -> None:
    weights = torch.randn(3, 40, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    weights[1, 7] = 0
    on_cpu, on_gpu = QuantisedWeights(list(weights), method), QuantisedWeights(list(weights.cuda()), method)
    assert torch.equal(on_gpu.dequantised().cpu(), on_cpu.dequantised())
    assert torch.equal(on_gpu.dequantised(1).cpu(), on_cpu.dequantised(1))


def test_8bit_moments_take_the_steps_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(100_000, generator=generator), torch.randn(4, 100_000, generator=generator)
    values = []
    for device in ("cpu", "cuda"):
        main = torch.nn.Parameter(start.clone().to(device))
        groups: list[dict[str, Any]] = [{"params": [main], QUANTISED: True}]
        optimizer = BlockwiseAdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
        for grad in grads:
            main.grad = grad.to(device)
            optimizer.step()
        values.append(main.detach().cpu())
    # Where a moment lies between two codes, rounding decides between steps that differ by an eighth.
    difference = (values[0] - values[1]).abs()
    assert float(difference.mean()) < 1e-6
    assert float(difference.max()) < 4e-2
