"""Reward functions: plain callables, named in run files by where they are."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, cast

from megascend.errors import ConfigError, DataError

Reward = Callable[[str, Mapping[str, Any]], float]
"""``reward(response, example)``: the text of a response, and the line of the prompt file that it answers; higher is better.

Called on threads, several at a time; what it raises ends the run.
"""


def check_name(name: str) -> tuple[str, str]:
    """Module (or file) and function that ``name`` says. Imports nothing.

    Raises:
        ConfigError: it says neither, or there is no such file.
    """
    where, separator, attribute = name.rpartition(":")
    if not separator or not where or not attribute:
        raise ConfigError(
            f"reward: {name!r} must name a function as package.module:function or path/to/file.py:function"
        )
    if where.endswith(".py") and not Path(where).is_file():
        raise ConfigError(f"reward: there is no file {Path(where).absolute()}")
    return where, attribute


def load_reward(name: str) -> Reward:
    """The callable that ``name`` says: ``package.module:function``, or ``path/to/file.py:function``.

    Raises:
        ConfigError: there is no such module, file or function, it cannot be imported, or does not take two arguments.
    """
    where, attribute = check_name(name)
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        there = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise ConfigError(f"reward: {where} has no function {attribute!r}; functions there: {there}")
    try:
        inspect.signature(found).bind("response", {})
    except TypeError as error:
        raise ConfigError(f"reward: {name} must take (response, example): {error}") from None
    return cast(Reward, found)


def checked(reward: Reward, response: str, example: Mapping[str, Any]) -> float:
    """What ``reward`` gives for a response.

    Raises:
        DataError: it raised, or gave something that is not a finite number; the message shows the response.
    """
    try:
        value = reward(response, example)
    except Exception as error:
        raise DataError(
            f"the reward function raised {type(error).__name__}: {error}; the response was {response!r:.200}"
        ) from error
    if not isinstance(value, Real) or not math.isfinite(value):
        raise DataError(
            f"the reward function returned {value!r:.60}, not a finite number; the response was {response!r:.200}"
        )
    return float(value)


def _from_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(f"reward: {name} cannot be imported: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> Any:
    name = f"megascend_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of the module look for it there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"reward: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
