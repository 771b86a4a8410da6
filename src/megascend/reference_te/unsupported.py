"""One way to say that the reference Transformer Engine does not have a feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from megascend.errors import PlatformError


def refuse(what: str, remedy: str) -> NoReturn:
    """Raise the error for a feature that only the real Transformer Engine has."""
    raise PlatformError(f"the reference Transformer Engine does not support {what}; {remedy}")


def refuse_settings(layer: str, settings: dict[str, Any], megatron_names: dict[str, str] | None = None) -> None:
    """Raise if any of ``settings`` of ``layer`` is truthy, by megatron-core's name for it where users know that."""
    for name, value in settings.items():
        if value:
            known_as = (megatron_names or {}).get(name, name)
            refuse(f"{layer}({name}={value!r})", f"switch {known_as} off, or run on CUDA with transformer-engine")


REAL_ONE = "run on CUDA with transformer-engine"


def _remedy(setting: str | None) -> str:
    return REAL_ONE if setting is None else f"switch {setting} off, or {REAL_ONE}"


def unavailable(name: str, setting: str | None = None) -> Callable[..., NoReturn]:
    """A stand-in for a function: importable, but calling it raises PlatformError and names the ``setting`` that asked for it."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, _remedy(setting))

    function.__name__ = function.__qualname__ = name
    return function


class _Unavailable(type):
    """The class of such classes: to look something up on one, say a member of an enumeration, is an AttributeError."""

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(
            f"the reference Transformer Engine does not support {cls.__name__}, which has no {name} here; {REAL_ONE}"
        )


def unavailable_class(name: str, setting: str | None = None) -> type:
    """A stand-in for a class: may be subclassed and used in isinstance, but to construct one raises PlatformError."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse(name, _remedy(setting))

    return _Unavailable(name, (), {"__init__": __init__, "__doc__": f"Not available here; {_remedy(setting)}."})
