"""Layers of the reference Transformer Engine against NVIDIA's: same weights, inputs and output gradients.

fp32 is computed without TF32, which Transformer Engine's products use regardless of PyTorch's switch. bf16 rounds at different
points in the two, so its bound is loose and fp32 is the proof. scripts/parity.py compares whole models on either with Hugging
Face.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # read by cuBLAS when it is loaded
DEVICE = "cuda"
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
"""Largest difference relative to the tensor's 2-norm."""
ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")
"""Of parameters, which Megatron reads: shards, gradient norm, sequence-parallel reduction."""


def reference(name: str) -> Any:
    """Find a class of the reference implementation in any of its modules."""
    package = import_module("megascend.reference.te")
    names = [package.__name__, *(info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))]
    classes = [getattr(import_module(module), name, None) for module in names]
    return next(found for found in classes if isinstance(found, type))


def real(name: str) -> Any:
    """Return NVIDIA's class."""
    module = "transformer_engine.pytorch" + (".optimizers" if name == "FusedAdam" else "")
    return getattr(import_module(module), name)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the relative 2-norm of the difference, in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape
    norm = expected.norm().item()
    return (actual - expected).norm().item() / (norm if norm > 0 else 1.0)


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert actual.keys() == expected.keys()
    differences = {name: difference(actual[name], value) for name, value in expected.items()}
    assert {name: value for name, value in differences.items() if not value <= bound} == {}


