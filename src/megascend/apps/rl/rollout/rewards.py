"""Reward functions: plain callables, named in run files by module or file."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, cast

from megascend.apps.rl.rollout.advantages import LARGEST_REWARD
from megascend.config.plugins import load_object
from megascend.errors import ConfigError, DataError

Reward = Callable[[str, Mapping[str, Any]], "float | Mapping[str, float]"]
"""``reward(response, example)``: called with a response's text and its line of the prompt file; higher is better.

Called on several threads concurrently; an exception ends the run. It may return a number of Python, NumPy or torch, a boolean, or
a 0-dimensional array; or a mapping of names to such numbers, of which ``reward`` is learned from and the others are recorded.
"""
TOTAL = "reward"
"""Name in a mapping of what is learned from."""


def load_reward(name: str) -> Reward:
    """Import a reward function: ``package.module:function``, or ``path/to/file.py:function``."""
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
