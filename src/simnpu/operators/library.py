"""``torch.ops.npu``: the fused operators as operators of PyTorch's dispatcher, with schemas made from their annotations.

As in torch_npu, ``torch_npu.npu_x`` is ``torch.ops.npu.npu_x``: the dispatcher checks names, kinds and types of arguments.
``scripts/npu/real_torch_npu.py`` compares the schemas with those of torch_npu's own library.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch.types import Number

from simnpu.operators.dispatch import OPERATORS

TYPES = {
    torch.Tensor: "Tensor",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    torch.SymInt: "SymInt",
    Number: "Scalar",
}


@functools.cache  # an operator can be defined once in a process
def register() -> list[torch.library.Library]:
    """Define all operators in the namespace ``npu``; they live as long as the libraries returned."""
    library = torch.library.Library("npu", "FRAGMENT")
    for name, operator in OPERATORS.items():
        library.define(schema(name, operator))
        library.impl(name, operator, "CompositeImplicitAutograd")
    return [library]


def packets() -> dict[str, Any]:
    """Return ``torch.ops.npu.<name>`` of every operator, by name: what ``torch_npu`` has under that name."""
    register()
    return {name: getattr(torch.ops.npu, name) for name in dict.fromkeys(n.partition(".")[0] for n in OPERATORS)}


def schema(name: str, function: Callable[..., Any]) -> str:
    """Build the schema of a function whose annotations are types of ``TYPES``, optional ones, or sequences of them."""
    original = inspect.unwrap(function)
    hints = typing.get_type_hints(original)
    parts, keyword_only = [], False
    for parameter in inspect.signature(original).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        part = f"{type_of(hints[parameter.name])} {parameter.name}"
        if parameter.default is not inspect.Parameter.empty:
            part += f"={default_of(parameter.default)}"
        parts.append(part)
    return f"{name}({', '.join(parts)}) -> ({', '.join(outputs(hints['return']))})"


def outputs(returned: Any) -> list[str]:
    """Format what an operator returns; an optional tensor is an undefined one to a schema."""
    if hasattr(returned, "_fields"):  # a NamedTuple names its results
        return [f"{type_of(hint)} {field}" for field, hint in typing.get_type_hints(returned).items()]
    items = typing.get_args(returned) if typing.get_origin(returned) is tuple else (returned,)
    return [type_of(item).replace("?", "") for item in items]


def type_of(hint: Any) -> str:
    """Format a type as a schema writes it: ``Tensor?`` for ``Tensor | None``, ``int[]`` for ``Sequence[int]``."""
    if hint in TYPES:
        return TYPES[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (kind,) = (kind for kind in arguments if kind is not type(None))
        return type_of(kind) + "?"
    if origin in (collections.abc.Sequence, list):
        return type_of(arguments[0]) + "[]"
    if origin is tuple:
        return f"{type_of(arguments[0])}[{len(arguments)}]"
    raise TypeError(f"{hint!r} has no type in an operator's schema")


def default_of(value: Any) -> str:
    """Format a default as a schema writes it."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(default_of, value)) + "]"
    return str(value)
