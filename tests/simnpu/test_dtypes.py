"""Types of PyTorch's operators that torch_npu lists for a 910B: a warning once, an error in strict mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from simnpu import dtypes
from simnpu.settings import STRICT_VARIABLE

pytestmark = pytest.mark.usefixtures("registered")
OUTSIDE = {
    "native_layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "gelu": functional.gelu,
    "convolution_overrideable": lambda x: functional.conv1d(x[None], x[:, :, None]),
    "cumsum": lambda x: x.cumsum(0),
    "_log_softmax": lambda x: x.log_softmax(-1),
    "sort.stable": lambda x: x.sort(),
}


@pytest.fixture
def matrix() -> Tensor:
    return torch.ones(4, 4, dtype=torch.float64, device="npu")


@pytest.mark.parametrize("name", OUTSIDE)
def test_strict_mode_refuses_what_is_not_listed(name: str, matrix: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    with pytest.raises(RuntimeError, match=rf"aten::{name} of torch\.float64 is not among the types"):
        OUTSIDE[name](matrix)
    OUTSIDE[name](matrix.float())


@pytest.mark.parametrize(
    "call", [lambda x: x + x, lambda x: x.softmax(-1), lambda x: x.topk(2), torch.erf, lambda x: x.t().contiguous()]
)
def test_strict_mode_takes_what_is_listed(
    call: Callable[[Tensor], Any], matrix: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    call(matrix)


def test_a_card_has_no_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    with pytest.raises(RuntimeError, match=r"aten::_to_copy of torch\.float8_e4m3fn"):
        torch.ones(4, device="npu").to(torch.float8_e4m3fn)


def test_a_warning_comes_once_for_an_operator_and_a_type(matrix: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "_reported", set())
    with pytest.warns(RuntimeWarning, match=r"aten::gelu of torch\.float64 .*SIMNPU_STRICT=1 refuses it"):
        functional.gelu(matrix)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functional.gelu(matrix)


def test_bfloat16_counts_where_float16_does() -> None:
    for types in dtypes.by_operator().values():
        assert (torch.bfloat16 in types) >= (torch.float16 in types)
