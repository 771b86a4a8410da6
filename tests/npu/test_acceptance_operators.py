"""The acceptance run's operator cases: they pass on the simulated device, and a wrong operator fails by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import simnpu
from megascend.testing import run_distributed
from npu_acceptance import attention, dense, experts, operators
from npu_acceptance.compare import Case
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


SABOTAGES = {
    "a norm with another epsilon": ("npu_rms_norm", with_other(epsilon=0.5), "rms_norm [16", "result"),
    "a gradient that is zero": ("npu_swiglu", without_gradient, "swiglu", "gradient of x"),
    "attention that ignores the mask": ("npu_fusion_attention", with_other(atten_mask=None),
                                        "fusion_attention SBH mode 2, triangle mask, 128", "attention"),
    "samples that see each other": ("npu_fusion_attention", with_other(actual_seq_qlen=[192], actual_seq_kvlen=[192]),
                                    "fusion_attention TND mode 2", "result"),
    "a gradient operator": ("npu_fusion_attention_grad", scaled, "fusion_attention_grad SBH mode 3",
                            "gradient of query"),
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
