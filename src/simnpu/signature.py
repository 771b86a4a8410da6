"""What the kernel of an aten operator has to know of the operator's schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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
