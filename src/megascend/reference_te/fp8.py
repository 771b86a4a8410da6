"""The fp8 switches of Transformer Engine: always off; turning them on is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megascend.reference_te.unsupported import refuse

NO_FP8 = "the reference Transformer Engine has no fp8 and no fp4"
REMEDY = "unset fp8 / fp4 in the model config, or run on CUDA with transformer-engine"


class FP8GlobalStateManager:
    """What megatron-core asks about fp8; the answer is always that it is off."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return False

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> None:
        return None

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return False, NO_FP8

    @classmethod
    def reset(cls) -> None:
        """Nothing is kept, so there is nothing to reset."""


def _only_off(name: str) -> Callable[..., AbstractContextManager[None]]:
    """A context of Transformer Engine's that switches quantisation on: nothing happens where it is off already."""

    @contextmanager
    def context(enabled: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
        if enabled:
            refuse(f"{name}(enabled=True)", REMEDY)
        yield

    context.__name__ = context.__qualname__ = name
    context.__doc__ = "No-op when ``enabled`` is False; otherwise PlatformError."
    return context


fp8_autocast = _only_off("fp8_autocast")
autocast = _only_off("autocast")  # its name from 2.9 on
fp8_model_init = _only_off("fp8_model_init")
quantized_model_init = _only_off("quantized_model_init")  # likewise


def check_support() -> tuple[bool, str]:
    """Whether quantised layers can run here, and why not."""
    return False, NO_FP8


def is_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """The same question as programs ask it from 2.9 on."""
    return check_support() if return_reason else False


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """The layers here take bf16 wherever torch does, which is everywhere."""
    return (True, "") if return_reason else True


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Tells fp8 layers whose scales to keep while activations are recomputed: nothing to do where fp8 is off."""
    yield
