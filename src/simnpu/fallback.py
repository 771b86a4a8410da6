"""How an aten operator runs on the simulated device: CPU views of its arguments, the CPU's kernel, npu views back.

One kernel is made for each operator from its schema, at its first call: arguments to the CPU, all from one device; the
call, drawing random numbers from that device's generator; results back, or into ``out=``, or to a factory's device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simnpu.memory import CPU, CPU_KEY, cpu_view, npu_view
from simnpu.random import generator, with_npu_random_state
from simnpu.visible import index_of


@dataclass(frozen=True)
class Signature:
    """Arguments are named by position or, keyword-only, by name."""

    tensors: tuple[int, ...]
    lists: tuple[int, ...]
    tensor_names: frozenset[str]
    list_names: frozenset[str]
    outs: tuple[str, ...]  # keyword-only arguments that are written to
    returned: tuple[str | None, ...]  # for each result: the argument that it is, or None for a new tensor
    position: dict[str, int]
    takes_generator: bool
    draws: bool  # random numbers
    is_factory: bool

    @classmethod
    def from_operator(cls, op: Any) -> Signature:
        arguments = op._schema.arguments
        position = {argument.name: i for i, argument in enumerate(arguments)}
        tensors = tuple(i for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]"))
        lists = tuple(i for i, a in enumerate(arguments) if _is_tensor_list(str(a.type)))
        outs = tuple(arguments[i].name for i in tensors if arguments[i].kwarg_only and _is_written(arguments[i]))
        return cls(
            tensors=tensors,
            lists=lists,
            tensor_names=frozenset(arguments[i].name for i in tensors).difference(outs),
            list_names=frozenset(arguments[i].name for i in lists),
            outs=outs,
            returned=tuple(_argument_returned(result, arguments) for result in op._schema.returns),
            position=position,
            takes_generator="generator" in position,
            draws=torch.Tag.nondeterministic_seeded in op.tags,
            is_factory="device" in position and "layout" in position,
        )

    def argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value of the argument ``name`` in a call, None if left out."""
        index = self.position[name]
        return args[index] if index < len(args) else kwargs.get(name)


def _is_tensor_list(type_: str) -> bool:
    return type_.replace("Optional[", "").replace("]", "") == "List[Tensor"


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _argument_returned(result: Any, arguments: Any) -> str | None:
    if result.alias_info is None:
        return None
    for argument in arguments:
        if argument.alias_info and argument.alias_info.before_set == result.alias_info.before_set:
            return argument.name
    return None


Kernel = Callable[..., Any]
Crossing = Callable[[tuple[Any, ...], dict[str, Any]], tuple[list[Any], int]]  # arguments -> on the CPU, device index
Call = Callable[[int, list[Any], dict[str, Any]], Any]  # device index, arguments on the CPU -> results there
NOWHERE = -1  # the device index of a call without npu tensors

CPU_ARGUMENTS = {
    "aten::index.Tensor",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor",
    "aten::_unsafe_index_put",
    "aten::_pack_padded_sequence",
}
"""Operators that take CPU tensors (indices, lengths) beside device tensors, on every device."""


NUMBERS = (int, float, complex)  # a bool is an int


def kernel_for(op: Any) -> Kernel:
    """Build the npu kernel of one operator (an ``OpOverload``)."""
    signature = Signature.from_operator(op)
    run = taking_numbers(op, signature, cpu_kernel(op))
    if op._schema.name.startswith("aten::_foreach_"):
        return foreach(op, signature, run)
    crossing = to_cpu(signature, name_of(op) in CPU_ARGUMENTS)
    if signature.takes_generator:
        call = npu_generator(signature, run)
    elif signature.draws:
        call = lambda index, args, kwargs: with_npu_random_state(index, lambda: run(*args, **kwargs))  # noqa: E731
    elif signature.is_factory or signature.outs or signature.returned != (None,):
        call = lambda index, args, kwargs: run(*args, **kwargs)  # noqa: E731
    else:
        return one_new_tensor(crossing, run)
    if signature.outs:
        return results_to_outs(signature, crossing, call)
    if signature.is_factory:
        return factory(op, crossing, call)
    return results_to_npu(signature, crossing, call)


