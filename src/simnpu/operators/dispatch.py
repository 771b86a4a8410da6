"""How a call of a fused operator goes: log it, see that its tensors are where they should be, compute, wrap up.

The kernels of this folder see CPU tensors: an NPU tensor is a view of CPU memory here, and one operator on views costs
one crossing where the same formula on NPU tensors would cost one for each of its steps.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from simnpu.call_log import LOG
from simnpu.operators import limits

OPERATORS: dict[str, Callable[..., Any]] = {}
"""Every operator by its name in ``torch_npu`` and, after a dot, its overload; filled by :func:`operator`."""

F = TypeVar("F", bound=Callable[..., Any])


def operator(function: F) -> F:
    """Register ``function`` as ``torch_npu.<its name>``, with the schema that its annotations make."""
    return overload(function.__name__)(function)


def overload(name: str) -> Callable[[F], F]:
    """Register a function as an operator's overload, such as ``npu_grouped_matmul.List``."""

    def register(function: F) -> F:
        OPERATORS[name] = call = logged(name.partition(".")[0], function)
        return call

    return register


def extension(function: F) -> F:
    """Log and check calls of an operator that MindSpeed compiles: torch_npu has none of this name."""
    return logged(function.__name__, function)


def logged(name: str, function: F) -> F:
    """Return ``function`` with its calls logged as ``name`` and their tensors' devices checked."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        LOG.add(name, bound.arguments)
        check_devices(name, bound.arguments.values())
        limits.check(name, bound.arguments)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors among ``values`` and in the lists among them."""
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors.extend(item for item in value if isinstance(item, torch.Tensor))
    return tensors


def check_devices(name: str, values: Any) -> None:
    """Refuse tensors of several devices, and CPU tensors while the simulated device is active."""
    devices = sorted({str(tensor.device) for tensor in tensors_in(values)})
    if len(devices) > 1:
        raise RuntimeError(
            f"torch_npu.{name}: Expected all tensors to be on the same device, but found at least two devices, "
            f"{devices[0]} and {devices[1]}!"
        )
    if devices and not devices[0].startswith("npu") and "torch_npu" in sys.modules:
        raise NotImplementedError(
            f"Could not run 'npu::{name}' with arguments from the '{devices[0]}' device: move them to 'npu'"
        )


def to_host(value: Any) -> Any:
    """``value`` with NPU tensors (alone or in a list) as CPU views, detached from autograd."""
    if isinstance(value, torch.Tensor):
        return cpu_view(value.detach()) if value.device.type == "npu" else value.detach()
    if isinstance(value, (list, tuple)):
        return type(value)(to_host(item) for item in value)
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with CPU tensors (alone or in a list) as NPU views, if ``device`` is an NPU."""
    if isinstance(value, torch.Tensor):
        return npu_view(value, device.index) if device.type == "npu" else value
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    return value


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    from simnpu import device, races  # late: formulas can be tested where the device cannot be registered

    return device.cpu_view(races.fused_argument(tensor))


def npu_view(tensor: torch.Tensor, index: int | None) -> torch.Tensor:
    from simnpu import device, races

    return races.fused_result(device.npu_view(tensor, index))


def written_in_place(args: Any) -> None:
    from simnpu import races

    for tensor in tensors_in(args):
        races.fused_result(tensor)


def random_generator() -> torch.Generator:
    """Return the generator of the device's random numbers."""
    from simnpu import random

    return random.generator()


def device_of(values: Any) -> torch.device:
    """Return the device of the first tensor among ``values``."""
    return tensors_in(values)[0].device


def on_host(formula: Callable[..., Any]) -> Callable[..., Any]:
    """``formula`` on CPU tensors, callable with tensors of any device and not differentiable.

    Tensors that it returns unchanged come back as the caller's own, so in-place kernels keep identity.
    """

    @functools.wraps(formula)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = device_of((*args, *kwargs.values()))
        with torch.no_grad():
            result = formula(*map(to_host, args), **{key: to_host(value) for key, value in kwargs.items()})
        if not tensors_in([result]):
            written_in_place(args)
        return to_device(result, device)

    return call


def differentiable(formula: Callable[..., Any]) -> Callable[..., Any]:
    """``formula`` on CPU tensors as one node of the autograd graph, callable with tensors of any device.

    Backward evaluates the formula again on leaves and differentiates it, so that one formula states both directions.
    Floating-point tensors, alone or in lists, get gradients; keyword arguments never do.
    """

    @functools.wraps(formula)
    def call(*args: Any, **kwargs: Any) -> Any:
        flat, rebuild = flatten(args)
        single = [True]

        def run(*values: Any) -> tuple[torch.Tensor, ...]:
            result = formula(*rebuild(values), **{key: to_host(value) for key, value in kwargs.items()})
            single[0] = isinstance(result, torch.Tensor)
            return (result,) if single[0] else tuple(result)

        results = Formula.apply(run, *flat)
        return results[0] if single[0] else results

    return call


def flatten(args: tuple[Any, ...]) -> tuple[list[Any], Callable[[tuple[Any, ...]], list[Any]]]:
    """Return the arguments with lists spread out, as autograd sees only top-level tensors, and the inverse function."""
    lengths = [len(arg) if isinstance(arg, (list, tuple)) else None for arg in args]
    flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else [arg])]

    def rebuild(values: tuple[Any, ...]) -> list[Any]:
        items = iter(values)
        return [next(items) if n is None else [next(items) for _ in range(n)] for n in lengths]

    return flat, rebuild


class Formula(torch.autograd.Function):
    """Evaluates a formula on the host; see :func:`differentiable`."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *args: Any) -> Any:
        ctx.run = run
        ctx.constants = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.places = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        results = to_device(run(*map(to_host, args)), device_of(args))
        ctx.mark_non_differentiable(*(t for t in results if not t.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        values, leaves = list(ctx.constants), {}
        device = ctx.saved_tensors[0].device
        for index, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            values[index] = to_host(tensor)
            if ctx.needs_input_grad[index + 1] and tensor.is_floating_point():
                leaves[index] = values[index] = values[index].requires_grad_()
        with torch.enable_grad():
            results = ctx.run(*values)
        used = [(r, to_host(g)) for r, g in zip(results, gradients, strict=True) if g is not None and r.requires_grad]
        outputs, output_gradients = zip(*used, strict=True) if used else ((), ())
        input_gradients = torch.autograd.grad(outputs, list(leaves.values()), output_gradients, allow_unused=True)
        by_place = dict(zip(leaves, input_gradients, strict=True))
        return None, *(
            None if by_place.get(index) is None else to_device(by_place[index], device) for index in range(len(values))
        )
