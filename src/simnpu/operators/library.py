"""``torch.ops.npu``: the fused operators as operators of PyTorch's dispatcher, with schemas made from their signatures.

``torch_npu.npu_x`` stays the Python function, whose errors name its arguments. What goes through the dispatcher can be
looked up (``torch.ops.npu.npu_rms_norm.default``) and kept or recomputed by a checkpointing policy.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch

from simnpu.operators.dispatch import OPERATORS

MUTATED = {
    "npu_apply_adam_w": ("out",),
    "npu_apply_fused_adamw_v2": ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "npu_apply_rotary_pos_emb": ("query", "key"),
    "npu_matmul_add_fp32": ("C",),
    "npu_groupmatmul_add_fp32": ("grad",),
}
"""Arguments that an operator writes to."""
TYPES = {
    torch.Tensor: "Tensor",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}
TENSOR_OR_LIST = {torch.Tensor, Sequence[int]}


@functools.cache  # an operator can be defined once in a process
def register() -> list[torch.library.Library]:
    """Define all operators in the namespace ``npu``; they live as long as the libraries returned."""
    library = torch.library.Library("npu", "FRAGMENT")
    for name, operator in OPERATORS.items():
        for overload, lists in (("", False), (".List", True)):
            if not lists or takes_a_list_for_a_tensor(operator):
                library.define(schema(name + overload, operator, lists))
                library.impl(name + overload, operator, "CompositeImplicitAutograd")
    return [library]


def takes_a_list_for_a_tensor(function: Callable[..., Any]) -> bool:
    """Check whether an argument may be a tensor or a list of numbers, for which a schema needs two overloads."""
    return any(set(typing.get_args(hint)) >= TENSOR_OR_LIST for hint in hints_of(function).values())


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(inspect.unwrap(function))


def schema(name: str, function: Callable[..., Any], lists: bool = False) -> str:
    """Build the schema of a function whose annotations are types of ``TYPES``, optional ones, or sequences of them.

    ``lists``: where the annotation is a tensor or a list of numbers, the list.
    """
    original, hints = inspect.unwrap(function), hints_of(function)
    parts, keyword_only = [], False
    for parameter in inspect.signature(original).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        alias = f"({chr(97 + len(parts))}!)" if parameter.name in MUTATED.get(name.partition(".")[0], ()) else ""
        part = f"{type_of(hints[parameter.name], alias, lists)} {parameter.name}"
        if parameter.default is not inspect.Parameter.empty:
            part += f"={default_of(parameter.default)}"
        parts.append(part)
    returned = hints["return"]
    items = typing.get_args(returned) if typing.get_origin(returned) is tuple else (returned,)
    outputs = [] if returned is type(None) else [type_of(item).replace("?", "") for item in items]
    return f"{name}({', '.join(parts)}) -> ({', '.join(outputs)})"


def type_of(hint: Any, alias: str = "", lists: bool = False) -> str:
    """Format a type as a schema writes it: ``Tensor?`` for ``Tensor | None``, ``int[]`` for ``Sequence[int]``."""
    if hint in TYPES:
        return TYPES[hint] + alias
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        kinds = [kind for kind in arguments if kind is not type(None)]
        if set(kinds) == {torch.dtype, int}:  # a schema's type is a number
            kinds = [int]
        if set(kinds) == TENSOR_OR_LIST:
            kinds = [Sequence[int] if lists else torch.Tensor]
        if len(kinds) == 1:
            return type_of(kinds[0], alias) + ("?" if type(None) in arguments else "")
    if origin in (collections.abc.Sequence, list):
        return type_of(arguments[0], alias) + "[]"
    raise TypeError(f"{hint!r} has no type in an operator's schema")


def default_of(value: Any) -> str:
    """Format a default as a schema writes it."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(default_of, value)) + "]"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)
