"""How an aten operator runs on the simulated device: CPU views of its arguments, the CPU's kernel, npu views back.

One kernel is made for each operator from its schema, at its first call, out of layers of which most operators need only
the first two: arguments to the CPU, results back; ``out=``; random numbers from the npu's generator; a factory's device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascend.simnpu.memory import CPU, CPU_KEY, cpu_view, npu_view
from megascend.simnpu.random import generator, with_npu_random_state

Kernel = Callable[..., Any]

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


@dataclass(frozen=True)
class Signature:
    """What a kernel has to know of its operator's schema. Arguments are named by position or, keyword-only, by name."""

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
    def of(cls, op: Any) -> Signature:
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

    def given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of the argument ``name`` in a call, None if left out."""
        index = self.position[name]
        return args[index] if index < len(args) else kwargs.get(name)


def kernel_for(op: Any) -> Kernel:
    """The npu kernel of one operator (an ``OpOverload``)."""
    signature = Signature.of(op)
    run = arguments_to_cpu(signature, cpu_kernel(op), name_of(op) in CPU_ARGUMENTS)
    if signature.takes_generator:
        run = npu_generator(signature, run)
    elif signature.draws:
        run = functools.partial(with_npu_random_state, run)
    if signature.outs:
        return results_to_outs(signature, run)
    kernel = results_to_npu(signature, run)
    return result_on_given_device(op, run, kernel) if signature.is_factory else kernel


def arguments_to_cpu(signature: Signature, run: Kernel, mixed: bool) -> Kernel:
    """Call ``run`` with npu tensors replaced by their CPU views.

    Args:
        mixed: let CPU tensors of any shape through, not only scalars.
    """
    tensors, lists = signature.tensors, signature.lists

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given, count = list(args), len(args)
        for i in tensors:
            if i < count and isinstance(given[i], Tensor):  # None, and Python numbers, come as they are
                given[i] = to_cpu(given[i], mixed)
        for i in lists:
            if i < count and given[i] is not None:
                given[i] = [None if t is None else to_cpu(t, mixed) for t in given[i]]
        for name, value in kwargs.items():
            if name in signature.tensor_names and isinstance(value, Tensor):
                kwargs[name] = to_cpu(value, mixed)
            elif name in signature.list_names and value is not None:
                kwargs[name] = [None if t is None else to_cpu(t, mixed) for t in value]
        return run(*given, **kwargs)

    return kernel


def results_to_npu(signature: Signature, run: Kernel) -> Kernel:
    """New tensors as npu tensors; for what was written in place, the caller's own tensor."""
    returned = signature.returned
    if not returned:
        return run
    if returned == (None,):
        return lambda *args, **kwargs: to_npu(run(*args, **kwargs))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = dict(kwargs)  # before run() replaces its tensors
        result = run(*args, **kwargs)
        results = (result,) if len(returned) == 1 else result
        mine = tuple(
            to_npu(value) if source is None else signature.given(source, args, given)
            for value, source in zip(results, returned, strict=True)
        )
        return mine[0] if len(returned) == 1 else mine

    return kernel


def results_to_outs(signature: Signature, run: Kernel) -> Kernel:
    """``out=``: write through a CPU view; a tensor without elements may grow, and takes the result's shape."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        outs = [kwargs[name] for name in signature.outs]
        written = [_writable(out) for out in outs]
        run(*args, **{**kwargs, **dict(zip(signature.outs, written, strict=True))})
        for out, result in zip(outs, written, strict=True):
            if out.shape != result.shape:
                out.resize_(result.shape)
                if out.data_ptr() != result.data_ptr():
                    cpu_view(out).copy_(result)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return kernel


def npu_generator(signature: Signature, run: Kernel) -> Kernel:
    """Draw from the npu's generator unless the caller brings one."""
    index = signature.position["generator"]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if signature.given("generator", args, kwargs) is None:
            if index < len(args):
                args = (*args[:index], generator(), *args[index + 1 :])
            else:
                kwargs["generator"] = generator()
        return run(*args, **kwargs)

    return kernel


def result_on_given_device(op: Any, run: Kernel, kernel: Kernel) -> Kernel:
    """A factory: ``torch.zeros_like(on_npu, device="cpu")`` is not an npu tensor."""

    def factory(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or device.type == "npu":
            kwargs["device"] = CPU
            return kernel(*args, **kwargs)
        if device.type == "cpu":
            kwargs.pop("pin_memory", None)
            return run(*args, **kwargs)
        return op(*(a.to(device) if isinstance(a, Tensor) else a for a in args), **kwargs)

    return factory


def cpu_kernel(op: Any) -> Kernel:
    """The CPU's own kernel without the dispatcher's way to it; for a composite, which has none, the operator."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"):
        return functools.partial(op._op_dk, CPU_KEY)
    return op


def name_of(op: Any) -> str:
    """``aten::add.Tensor``; without a suffix for the default overload."""
    return op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")


def to_cpu(tensor: Tensor, mixed: bool) -> Tensor:
    """An argument as the CPU's kernel takes it. Of CPU tensors only scalars may be mixed in, as on every device."""
    if not tensor.is_cpu:
        if tensor.device.type != "npu":
            raise _two_devices(tensor)
        return cpu_view(tensor)
    if tensor.dim() and not mixed:
        raise _two_devices(tensor)
    return tensor


def to_npu(value: Any) -> Any:
    """Results as npu tensors; numbers and None as they are."""
    if isinstance(value, Tensor):
        return npu_view(value)
    if isinstance(value, list | tuple):
        return type(value)(to_npu(item) for item in value)
    return value


def _two_devices(tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, npu:0 and {tensor.device}!"
    )


def _writable(out: Tensor) -> Tensor:
    if out.device.type != "npu":
        raise _two_devices(out)
    return cpu_view(out) if out.numel() else torch.empty_strided(out.shape, out.stride(), dtype=out.dtype)


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
