"""One way to say that the reference Transformer Engine does not have a feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from megascend.errors import PlatformError


def refuse(what: str, remedy: str) -> NoReturn:
    """Raise the error for a feature that only the real Transformer Engine has."""
    raise PlatformError(f"the reference Transformer Engine does not support {what}; {remedy}")


def refuse_settings(layer: str, settings: dict[str, Any], megatron_names: dict[str, str] | None = None) -> None:
    """Raise if any of ``settings`` (name -> value) is switched on (truthy).

    Args:
        layer: class the settings were passed to.
        megatron_names: Transformer Engine's name -> megatron-core's, where a user knows it by the latter.
    """
    for name, value in settings.items():
        if value:
            known_as = (megatron_names or {}).get(name, name)
            refuse(f"{layer}({name}={value!r})", f"switch {known_as} off, or run on CUDA with transformer-engine")


def unavailable(name: str, setting: str) -> Callable[..., NoReturn]:
    """A stand-in for a fused function: importable, but calling it names the ``setting`` that asked for it."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, f"switch {setting} off")

    function.__name__ = function.__qualname__ = name
    return function


def unavailable_class(name: str, setting: str) -> type:
    """A stand-in for a class: may be subclassed and used in isinstance, but not constructed."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse(name, f"switch {setting} off")

    return type(name, (), {"__init__": __init__, "__doc__": f"Not available here: needs {setting} off."})