def to_cpu(signature: Signature, mixed: bool) -> Crossing:
    """Build the function that replaces a call's npu tensors by CPU views and returns the device's index.

    Args:
        signature: signature of the operator.
        mixed: let CPU tensors of any shape through, not only scalars.
    """
    tensors, lists = signature.tensors, signature.lists

    def crossing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], int]:
        index = NOWHERE

        def view(tensor: Tensor) -> Tensor:
            nonlocal index
            device = tensor.get_device()
            if device != index:
                if device < 0:
                    if tensor.is_cpu and (mixed or not tensor.dim()):
                        return tensor
                    raise two_devices(args, kwargs)
                if index >= 0:
                    raise two_devices(args, kwargs)
                index = device
            return cpu_view(tensor)

        cpu_args, count = list(args), len(args)
        for i in tensors:
            if i < count and isinstance(cpu_args[i], Tensor):  # None, and Python numbers, come as they are
                cpu_args[i] = view(cpu_args[i])
        for i in lists:
            if i < count and cpu_args[i] is not None:
                cpu_args[i] = [None if t is None else view(t) for t in cpu_args[i]]
        if kwargs:
            for name, value in kwargs.items():
                if name in signature.tensor_names and isinstance(value, Tensor):
                    kwargs[name] = view(value)
                elif name in signature.list_names and value is not None:
                    kwargs[name] = [None if t is None else view(t) for t in value]
        return cpu_args, index

    return crossing


def one_new_tensor(crossing: Crossing, run: Kernel) -> Kernel:
    """Build the kernel of an operator that returns one new tensor, as most do."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        cpu_args, index = crossing(args, kwargs)
        return to_npu(run(*cpu_args, **kwargs), index)

    return kernel


def results_to_npu(signature: Signature, crossing: Crossing, call: Call) -> Kernel:
    """Build a kernel that returns new tensors as npu tensors and, for arguments written in place, the caller's own."""
    returned = signature.returned

    def kernel(*args: Any, **kwargs: Any) -> Any:
        original = dict(kwargs)  # before its tensors are replaced
        cpu_args, index = crossing(args, kwargs)
        result = call(index, cpu_args, kwargs)
        if not returned:
            return result
        results = (result,) if len(returned) == 1 else result
        outputs = tuple(
            to_npu(value, index) if source is None else signature.argument(source, args, original)
            for value, source in zip(results, returned, strict=True)
        )
        return outputs[0] if len(returned) == 1 else outputs

    return kernel


def results_to_outs(signature: Signature, crossing: Crossing, call: Call) -> Kernel:
    """``out=``: write through a CPU view; a tensor without elements may grow, and takes the result's shape."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        outs = [kwargs[name] for name in signature.outs]
        if len({out.device for out in outs}) > 1 or not outs[0].get_device() >= 0:
            raise two_devices(args, kwargs)
        original = dict(kwargs)
        cpu_args, index = crossing(args, kwargs)
        if index not in (NOWHERE, outs[0].get_device()):
            raise two_devices(args, original)
        cpu_outs = [_writable(out) for out in outs]
        call(outs[0].get_device(), cpu_args, {**kwargs, **dict(zip(signature.outs, cpu_outs, strict=True))})
        for out, result in zip(outs, cpu_outs, strict=True):
            if out.shape != result.shape:
                out.resize_(result.shape)
                if out.data_ptr() != result.data_ptr():
                    cpu_view(out).copy_(result)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return kernel


def foreach(op: Any, signature: Signature, run: Kernel) -> Kernel:
    """Build the kernel of an operator over lists; items may be on several devices, those at the same position on one."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        rows = [args[i] for i in signature.lists if i < len(args)]
        rows += [value for name, value in kwargs.items() if name in signature.list_names]
        indices = [tensor.get_device() for tensor in rows[0]]
        for row in rows[1:] if "copy" not in op._schema.name else []:
            for tensor, index in zip(row, indices, strict=False):  # lengths are for the CPU's kernel to check
                if tensor.get_device() != index and tensor.dim():
                    raise two_devices(args, kwargs)
        cpu_args = [_cpu_views(arg) for arg in args]
        result = run(*cpu_args, **{name: _cpu_views(value) for name, value in kwargs.items()})
        return back(result, indices)

    def back(result: Any, indices: list[int]) -> Any:
        if isinstance(result, tuple):
            return tuple(back(part, indices) for part in result)
        return result and [npu_view(t, index) if index >= 0 else t for t, index in zip(result, indices, strict=True)]

    return kernel


