"""The fp8 switches of Transformer Engine: always off; turning them on is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megascend.reference_te.unsupported import refuse

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
        return False, "the reference Transformer Engine has no fp8"

    @classmethod
    def reset(cls) -> None:
        """Nothing is kept, so there is nothing to reset."""


@contextmanager
def fp8_autocast(enabled: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
    """No-op when ``enabled`` is False; otherwise PlatformError."""
    if enabled:
        refuse("fp8_autocast(enabled=True)", REMEDY)
    yield


@contextmanager
def fp8_model_init(enabled: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
    """No-op when ``enabled`` is False; otherwise PlatformError."""
    if enabled:
        refuse("fp8_model_init(enabled=True)", REMEDY)
    yield


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Tells fp8 layers whose scales to keep while activations are recomputed: nothing to do where fp8 is off."""
    yield
