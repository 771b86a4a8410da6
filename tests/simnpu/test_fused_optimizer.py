"""``torch_npu.optim.NpuFusedAdamW`` against torch's AdamW in float64, and its rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from simnpu.errors import NotSimulatedError

pytestmark = pytest.mark.usefixtures("sim_npu")
SETTINGS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def optim() -> Any:
    import torch_npu

    return torch_npu.optim


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, 4, generator=generator), torch.randn(5, generator=generator) * 3]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_steps_equal_torchs_adamw(optim: Any, amsgrad: bool) -> None:
    start = gradients(99)
    parameters = [p.npu().requires_grad_() for p in start]
    expected = [p.double().requires_grad_() for p in start]
    fused = optim.NpuFusedAdamW(parameters, amsgrad=amsgrad, **SETTINGS)
    reference = torch.optim.AdamW(expected, amsgrad=amsgrad, **SETTINGS)
    for step in range(6):
        for parameter, other, gradient in zip(parameters, expected, gradients(step), strict=True):
            if parameter.grad is None:
                parameter.grad = gradient.npu()
            else:
                parameter.grad.copy_(gradient)
            other.grad = gradient.double()
        fused.step()
        reference.step()
        fused.zero_grad()
    assert all(float(p.grad.abs().max()) == 0 for p in parameters)
    for parameter, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().cpu().double(), other.detach(), atol=1e-6, rtol=1e-5)


def test_its_clipping_equals_torchs(optim: Any) -> None:
    parameters = [p.npu().requires_grad_() for p in gradients(0)]
    for parameter, gradient in zip(parameters, gradients(1), strict=True):
        parameter.grad = gradient.npu()
    flat = torch.cat([gradient.flatten().double() for gradient in gradients(1)])
    norm = optim.NpuFusedAdamW(parameters).clip_grad_norm_fused_(0.5)
    assert float(norm) == pytest.approx(float(flat.norm()), rel=1e-6)
    clipped = torch.cat([parameter.grad.flatten().cpu() for parameter in parameters]).double()
    torch.testing.assert_close(clipped, flat * 0.5 / flat.norm(), atol=1e-6, rtol=1e-5)


def test_what_torch_npus_optimizers_refuse(optim: Any) -> None:
    wide = torch.ones(2, dtype=torch.bfloat16).npu().requires_grad_()
    wide.grad = torch.ones_like(wide)
    with pytest.raises(TypeError, match=r"either float32 or float16, but received torch\.bfloat16"):
        optim.NpuFusedAdamW([wide]).step()
    with pytest.raises(ValueError, match="set_to_none is not supported in fused optimizers"):
        optim.NpuFusedAdamW([wide]).zero_grad(set_to_none=True)
    with pytest.raises(ValueError, match=r"Invalid beta parameter at index 1: 1\.0"):
        optim.NpuFusedAdamW([wide], betas=(0.9, 1.0))
    with pytest.raises(NotSimulatedError, match=r"torch_npu\.optim\.NpuFusedLamb"):
        _ = optim.NpuFusedLamb


def test_gradients_that_were_replaced_are_warned_of(optim: Any) -> None:
    parameter = torch.ones(2).npu().requires_grad_()
    optimizer = optim.NpuFusedAdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameter.grad = None  # freed: the next one may get its address
    parameter.grad = torch.ones_like(parameter)
    with pytest.warns(UserWarning, match="keep stepping with the old ones"):
        optimizer.step()


def test_transformers_finds_it(optim: Any) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir="unused", optim="adamw_torch_npu_fused", report_to=[])
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    assert kind is optim.NpuFusedAdamW
    assert settings["betas"] == (0.9, 0.999)