def npu_generator(signature: Signature, run: Kernel) -> Call:
    """Draw from the device's generator unless the caller brings one."""
    generator_position = signature.position["generator"]

    def call(index: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if signature.argument("generator", tuple(args), kwargs) is None:
            device_generator = generator(index if index >= 0 else None)
            if generator_position < len(args):
                args[generator_position] = device_generator
            else:
                kwargs["generator"] = device_generator
        return run(*args, **kwargs)

    return call


def factory(op: Any, crossing: Crossing, call: Call) -> Kernel:
    """Build the kernel of an operator with a device argument: ``torch.zeros_like(on_npu, device="cpu")`` is not an npu tensor."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and device.type not in ("npu", "cpu"):
            return op(*(a.to(device) if isinstance(a, Tensor) else a for a in args), **kwargs)
        cpu_args, index = crossing(args, kwargs)
        if device is not None and device.type == "cpu":
            kwargs.pop("pin_memory", None)
            return call(index, cpu_args, kwargs)
        if device is not None or index < 0:
            index = index_of(device)
        kwargs["device"] = CPU
        return to_npu(call(index, cpu_args, kwargs), index)

    return kernel


def cpu_kernel(op: Any) -> Kernel:
    """Return the CPU's own kernel without the dispatcher's way to it; for a composite, which has none, the operator."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"):
        return functools.partial(op._op_dk, CPU_KEY)
    return op


def taking_numbers(op: Any, signature: Signature, run: Kernel) -> Kernel:
    """Turn Python numbers in the place of tensors into tensors: torch's bindings take them for a few operators only.

    ``tensor % 3`` calls ``remainder.Tensor``, and a kernel in Python gets the number itself.
    """
    places = [i for i in signature.tensors if i > 0]
    if not places or torch._C._should_allow_numbers_as_tensors(op._schema.name.removeprefix("aten::")):
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        count = len(args)
        if any(i < count and isinstance(args[i], NUMBERS) for i in places):
            args = tuple(torch.tensor(a) if i in places and isinstance(a, NUMBERS) else a for i, a in enumerate(args))
        return run(*args, **kwargs)

    return call


def name_of(op: Any) -> str:
    """``aten::add.Tensor``; without a suffix for the default overload."""
    return op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")


def arguments_to_cpu(args: tuple[Any, ...]) -> tuple[list[Any], int]:
    """Return the positional arguments of a call with CPU views for npu tensors, which must share a device, and its index."""
    indices = {arg.get_device() for arg in args if isinstance(arg, Tensor)}
    if len(indices) > 1:
        raise two_devices(args, {})
    return [cpu_view(arg) if isinstance(arg, Tensor) else arg for arg in args], indices.pop()


def to_npu(value: Any, index: int) -> Any:
    """Return results as tensors of the npu of this index; numbers and None as they are."""
    if isinstance(value, Tensor):
        return npu_view(value, index)
    if isinstance(value, list | tuple):
        return type(value)(to_npu(item, index) for item in value)
    return value


def two_devices(args: Any, kwargs: dict[str, Any]) -> RuntimeError:
    """Build the error for tensors of several devices among the arguments of a call, in PyTorch's words."""
    values = [*args, *kwargs.values()]
    tensors = [t for v in values for t in (v if isinstance(v, list | tuple) else [v]) if isinstance(t, Tensor)]
    devices = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
    pair = sorted(devices, key=lambda name: not name.startswith("npu"))[:2]
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(pair)}!"
    )


def _cpu_views(value: Any) -> Any:
    if isinstance(value, Tensor):
        return cpu_view(value) if value.get_device() >= 0 else value
    return [_cpu_views(item) for item in value] if isinstance(value, list | tuple) else value


def _writable(out: Tensor) -> Tensor:
    return cpu_view(out) if out.numel() else torch.empty_strided(out.shape, out.stride(), dtype=out.dtype)
