"""A stand-in for ``triton`` that can be imported but not run, for MindSpeed's modules that import it unconditionally.

On an Ascend host triton-ascend provides these names. A kernel decorated here raises when it is launched.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from simnpu.errors import NotSimulatedError

MODULES = (
    "triton",
    "triton.language",
    "triton.language.extra",
    "triton.language.extra.libdevice",
    "triton.runtime",
    "triton.runtime.driver",
)
VERSION = "3.2.0+simnpu"  # triton-ascend follows Triton 3.2
ASK_FOR_TRITON = ("torch.utils._triton", "torch._inductor.runtime.hints", "torch._inductor.runtime.triton_compat")


class NotAKernel:
    """A Triton function or name on a machine without Triton: it can be looked up, subscripted, and not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getitem__(self, grid: Any) -> NotAKernel:
        return self

    def __getattr__(self, name: str) -> NotAKernel:
        return placeholder(name, self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSimulatedError(
            f"Triton function {self.__name__}: Triton does not run on the simulated device (simnpu); switch "
            "off the feature that calls it"
        )


def jit(function: Callable | None = None, **options: Any) -> Any:
    """``triton.jit``, with or without options."""
    return (lambda f: NotAKernel(f.__name__)) if function is None else NotAKernel(function.__name__)


def unchanged(*args: Any, **options: Any) -> Callable[[Any], Any]:
    """``triton.autotune`` and ``triton.heuristics``: decorators that leave the kernel as it is."""
    return lambda kernel: kernel


class Config:
    """``triton.Config``: kept, never used."""

    def __init__(self, kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        self.kwargs = {**(kwargs or {}), **options}


def cdiv(x: int, y: int) -> int:
    """``triton.cdiv``: x / y rounded up."""
    return (x + y - 1) // y


def next_power_of_2(n: int) -> int:
    """``triton.next_power_of_2``: the smallest power of two not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


class constexpr:
    """``triton.language.constexpr``: a value that modules wrap, and unwrap, outside of kernels too."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return bool(self.value)


class ActiveDriver:
    """``triton.runtime.driver.active``: what triton-ascend says of the device."""

    backend = "npu"
    max_shared_mem = 192 * 1024  # bytes of unified buffer of a 910B vector core

    @property
    def utils(self) -> ActiveDriver:
        return self

    def get_current_target(self) -> ActiveDriver:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.max_shared_mem}


NAMES = {
    "__version__": VERSION,
    "jit": jit,
    "autotune": unchanged,
    "heuristics": unchanged,
    "Config": Config,
    "cdiv": cdiv,
    "next_power_of_2": next_power_of_2,
}


class StandInFinder:
    """Finds our ``triton`` after every other finder has failed, so that an installed Triton always comes first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in MODULES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "triton":
            module.__dict__.update(NAMES)
        elif module.__name__ == "triton.runtime.driver":
            module.__dict__["active"] = ActiveDriver()
        elif module.__name__.startswith("triton.language"):
            module.__dict__.update(__getattr__=placeholder, constexpr=constexpr)


def placeholder(name: str, module: str = "triton.language") -> NotAKernel:
    """Return a stand-in for a name of ``triton.language``: kernels are never run, but their modules are imported."""
    if name.startswith("__"):
        raise AttributeError(name)
    return NotAKernel(f"{module}.{name}")


def install_triton_stand_in() -> None:
    """Make ``import triton`` succeed where there is no Triton.

    torch asks for Triton too and would then look for a compiler in it: it is made to ask, and to remember the answer,
    before the stand-in is there.
    """
    for module in ASK_FOR_TRITON:
        importlib.import_module(module)
    sys.modules["torch.utils._triton"].has_triton_package()
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.append(StandInFinder())  # type: ignore[arg-type]