def run_layer(module: torch.nn.Module, inputs: list[Tensor], call: Callable[..., Any]) -> dict[str, Tensor]:
    """Return outputs, input gradients and parameter gradients for a fixed output gradient."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outputs = call(module, *inputs)
    outputs = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if torch.is_tensor(out)]
    generator = torch.Generator(outputs[0].device).manual_seed(7)
    grads = [torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype) for out in outputs]
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
    torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    result = {f"output {index}": out for index, out in enumerate(outputs)}
    result |= {f"d input {index}": tensor.grad for index, tensor in enumerate(inputs) if tensor.grad is not None}
    return result | {f"d {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Case:
    """A layer, how it is built, the shapes of its inputs, and how it is called."""

    name: str
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...] = ((96, 2, 128),)
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs)


def attention(layout: str, mask: str, *leading: int, call: Callable[..., Any] | None = None, **further: Any) -> Case:
    """Grouped-query attention, 8 heads in 2 groups."""
    arguments = {"num_attention_heads": 8, "kv_channels": 64, "num_gqa_groups": 2, "attention_dropout": 0.0}
    arguments |= {"qkv_format": layout, "attn_mask_type": mask, **further}
    shapes = tuple((*leading, heads, 64) for heads in (8, 2, 2))
    return Case("DotProductAttention", arguments, shapes, call or (lambda module, *inputs: module(*inputs)))


SPLITS = [40, 0, 88, 64]
LENGTHS = [128, 64, 192, 256]


def call_packed(module: Any, *inputs: Tensor) -> Any:
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(device=DEVICE, dtype=torch.int32)
    samples = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": max(LENGTHS), "max_seqlen_kv": max(LENGTHS)}
    return module(*inputs, qkv_format="thd", attn_mask_type="padding_causal", **samples)


LINEAR = {"in_features": 128, "out_features": 192, "bias": True}
NORMED = LINEAR | {"eps": 1e-6, "normalization": "RMSNorm"}
CASES = {
    "linear": Case("Linear", LINEAR),
    "linear without bias": Case("Linear", LINEAR | {"bias": False}),
    "linear, bias returned": Case("Linear", LINEAR | {"return_bias": True}),
    "RMSNorm linear": Case("LayerNormLinear", NORMED),
    "RMSNorm linear without bias": Case("LayerNormLinear", NORMED | {"bias": False}),
    "LayerNorm linear": Case("LayerNormLinear", NORMED | {"normalization": "LayerNorm"}),
    "RMSNorm linear, norm returned": Case("LayerNormLinear", NORMED | {"return_layernorm_output": True}),
    "RMSNorm": Case("RMSNorm", {"hidden_size": 128, "eps": 1e-6}),
    "LayerNorm": Case("LayerNorm", {"hidden_size": 128, "eps": 1e-6}),
    "grouped linear": Case(
        "GroupedLinear",
        LINEAR | {"bias": False, "num_gemms": len(SPLITS)},
        ((sum(SPLITS), 128),),
        lambda module, x: module(x, SPLITS),
    ),
    "attention sbhd causal": attention("sbhd", "causal", 128, 2),
    "attention sbhd no mask": attention("sbhd", "no_mask", 128, 2),
    "attention bshd causal": attention("bshd", "causal", 2, 128),
    "attention bshd no mask": attention("bshd", "no_mask", 2, 128),
    "attention window": attention("sbhd", "causal", 128, 2, window_size=(32, 0)),
    "attention packed": attention("thd", "padding_causal", sum(LENGTHS), call=call_packed),
}


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_layer_equals_nvidias(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    weights = {} if case.name == "DotProductAttention" else {"params_dtype": dtype, "device": DEVICE}
    modules = [kind(**case.arguments, **weights) for kind in (real(case.name), reference(case.name))]
    targets = dict(modules[1].named_parameters())
    with torch.no_grad():
        for key, parameter in modules[0].named_parameters():
            around_one = "norm" in key or (parameter.dim() == 1 and key == "weight")
            parameter.normal_(1.0 if around_one else 0.0, 0.2)
            targets[key].copy_(parameter)
    inputs = [torch.randn(shape, device=DEVICE).to(dtype) for shape in case.shapes]
    try:
        expected = run_layer(modules[0], inputs, case.call)
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"NVIDIA's raises {type(error).__name__}: {str(error)[:120]}")
    compare(run_layer(modules[1], inputs, case.call), expected, BOUNDS[dtype])


def test_adam_equals_nvidias() -> None:
    """Five steps with weight decay in one of two groups: parameters and both moments."""
    results = []
    for kind in (reference("FusedAdam"), real("FusedAdam")):
        generator = torch.Generator(DEVICE).manual_seed(3)
        parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator, device=DEVICE)) for shape in ((64, 33), (129,))
        ]
        groups = [{"params": [parameters[0]], "weight_decay": 0.1}, {"params": [parameters[1]], "weight_decay": 0.0}]
        optimizer = kind(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator, device=DEVICE)
            optimizer.step()
        tensors = {f"parameter {index}": parameter for index, parameter in enumerate(parameters)}
        for index, parameter in enumerate(parameters):
            tensors |= {f"{name} {index}": optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")}
        results.append((tensors, [int(group["step"]) for group in optimizer.param_groups]))
    compare(results[0][0], results[1][0], BOUNDS[torch.float32])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", ["column", "row", None])
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "GroupedLinear"])
def test_parameters_have_nvidias_attributes(name: str, mode: str | None, sequence_parallel: bool) -> None:
    # Megatron never lets GroupedLinear communicate: the token dispatcher does.
    split = mode is not None and name != "GroupedLinear"
    if (name, mode) == ("LayerNormLinear", "row") or (sequence_parallel and not split):
        pytest.skip("Megatron builds no such layer")
    arguments: dict[str, Any] = {"in_features": 128, "out_features": 128, "bias": True, "parallel_mode": mode}
    arguments |= {"tp_size": 2 if split else 1, "sequence_parallel": sequence_parallel}
    arguments |= {"num_gemms": 2} if name == "GroupedLinear" else {}
    attributes = [
        {
            parameter_name: {key: getattr(parameter, key) for key in ATTRIBUTES if hasattr(parameter, key)}
            | {"shape": tuple(parameter.shape)}
            for parameter_name, parameter in kind(
                **arguments, params_dtype=torch.float32, device=DEVICE
            ).named_parameters()
        }
        for kind in (reference(name), real(name))
    ]
    assert attributes[0] == attributes[1]
