"""Adapters on quantised base weights: compared with peft on weights that a plain computation has quantised and dequantised."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend import Adapters, Lora, Parallel
from megascend.errors import CheckpointError
from megascend.runtime.io.shared import cached
from megascend.testing import run_distributed
from megascend.testing.parity import STEPS, Case, case_backend, case_checkpoint, first_of_equals, token_lists
from megascend.training.lora.quantised_weights import BLOCKS, NF4, QuantisedLayer, QuantisedWeights
from support.lora_parity import adapter_differences, case_adapter, peft_reference, train_one

FILE = "model.safetensors"
QUANTISED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Inputs of two ranks that are multiples of both blocks.
SIZES = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
DENSE, EXPERTS = SIZES | {"intermediate_size": 256}, SIZES | {"moe_intermediate_size": 256}
CASES = {
    "TP2 x PP2, nf4": (Case("nf4", 4, Parallel(tensor=2, pipeline=2), overrides=DENSE), "nf4"),
    "EP2, fp8": (Case("fp8", 2, Parallel(expert=2), arch="qwen3_moe", overrides=EXPERTS), "fp8"),
    "one process, fp8": (Case("fp8", overrides=DENSE), "fp8"),
    "experts on TP2, nf4": (Case("nf4", 2, Parallel(tensor=2), arch="qwen3_moe", overrides=EXPERTS), "nf4"),
    "grouped experts, nf4": (Case("nf4", arch="qwen3_moe", experts="grouped", overrides=EXPERTS), "nf4"),
}
IN_CI = ("TP2 x PP2, nf4", "EP2, fp8")


def e4m3_values() -> np.ndarray:
    """Return the non-negative values of e4m3, without its NaN: three bits of fraction, exponents with a bias of 7."""
    denormal = [fraction / 8 * 2.0**-6 for fraction in range(8)]
    normal = [(1 + fraction / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for fraction in range(8)]
    return np.array(denormal + normal[:-1])


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    """Round to the nearest value of e4m3, in the middle of two to the one whose last bit is 0."""
    magnitudes, sizes = e4m3_values(), np.abs(values).astype(np.float64)
    above = np.searchsorted(magnitudes, sizes).clip(1, len(magnitudes) - 1)
    below = above - 1
    up, down = magnitudes[above] - sizes, sizes - magnitudes[below]
    chosen = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return np.sign(values) * magnitudes[chosen]


def dequantised(weight: np.ndarray, method: str) -> np.ndarray:
    """Return the nearest values that blocks of a row can represent. Scales and quotients are fp32, as the formats have it."""
    block, result = BLOCKS[method], np.empty(weight.shape)
    for start in range(0, weight.shape[1], block):
        values = weight[:, start : start + block].astype(np.float32)
        largest = np.abs(values).max(1, keepdims=True)
        scale = largest if method == "nf4" else largest / np.float32(448)
        quotients = values / scale
        if method == "nf4":
            codes = np.array(NF4)
            rounded = codes[np.abs(quotients[..., None] - codes).argmin(-1)]
        else:
            rounded = nearest_e4m3(quotients)
        result[:, start : start + block] = scale.astype(np.float64) * rounded
    return result


def dequantised_checkpoint(checkpoint: Path, method: str) -> Path:
    """Return a copy of a checkpoint whose layers' matrices have been quantised and dequantised."""

    def make(path: Path) -> None:
        shutil.copytree(checkpoint, path)
        tensors = load_file(checkpoint / FILE)
        for name, tensor in tensors.items():
            if name.removesuffix(".weight").endswith(QUANTISED):
                tensors[name] = torch.from_numpy(dequantised(tensor.double().numpy(), method)).to(tensor.dtype)
        save_file(tensors, path / FILE, {"format": "pt"})

    return cached(checkpoint.with_name(f"{checkpoint.name}-dequantised-{method}"), make)


