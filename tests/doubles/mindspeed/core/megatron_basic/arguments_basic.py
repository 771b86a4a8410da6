"""How runtime arguments reach ``TransformerConfig``: at construction, or when it is subclassed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed.args_utils import get_full_args
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager


def transformer_config_init_wrapper(fn: Callable[..., None]) -> Callable[..., None]:
    """Runtime arguments that are fields become arguments of the constructor, the others attributes.

    The instance gets a class of its own, made here: neither pickle nor ``dataclasses.replace`` can make it again.
    """

    @wraps(fn)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        accepted = inspect.signature(type(self)).parameters
        given = vars(get_full_args()) | kwargs
        fields = {name: value for name, value in given.items() if name in accepted}
        extra = {name: value for name, value in given.items() if name not in accepted and not hasattr(self, name)}
        self.__class__ = dataclasses.make_dataclass(
            type(self).__name__,
            [(name, type(value), dataclasses.field(init=False)) for name, value in extra.items()],
            bases=(type(self),),
        )
        for name, value in extra.items():
            setattr(self, name, value)
        fn(self, *args, **fields)

    return __init__


def transformer_config_init_subclass(cls: Any, **kwargs: Any) -> None:
    """A subclass gets the arguments of the moment as fields with these defaults; later repatches do not reach them."""
    accepted = inspect.signature(cls).parameters
    for name, value in (vars(get_full_args()) | kwargs).items():
        if name in accepted or hasattr(cls, name):
            continue
        cls.__annotations__[name] = type(value)
        if isinstance(value, (list, dict, set, bytearray)):
            value = dataclasses.field(default_factory=lambda kept=value: kept)
        setattr(cls, name, value)


def transformer_config_post_init_wrapper(fn: Callable[[Any], None]) -> Callable[[Any], None]:
    """Megatron's own checks between the features'; those are made with rotary fusion switched off."""

    @wraps(fn)
    def __post_init__(self: Any) -> None:
        MindSpeedFeaturesManager.pre_validate_features_args(self)
        apply_rope_fusion, self.apply_rope_fusion = self.apply_rope_fusion, False
        fn(self)
        self.apply_rope_fusion = apply_rope_fusion
        MindSpeedFeaturesManager.post_validate_features_args(self)
        MindSpeedFeaturesManager.validate_features_args(self)

    return __post_init__
