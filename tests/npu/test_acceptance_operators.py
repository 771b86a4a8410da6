"""The acceptance run's operator cases: they pass on the simulated device, and a wrong operator fails by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import simnpu
from megascend.testing import run_distributed
from npu_acceptance import attention, dense, experts, operators
from npu_acceptance.compare import BOUNDS, Case, relative_error
from npu_acceptance.records import Measurement, Results, read_results


@pytest.fixture(scope="module", autouse=True)
def sim_npu() -> None:
    simnpu.activate()


FAMILIES = (dense, experts, attention)


def named(name: str) -> Case:
    (case,) = [case for family in FAMILIES for case in family.cases(False) if case.name.startswith(name)]
    return case


def measure(cases: list[Case], npu: Any, folder: Path) -> list[Measurement]:
    """Measure in a separate process: after a backward pass in this one, later tests could not fork ranks that run one."""
    results = Results(folder / "operators.jsonl")

    def on_rank() -> None:
        for case in cases:
            operators.measure(case, npu, torch.device("npu", 0), results)

    run_distributed(on_rank, 1, init=False, timeout_s=300)
    return list(read_results(results.path))


class Sabotaged:
    """``torch_npu`` with one operator replaced."""

    def __init__(self, name: str, replacement: Callable[..., Any]) -> None:
        import torch_npu

        self._real, self._name = torch_npu, name
        self._wrong = replacement(getattr(torch_npu, name)) if replacement is not None else None

    def __getattr__(self, name: str) -> Any:
        return self._wrong if name == self._name else getattr(self._real, name)


def test_every_case_passes_in_every_dtype(tmp_path: Path) -> None:
    import torch_npu

    cases = [case for family in FAMILIES for case in family.cases(False)]
    assert len({case.name for case in cases}) == len(cases)
    measurements = measure(cases, torch_npu, tmp_path)
    assert [result for result in measurements if result.verdict == "failed"] == []
    assert len({result.name for result in measurements}) == len(measurements)
    # Only rounding: far below the bounds, which leave room for the error of a kernel.
    assert max(result.found / result.bound for result in measurements if result.verdict == "ok") < 0.25  # type: ignore[operator]


def scaled(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator to return a first result that is 10 % too large."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result * 1.1
        return type(result)((result[0] * 1.1, *result[1:]))

    return wrong


def with_other(**changes: Any) -> Callable[..., Any]:
    """Return a wrapper that changes arguments of an operator."""
    return lambda real: lambda *args, **kwargs: real(*args, **kwargs | changes)


def without_gradient(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, **kwargs: real(x, **kwargs).detach() + 0 * x[..., ::2]


def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("aclnnRmsNorm failed, error code is 561002\nand more of it")

    return refuse


SABOTAGES = {
    "a norm with another epsilon": ("npu_rms_norm", with_other(epsilon=0.5), "rms_norm [16", "result"),
    "a norm that fails": ("npu_rms_norm", refusing, "rms_norm [16", "error code is 561002"),
    "the wrong half of a rotation": ("npu_rotary_mul", lambda real: lambda x, cos, sin: real(x, sin, cos),
                                     "rotary_mul half", "result"),
    "a gradient that is zero": ("npu_swiglu", without_gradient, "swiglu", "gradient of x"),
    "attention that ignores the mask": ("npu_fusion_attention", with_other(atten_mask=None),
                                        "fusion_attention SBH mode 2, triangle mask, 128", "attention"),
    "attention of the wrong mode": ("npu_fusion_attention", with_other(sparse_mode=2),
                                    "fusion_attention SBH mode 3, triangle mask, 96 x 160", "attention"),
    "attention of another scale": ("npu_fusion_attention", with_other(scale=0.2),
                                   "fusion_attention BNSD mode 0, none", "log sum"),
    "samples that see each other": ("npu_fusion_attention", with_other(actual_seq_qlen=[192], actual_seq_kvlen=[192]),
                                    "fusion_attention TND mode 2", "result"),
    "a gradient operator": ("npu_fusion_attention_grad", scaled, "fusion_attention_grad SBH mode 3",
                            "gradient of query"),
    "groups in another order": ("npu_grouped_matmul",
                                lambda real: lambda x, w, **kwargs: real(x, [w[0].flip(0).contiguous()], **kwargs),
                                "grouped_matmul by rows, one weight", "result"),
    "a token's weight": ("npu_moe_token_unpermute", scaled, "moe_token_permute and unpermute", "back"),
    "an operator that is gone": ("npu_swiglu", None, "swiglu", "not callable"),
}  # fmt: skip


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_wrong_operator_fails_by_name_in_every_dtype(sabotage: str, tmp_path: Path) -> None:
    operator, wrong, case, part = SABOTAGES[sabotage]
    measurements = measure([named(case)], Sabotaged(operator, wrong), tmp_path)
    failed = [result for result in measurements if result.verdict == "failed"]
    for kind in ("fp32", "fp16", "bf16"):
        failures_of_kind = [result for result in failed if f", {kind}" in result.name]
        assert failures_of_kind, f"not found in {kind}"
        assert any(part in f"{result.name} {result.note}" for result in failures_of_kind)
    assert all(result.name.startswith(named(case).name) for result in failed)


def test_hf32_products_exceed_the_bound(tmp_path: Path) -> None:
    """Round float32 inputs to 11 bits, as such a product does."""
    mantissa = 2.0**-11
    case = named("matmul")
    generator = torch.Generator().manual_seed(0)
    inputs = case.inputs(generator)
    cut = {
        name: value * (1 + mantissa * torch.randn(value.shape, generator=generator)) for name, value in inputs.items()
    }
    error = relative_error(case.formula(cut), case.formula(inputs))  # type: ignore[arg-type]
    assert error > BOUNDS[torch.float32]


def test_missing_operator_is_left_out_by_name(tmp_path: Path) -> None:
    (measurement,) = measure([named("moe_gating")], SimpleNamespace(), tmp_path)
    assert measurement.verdict == "left out"
    assert "torch_npu lacks npu_moe_gating_top_k_softmax" in measurement.note


def test_nan_and_other_shapes_are_errors() -> None:
    expected = torch.ones(3)
    assert relative_error(expected, expected) == 0
    for other in (torch.full((3,), float("nan")), torch.ones(4), torch.tensor([1.0, float("nan"), 1.0])):
        assert not relative_error(other, expected) <= 1e9
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0
