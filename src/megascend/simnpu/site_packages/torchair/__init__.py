"""Stand-in for ``torchair`` (Ascend's graph mode), which MindSpeed imports to register converters.

Registrations are accepted and never used: there is no graph mode on the simulated device (``megascend.simnpu``).
"""

from collections.abc import Callable
from typing import TypeVar

from torchair import ge as ge

F = TypeVar("F", bound=Callable)


def register_fx_node_ge_converter(operator: object) -> Callable[[F], F]:
    """A decorator that leaves the converter as it is."""
    return lambda converter: converter


def __getattr__(name: str) -> object:
    raise AttributeError(f"torchair.{name} is not simulated by megascend.simnpu: there is no graph mode")