def test_nf4_has_the_quantiles_of_the_normal_distribution():
    # As bitsandbytes computes them: eight positive and seven negative ones from a tail of 1 - 0.9677083.
    positive = torch.special.ndtri(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat([positive, negative, torch.zeros(1, dtype=torch.float64)]).sort().values
    torch.testing.assert_close(torch.tensor(NF4, dtype=torch.float64), values / values.max(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["fp8", "nf4"])
def test_weights_are_the_nearest_that_their_blocks_represent(method):
    weights = torch.randn(2, 24, 200, generator=torch.Generator().manual_seed(3))
    weights[0, 3] = 0
    with np.errstate(invalid="ignore"):
        expected = np.stack([np.nan_to_num(dequantised(weight.double().numpy(), method)) for weight in weights])
    quantised = QuantisedWeights(list(weights), method)
    agree = np.isclose(quantised.dequantised().numpy(), expected, rtol=1e-6, atol=0)
    # A value in the middle of two codes may get either.
    assert agree.mean() > 0.999
    assert torch.equal(quantised.dequantised(1), quantised.dequantised()[1])
    blocks = 2 * 24 * -(-200 // BLOCKS[method])
    assert quantised.bytes == blocks * (BLOCKS[method] // (2 if method == "nf4" else 1) + 4)


def test_dequantised_weights_live_only_while_their_layer_runs():
    module = torch.nn.Linear(128, 64, bias=False).requires_grad_(False)
    values = module.weight.detach().clone()
    layer = QuantisedLayer(module)
    layer.allocate()
    module.weight.data.copy_(values)
    layer.quantise("nf4")
    expected = QuantisedWeights([values], "nf4").dequantised(0)
    alive = []
    module.register_forward_pre_hook(lambda *_: alive.append(weakref.ref(layer._dense)))
    x = torch.randn(5, 128, requires_grad=True)
    out = module(x)
    gc.collect()
    assert alive[0]() is None
    assert bool(module.weight.isnan().all())
    assert module.weight.untyped_storage().nbytes() == 4
    torch.testing.assert_close(out, x @ expected.T)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(grad, 2 * (x @ expected.T) @ expected)


def run(case: Case, method: str, checkpoint: Path, adapter: Path, out: Path):
    """Train on one rank, save and merge the adapter; return the trajectory."""
    with case_backend(case, checkpoint, adapters=Adapters(base_weights=method)) as backend:
        trajectory = train_one(backend, adapter, STEPS, out / "adapter")
        backend.export_hf(out / "merged", adapter="tenant")
        backend.export_hf(out / "base")
    return trajectory


@pytest.mark.nightly_cases("TP2 x PP2, nf4")  # covered: EP2, fp8
@pytest.mark.usefixtures("megatron_imported")
@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_trajectory_equals_peft_on_dequantised_weights(name, parity_folder, tmp_path):
    case, method = CASES[name]
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)
    adapter = case_adapter(checkpoint, case)
    ranks = run_distributed(
        run, case.world_size, case, method, checkpoint, adapter, tmp_path, init=False, timeout_s=180
    )
    trajectory = first_of_equals(name, ranks)
    reference = peft_reference(parity_folder, dequantised_checkpoint(checkpoint, method), adapter, token_lists())
    difference = adapter_differences(trajectory, reference)
    unquantised = peft_reference(parity_folder, checkpoint, adapter, token_lists())
    distance = max(abs(a - b) for a, b in zip(trajectory.losses, unquantised.losses, strict=True))
    print(f"{name}: {difference}; losses within {distance:.1e} of those of unquantised weights")
    assert difference.loss <= case.loss_bound
    assert difference.grad_norm <= case.norm_bound
    assert difference.factors <= 1e-3
    assert difference.logits is None or difference.logits <= 2e-5
    assert distance > 10 * difference.loss
    # Exports have the checkpoint's weights, with the adapter's update.
    source, base, merged = (load_file(path / FILE) for path in (checkpoint, tmp_path / "base", tmp_path / "merged"))
    assert all(torch.equal(base[key], tensor.float()) for key, tensor in source.items())
    key = "model.layers.0.self_attn.o_proj"
    factors = trajectory.factors[key]
    torch.testing.assert_close(merged[f"{key}.weight"], source[f"{key}.weight"].float() + 1.5 * factors.b @ factors.a)


@pytest.mark.usefixtures("megatron_imported")
def test_export_has_a_new_head_that_no_file_has(parity_folder, tmp_path):
    case = Case("nf4", overrides=DENSE)
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)

    def export() -> None:
        with case_backend(case, checkpoint, adapters=Adapters(base_weights="nf4"), head="reward_model") as backend:
            backend.add_adapter("tenant", Lora(rank=2))
            backend.export_hf(tmp_path / "merged", adapter="tenant")
            backend.save_adapter("tenant", tmp_path / "adapter")

    run_distributed(export, 1, init=False, timeout_s=180)
    merged, adapter = (
        load_file(tmp_path / "merged" / FILE),
        load_file(tmp_path / "adapter" / "adapter_model.safetensors"),
    )
    torch.testing.assert_close(merged["score.weight"], adapter["base_model.model.score.weight"])


def resume(checkpoint: Path, adapter: Path, out: Path) -> None:
    """Compare a resumed run with an uninterrupted one, and load it with other base weights."""
    from megascend.testing.parity import causal_samples

    samples = causal_samples(token_lists())

    def losses(backend, steps: int) -> list[float]:
        values = []
        for _ in range(steps):
            values.append(backend.forward_backward(samples, adapter="tenant").loss)
            backend.optimizer_step()
        return values

    case = CASES["one process, fp8"][0]
    with case_backend(case, checkpoint, adapters=Adapters(base_weights="fp8")) as backend:
        backend.load_adapter("tenant", adapter, optimizer=False)
        losses(backend, 2)
        backend.save(out, wait=True)
        expected = losses(backend, 2)
    with case_backend(case, checkpoint, adapters=Adapters(base_weights="fp8")) as backend:
        backend.load(out)
        assert losses(backend, 2) == expected
    with (
        case_backend(case, checkpoint, adapters=Adapters(base_weights="nf4")) as backend,
        pytest.raises(CheckpointError, match="trained with base_weights: fp8, this run has nf4: set base_weights: fp8"),
    ):
        backend.load(out)


@pytest.mark.nightly
@pytest.mark.usefixtures("megatron_imported")
def test_runs_resume_bit_for_bit_with_the_same_base_weights(parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, "qwen3", **DENSE)
    adapter = case_adapter(checkpoint, CASES["one process, fp8"][0])
    run_distributed(resume, 1, checkpoint, adapter, tmp_path / "checkpoint", init=False, timeout_s=180)
