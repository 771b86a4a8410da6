"""Reward functions: plain callables, named in run files by module or file."""

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

Reward = Callable[[str, Mapping[str, Any]], "float | Mapping[str, float]"]
"""``reward(response, example)``: called with a response's text and its line of the prompt file; higher is better.

Called on several threads concurrently; an exception ends the run. It may return a number of Python, NumPy or torch, a boolean, or
a 0-dimensional array; or a mapping of names to such numbers, of which ``reward`` is learned from and the others are recorded.
"""
TOTAL = "reward"
"""Name in a mapping of what is learned from."""


def check_name(name: str, setting: str = "reward") -> tuple[str, str]:
    """Split ``name`` into module (or file) and function, without importing anything.

    Raises:
        ConfigError: the name is malformed, or the file does not exist; it begins with ``setting``.
    """
    module, separator, attribute = name.rpartition(":")
    if not separator or not module or not attribute:
        raise ConfigError(
            f"{setting}: {name!r} must name a function as package.module:function or path/to/file.py:function"
        )
    # Without an import, which may load torch: this runs before anything is started.
    if module.endswith(".py") and not Path(module).is_file():
        raise ConfigError(f"{setting}: file {Path(module).absolute()} does not exist")
    return module, attribute


def load_object(name: str, setting: str, usable: Callable[[Any], bool] = callable) -> Any:
    """Import ``package.module:name`` or ``path/to/file.py:name``.

    Raises:
        ConfigError: the module, the file or the name in it does not exist, or cannot be imported; it begins with ``setting``.
    """
    source, attribute = check_name(name, setting)
    module = _import_file(Path(source), setting) if source.endswith(".py") else _import_package(source, setting)
    value = getattr(module, attribute, None)
    if not usable(value):
        functions = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise ConfigError(f"{setting}: {source} has no function {attribute!r}; functions there: {functions}")
    return value


def load_reward(name: str) -> Reward:
    """Import a reward function: ``package.module:function``, or ``path/to/file.py:function``.

    Raises:
        ConfigError: the module, file or function does not exist, cannot be imported, does not take two arguments, or is async.
    """
    reward = load_object(name, "reward")
    if inspect.isclass(reward):
        raise ConfigError(f"reward: {name} is a class; name a function, or an instance of it that can be called")
    # An instance is async if its __call__ is.
    if any(inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call) for call in (reward, reward.__call__)):
        raise ConfigError(
            f"reward: {name} is async; rewards are plain functions, called on several threads: call asyncio.run(...) in one"
        )
    try:
        signature = inspect.signature(reward)
    except ValueError:  # functions in C may have no signature
        return cast(Reward, reward)
    try:
        # At the start: after an hour of sampling would be late for a TypeError.
        signature.bind("response", {})
    except TypeError as error:
        raise ConfigError(f"reward: {name}{signature} must take (response, example): {error}") from None
    return cast(Reward, reward)


def reward_name(reward: Reward) -> str:
    """Return ``FILE:FUNCTION`` of a reward function, for messages."""
    function: Any = getattr(reward, "func", reward)  # of functools.partial
    # A callable object has its code in the class.
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{Path(code.co_filename).name}:{name}" if code is not None else name


def checked(reward: Reward, response: str, example: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Call a reward function for a response, and check its result.

    Returns:
        The reward, and its parts by name.

    Raises:
        DataError: it raised, or a number is missing, not finite, or too large; the message shows the response.
    """
    label = f"the reward function {reward_name(reward)}"
    quotation = f"; the response was {response!r:.200}"
    try:
        value: Any = reward(response, example)
    except Exception as error:
        raise DataError(f"{label} raised {type(error).__name__}: {error}{quotation}") from error
    if inspect.iscoroutine(value):
        value.close()  # it would be reported as never awaited
    if not isinstance(value, Mapping):
        return _checked_number(value, label, "", quotation), {}
    # Not the sum of all: other frameworks report accuracies and lengths beside the score.
    if TOTAL not in value:
        names = ", ".join(map(str, value)) or "none"
        raise DataError(
            f"{label} returned a mapping without {TOTAL!r}, the number that is learned from; its names: {names:.200}{quotation}"
        )
    numbers = {str(name): _checked_number(part, label, f" as {name!r}", quotation) for name, part in value.items()}
    return numbers.pop(TOTAL), numbers


def _checked_number(value: Any, label: str, name: str, quotation: str) -> float:
    try:
        number = as_number(value)
    except Exception as error:
        raise DataError(f"{label} returned {value!r:.60}{name}, which cannot be read ({error}){quotation}") from error
    if number is None or not math.isfinite(number):
        hint = " (does every branch of it return one?)" if value is None else ""
        raise DataError(f"{label} returned {value!r:.60}{name}, not a finite number{hint}{quotation}")
    if abs(number) > LARGEST_REWARD:
        raise DataError(
            f"{label} returned {value!r:.60}{name}, beyond {LARGEST_REWARD:g}, so that its advantage would overflow: "
            f"scale it{quotation}"
        )
    return number


def as_number(value: Any) -> float | None:
    """Convert a number of Python, NumPy or torch, or a 0-dimensional array, to a float; None for anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer or a fraction of hundreds of digits
        return math.inf
    except ValueError:  # a signalling NaN of decimal
        return math.nan


def _import_package(name: str, setting: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(f"{setting}: {name} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(path: Path, setting: str) -> Any:
    name = f"megascend_{setting.rpartition('.')[2]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # Half a module must not be found by a second import.
        del sys.modules[name]
        raise ConfigError(f"{setting}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
