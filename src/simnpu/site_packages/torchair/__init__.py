"""Stand-in for ``torchair`` (Ascend's graph mode), which MindSpeed imports to register converters.

Registrations are accepted and never used: there is no graph mode on the simulated device (``simnpu``).
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torchair import configs as configs
from torchair import ge as ge
from torchair.configs.compiler_config import CompilerConfig as CompilerConfig

F = TypeVar("F", bound=Callable)


def register_fx_node_ge_converter(operator: object) -> Callable[[F], F]:
    """A decorator that leaves the converter as it is."""
    return lambda converter: converter


def get_npu_backend(*, compiler_config: object = None, **options: object) -> Callable[..., Any]:
    """A backend for ``torch.compile`` that runs the captured graph operator by operator, and says so."""

    def backend(graph: Any, inputs: Any) -> Any:
        print("torchair (simulated by simnpu): no graph mode here, the graph runs eagerly", file=sys.stderr)
        return graph.forward

    return backend


def get_compiler(compiler_config: object = None) -> Callable[..., Any]:
    """See :func:`get_npu_backend`."""
    return get_npu_backend(compiler_config=compiler_config)


def __getattr__(name: str) -> object:
    raise AttributeError(f"torchair.{name} is not simulated by simnpu: there is no graph mode")
