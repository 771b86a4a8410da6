"""The acceptance run's operator cases: they hold on the simulated device, and a wrong operator is found by its name."""

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
    """In a process of their own: once this one has run a backward pass, no test after it could fork ranks that run one."""
    results = Results(folder / "operators.jsonl")

    def on_rank() -> None:
        for case in cases:
            operators.measure(case, npu, torch.device("npu", 0), results)

    run_distributed(on_rank, 1, init=False, timeout_s=300)
    return list(read_results(results.path))


class Sabotaged:
    """``torch_npu``, one operator of which is another one."""

    def __init__(self, name: str, wrong: Callable[..., Any]) -> None:
        import torch_npu

        self._real, self._name = torch_npu, name
        self._wrong = wrong(getattr(torch_npu, name)) if wrong is not None else None

    def __getattr__(self, name: str) -> Any:
        return self._wrong if name == self._name else getattr(self._real, name)


def test_every_case_holds_in_every_type(tmp_path: Path) -> None:
    import torch_npu

    cases = [case for family in FAMILIES for case in family.cases(False)]
    assert len({case.name for case in cases}) == len(cases)
    found = measure(cases, torch_npu, tmp_path)
    assert [each for each in found if each.verdict == "failed"] == []
    assert len({each.name for each in found}) == len(found)
    # Rounding alone: far from the bounds, so that those leave room for a kernel's.
    assert max(each.found / each.bound for each in found if each.verdict == "ok") < 0.25  # type: ignore[operator]


def scaled(real: Callable[..., Any]) -> Callable[..., Any]:
    """Its first result is 10 % too large."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result * 1.1
        return type(result)((result[0] * 1.1, *result[1:]))

    return wrong


def with_other(**changes: Any) -> Callable[..., Any]:
    """Called with other arguments than it was given."""
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
def test_a_wrong_operator_is_found_by_name_in_every_type(sabotage: str, tmp_path: Path) -> None:
    operator, wrong, case, where = SABOTAGES[sabotage]
    found = measure([named(case)], Sabotaged(operator, wrong), tmp_path)
    bad = [each for each in found if each.verdict == "failed"]
    for kind in ("fp32", "fp16", "bf16"):
        of_kind = [each for each in bad if f", {kind}" in each.name]
        assert of_kind, f"not found in {kind}"
        assert any(where in f"{each.name} {each.note}" for each in of_kind)
    assert all(each.name.startswith(named(case).name) for each in bad)


def test_products_in_hf32_are_seen(tmp_path: Path) -> None:
    """A float32 cut to 11 bits, as such a product does."""
    mantissa = 2.0**-11
    case = named("matmul")
    generator = torch.Generator().manual_seed(0)
    inputs = case.inputs(generator)
    cut = {
        name: value * (1 + mantissa * torch.randn(value.shape, generator=generator)) for name, value in inputs.items()
    }
    error = relative_error(case.formula(cut), case.formula(inputs))  # type: ignore[arg-type]
    assert error > BOUNDS[torch.float32]


def test_an_operator_that_this_torch_npu_lacks_is_left_out_by_name(tmp_path: Path) -> None:
    (found,) = measure([named("moe_gating")], SimpleNamespace(), tmp_path)
    assert found.verdict == "left out"
    assert "torch_npu lacks npu_moe_gating_top_k_softmax" in found.note


def test_what_is_not_a_number_or_of_another_shape_is_wrong() -> None:
    ones = torch.ones(3)
    assert relative_error(ones, ones) == 0
    for other in (torch.full((3,), float("nan")), torch.ones(4), torch.tensor([1.0, float("nan"), 1.0])):
        assert not relative_error(other, ones) <= 1e9
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0
