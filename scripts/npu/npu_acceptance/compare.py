"""Comparison of an operator's results with a formula in float64, and its bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from npu_acceptance.records import Measurement, at_most

Tensors = dict[str, Tensor]

BOUNDS = {torch.float32: 2e-4, torch.float16: 6e-3, torch.bfloat16: 3e-2}
"""Largest error of any element, relative to the largest element.

A result rounded once is off by up to 6e-8, 5e-4 and 4e-3. Kernels round in between (the probabilities of attention, for
one), and the sums' order is theirs; a wrong mask, scale or index is off by 0.1 and more. For float32 the bound is that of
a sum in float32; products in HF32, which keeps 11 bits, are off by about 1e-3 and must be seen.
"""
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Case:
    """One call of an operator, and the formula that it must equal.

    Attributes:
        inputs: from a random generator, tensors in float64, and whatever else the call needs.
        operator: the call, from ``torch_npu`` and the tensors on the device; a result, or several by name.
        formula: the same in plain PyTorch on the CPU, in float64.
        needs: names in ``torch_npu`` without which the case is left out; megascend does not call those.
        leaves: names of the inputs whose gradients are compared too.
    """

    name: str
    inputs: Callable[[torch.Generator], Tensors]
    operator: Callable[[Any, Tensors], Tensor | Tensors]
    formula: Callable[[Tensors], Tensor | Tensors]
    needs: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = field(default=tuple(BOUNDS))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of any element, relative to the largest element of ``expected``; NaN if any is."""
    actual, expected = actual.detach().to("cpu", torch.float64), expected.detach().to(torch.float64)
    if actual.shape != expected.shape:
        return float("nan")
    if not expected.numel():
        return 0.0
    largest = expected.abs().max().item()
    difference = (actual - expected).abs().max().item()
    return difference / largest if largest else difference


def run_case(case: Case, dtype: torch.dtype, npu: Any, device: torch.device) -> Iterator[Measurement]:
    """Compare the results of one case in one type, then the gradients of its leaves."""
    generator = torch.Generator().manual_seed(20_26)
    # Rounded first: both sides start from the same numbers.
    rounded = {name: round_to(value, dtype) for name, value in case.inputs(generator).items()}
    on_device = {name: value.to(device) for name, value in rounded.items()}
    wide = {name: value.double() if value.is_floating_point() else value for name, value in rounded.items()}
    for name in case.leaves:
        on_device[name].requires_grad_()
        wide[name].requires_grad_()
    actual, expected = by_name(case.operator(npu, on_device)), by_name(case.formula(wide))
    for name, value in expected.items():
        yield compare_tensors(f"{case.name}, {NAMES[dtype]}, {name}", actual[name], value, dtype)
    if not case.leaves:
        return
    outputs = [(actual[name], value) for name, value in expected.items() if value.requires_grad]
    weights = [
        round_to(torch.randn(value.shape, generator=generator, dtype=torch.float64), dtype) for _, value in outputs
    ]
    torch.autograd.backward([output for output, _ in outputs], [weight.to(device) for weight in weights])
    torch.autograd.backward([reference for _, reference in outputs], [weight.double() for weight in weights])
    for name in case.leaves:
        yield compare_tensors(
            f"{case.name}, {NAMES[dtype]}, gradient of {name}", on_device[name].grad, wide[name].grad, dtype
        )


def compare_tensors(name: str, actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> Measurement:
    """Compare one result with the formula's."""
    if actual is None or expected is None:
        return Measurement(name, "failed", note="the gradient is missing")
    shapes = "" if actual.shape == expected.shape else f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    return at_most(name, relative_error(actual, expected), BOUNDS[dtype], note=shapes)


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``value`` to ``dtype`` if it is a float."""
    return value.to(dtype) if value.is_floating_point() else value


def by_name(result: Tensor | Mapping[str, Tensor]) -> Tensors:
    """Return results by name; a single tensor is called "result"."""
    return {"result": result} if isinstance(result, Tensor) else dict(result)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw standard normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
