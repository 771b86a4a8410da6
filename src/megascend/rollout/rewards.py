"""Reward functions: plain callables, named in run files by where they are."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, cast

from megascend.errors import ConfigError, DataError
from megascend.rollout.advantages import LARGEST_REWARD

Reward = Callable[[str, Mapping[str, Any]], float]
"""``reward(response, example)``: the text of a response, and the line of the prompt file that it answers; higher is better.

Called on threads, several at a time; what it raises ends the run. It may return a number of Python, NumPy or torch, a boolean, or
an array without dimensions.
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
        ConfigError: there is no such module, file or function, it cannot be imported, does not take two arguments, or is async.
    """
    where, attribute = check_name(name)
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        there = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise ConfigError(f"reward: {where} has no function {attribute!r}; functions there: {there}")
    if inspect.isclass(found):
        raise ConfigError(f"reward: {name} is a class; name a function, or an instance of it that can be called")
    if any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in (found, found.__call__)):
        raise ConfigError(
            f"reward: {name} is async; rewards are plain functions, called on several threads: call asyncio.run(...) in one"
        )
    try:
        signature = inspect.signature(found)
    except ValueError:  # a function in C tells none
        return cast(Reward, found)
    try:
        signature.bind("response", {})
    except TypeError as error:
        raise ConfigError(f"reward: {name}{signature} must take (response, example): {error}") from None
    return cast(Reward, found)


def reward_name(reward: Reward) -> str:
    """Return ``FILE:FUNCTION`` of a reward function, for messages."""
    function: Any = getattr(reward, "func", reward)  # of functools.partial
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{Path(code.co_filename).name}:{name}" if code is not None else name


def checked(reward: Reward, response: str, example: Mapping[str, Any]) -> float:
    """Return what ``reward`` gives for a response.

    Raises:
        DataError: it raised, or gave something that is not a finite number, or too large a one; the message shows the response.
    """
    who = f"the reward function {reward_name(reward)}"
    where = f"; the response was {response!r:.200}"
    try:
        value = reward(response, example)
    except Exception as error:
        raise DataError(f"{who} raised {type(error).__name__}: {error}{where}") from error
    if inspect.iscoroutine(value):
        value.close()  # it would be reported as never awaited
    try:
        number = as_number(value)
    except Exception as error:
        raise DataError(f"{who} returned {value!r:.60}, which cannot be read ({error}){where}") from error
    if number is None or not math.isfinite(number):
        hint = " (does every branch of it return one?)" if value is None else ""
        raise DataError(f"{who} returned {value!r:.60}, not a finite number{hint}{where}")
    if abs(number) > LARGEST_REWARD:
        raise DataError(
            f"{who} returned {value!r:.60}, beyond {LARGEST_REWARD:g}, so that its advantage would overflow: scale it{where}"
        )
    return number


def as_number(value: Any) -> float | None:
    """Return a number of Python, NumPy or torch, or an array without dimensions, as a float; None for anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number or a fraction of hundreds of digits
        return math.inf
    except ValueError:  # a signalling NaN of decimal
        return math.nan


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
