"""FusedAdam, FusedSGD and the multi-tensor functions against torch's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megascend.errors import PlatformError
from megascend.reference.te.optimizers import (
    FusedAdam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(n, 3, generator=generator).to(dtype)) for n in (4, 2)]


def run(optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Run steps with gradients that depend on the step number only."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0, "lr": 3e-3}]


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_matches_torch(decoupled: bool) -> None:
    fused, expected = parameters(), parameters()
    torch_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}
    run(FusedAdam(groups(fused), adam_w_mode=decoupled, **settings), range(12))
    run(torch_class(groups(expected), **settings), range(12))
    for a, b in zip(fused, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_step_is_counted_for_each_group_and_moments_are_fp32() -> None:
    params = parameters(torch.bfloat16)
    optimizer = FusedAdam(groups(params) + [{"params": []}], lr=1e-2)
    run(optimizer, range(3))
    assert [group["step"] for group in optimizer.param_groups] == [3, 3, 3]
    assert "step" not in optimizer.state[params[0]]
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32
    assert params[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_continues_exactly(dtype: torch.dtype) -> None:
    straight, resumed = parameters(dtype), parameters(dtype)
    reference = FusedAdam(groups(straight), lr=1e-2)
    run(reference, range(8))
    first = FusedAdam(groups(resumed), lr=1e-2)
    run(first, range(5))
    saved = first.state_dict()
    second = FusedAdam(groups(resumed), lr=1e-2)
    second.load_state_dict(saved)
    assert second.param_groups[0]["step"] == 5
    run(second, range(5, 8))
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(reference.state[straight[1]]["exp_avg_sq"], second.state[resumed[1]]["exp_avg_sq"])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("master_weights", True),
        ("use_decoupled_grad", True),
        ("capturable", True),
        ("amsgrad", True),
        ("exp_avg_dtype", torch.bfloat16),
    ],
)
def test_adam_refuses_unsupported_settings(setting: str, value: Any) -> None:
    with pytest.raises(PlatformError, match=setting):
        FusedAdam(parameters(), **{setting: value})


def test_l2norm() -> None:
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]], dtype=torch.bfloat16), torch.empty(0)]
    total, norms = multi_tensor_applier(multi_tensor_l2norm, torch.zeros(1, dtype=torch.int), [tensors], True)
    assert total.tolist() == [5.0]
    assert norms.tolist() == [3.0, 4.0, 0.0]
    assert multi_tensor_applier(multi_tensor_l2norm, None, [[]])[0].tolist() == [0.0]


def scale(sources: list[Tensor], targets: list[Tensor], factor: float) -> int:
    flag = torch.zeros(1, dtype=torch.int)
    multi_tensor_applier(multi_tensor_scale, flag, [sources, targets], factor)
    return int(flag.item())


def test_scale_in_place_and_across_dtypes() -> None:
    source = torch.tensor([1.0, -2.0])
    assert scale([source], [source], 0.5) == 0
    assert source.tolist() == [0.5, -1.0]
    target = torch.empty(2, dtype=torch.bfloat16)
    assert scale([source], [target], 4.0) == 0
    assert target.tolist() == [2.0, -4.0]


def test_scale_flags_non_finite_sources() -> None:
    target = torch.empty(2)
    assert scale([torch.tensor([1.0, math.inf])], [target], 2.0) == 1
    assert target.tolist() == [2.0, math.inf]
