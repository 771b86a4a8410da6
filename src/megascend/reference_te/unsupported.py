"""Errors and placeholders for features that the reference Transformer Engine does not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from megascend.errors import PlatformError


def refuse(feature: str, remedy: str) -> NoReturn:
    """Raise PlatformError for a feature that only the real Transformer Engine has."""
    raise PlatformError(f"the reference Transformer Engine does not support {feature}; {remedy}")


def refuse_settings(layer: str, settings: dict[str, Any], megatron_names: dict[str, str] | None = None) -> None:
    """Raise PlatformError if any of ``settings`` of ``layer`` is truthy; name megatron-core's setting where one exists."""
    for name, value in settings.items():
        if value:
            setting = (megatron_names or {}).get(name, name)
            refuse(f"{layer}({name}={value!r})", f"switch {setting} off, or run on CUDA with transformer-engine")


REAL_ONE = "run on CUDA with transformer-engine"


def _remedy(setting: str | None) -> str:
    return REAL_ONE if setting is None else f"switch {setting} off, or {REAL_ONE}"


def unavailable(name: str, setting: str | None = None) -> Callable[..., NoReturn]:
    """Create a placeholder function: calling it raises PlatformError, which names the ``setting`` that uses it."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, _remedy(setting))

    function.__name__ = function.__qualname__ = name
    return function


class _Unavailable(type):
    """Metaclass of placeholder classes: looking up an attribute, for example a member of an enumeration, raises."""

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(
            f"the reference Transformer Engine does not support {cls.__name__}, which has no {name} here; {REAL_ONE}"
        )


def unavailable_class(name: str, setting: str | None = None) -> type:
    """Create a placeholder class: it may be subclassed and used in isinstance, but its construction raises PlatformError."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse(name, _remedy(setting))

    return _Unavailable(name, (), {"__init__": __init__, "__doc__": f"Not available here; {_remedy(setting)}."})
