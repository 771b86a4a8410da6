"""The fp8 API without fp8: switches that stay off, recipes that nothing uses, and padding of experts' rows.

Names of recipes are those of Transformer Engine 2.8 to 2.11. Programs build a recipe before they decide whether fp8 is on, so
only ``fp8_autocast(enabled=True)`` is refused. The variables ``NVTE_...``, which change defaults of Transformer Engine, have no
effect here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference.te.unsupported import refuse

NO_FP8 = "the reference Transformer Engine has no fp8 and no fp4"
REMEDY = "unset fp8 / fp4 in the model config, or run on CUDA with transformer-engine"


class FP8GlobalStateManager:
    """The state of fp8 that megatron-core queries: always off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    is_fp8_calibration = with_fp8_parameters = is_first_fp8_module = is_fp8_enabled

    @classmethod
    def get_fp8_recipe(cls) -> None:
        return None

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return False, NO_FP8

    @classmethod
    def reset(cls) -> None:
        """Do nothing: there is no state."""


def _only_off(name: str) -> Callable[..., AbstractContextManager[None]]:
    """Create a replacement of a context manager of Transformer Engine that enables quantisation: it only accepts False."""

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
quantized_model_init = _only_off("quantized_model_init")  # its name from 2.9 on


def check_support() -> tuple[bool, str]:
    """Return (False, reason): quantised layers cannot run here."""
    return False, NO_FP8


def is_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return :func:`check_support` in the form of 2.9 and later."""
    return check_support() if return_reason else False


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True: these layers support bf16 on every device, as torch does."""
    return (True, "") if return_reason else True


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Do nothing: Transformer Engine's context selects the fp8 scales during a recomputation of activations."""
    yield


class FormatRange(NamedTuple):
    """Largest value of the format in the forward pass and in the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Number formats: e2m1 (fp4), e4m3 and e5m2 (fp8), and e4m3 forward with e5m2 backward."""

    E2M1 = FormatRange(6, 6)
    E4M3 = FormatRange(448, 448)
    E5M2 = FormatRange(57344, 57344)
    HYBRID = FormatRange(448, 57344)


class MMParams(SimpleNamespace):
    """Options of a matrix product."""


class QParams(SimpleNamespace):
    """Options of a quantisation."""


class Recipe(SimpleNamespace):
    """Base class of recipes, which have their arguments as attributes, and a predicate for each kind."""

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return self.delayed() or self.float8_current_scaling()

    def float8_block_scaling(self) -> bool:
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def nvfp4(self) -> bool:
        return isinstance(self, NVFP4BlockScaling)

    def custom(self) -> bool:
        return isinstance(self, CustomRecipe)


class DelayedScaling(Recipe):
    """Scales from the history of largest values."""


class Float8CurrentScaling(Recipe):
    """A scale from each tensor's current values."""


class MXFP8BlockScaling(Recipe):
    """A scale for each block of 32 values."""


class Float8BlockScaling(Recipe):
    """A scale for each block of 128 values, or of 128 by 128."""


class NVFP4BlockScaling(Recipe):
    """Scales for blocks of 16 values and for the tensor."""


class CustomRecipe(Recipe):
    """User-defined quantisers."""


CLASSES: tuple[type, ...] = (
    Recipe, Format, MMParams, QParams, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling,
    NVFP4BlockScaling, CustomRecipe,
)  # fmt: skip


class _Aligned(torch.nn.Module):
    """Base class of padding layers. ``align_size`` is required: its default is that of the active recipe, and none is."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size

    def _padded(self, m_splits: Sequence[int], inp: Tensor, rows_padded: bool) -> tuple[list[int], list[int]]:
        if self.align_size is None:
            refuse(f"{type(self).__name__} without align_size, which then comes from the fp8 recipe", "pass align_size")
        counts = [int(count) for count in m_splits]
        # Rounded up in integers. A count of 0 stays 0: an expert without tokens gets no padding.
        padded = [-(-count // self.align_size) * self.align_size for count in counts]
        expected = sum(padded if rows_padded else counts)
        if len(counts) != self.num_gemms or expected != inp.shape[0]:
            raise ConfigError(
                f"{type(self).__name__}: m_splits={counts} must be {self.num_gemms} counts; by them the input has "
                f"{expected} rows, and it has {inp.shape[0]}"
            )
        return counts, padded


class Fp8Padding(_Aligned):
    """Padding ``[sum(m_splits), hidden]`` -> ``[sum(padded), hidden]`` by zeros after each run; also returns padded counts.

    Raises PlatformError without ``align_size``, ConfigError if the counts do not fit the input.
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        counts, padded = self._padded(m_splits, inp, rows_padded=False)
        if counts == padded:
            return inp, counts
        runs = zip(inp.split(counts), padded, strict=True)
        return torch.cat([torch.nn.functional.pad(run, (0, 0, 0, rows - len(run))) for run, rows in runs]), padded


class Fp8Unpadding(_Aligned):
    """Inverse: ``[sum(padded), hidden]`` -> ``[sum(m_splits), hidden]``. Raises as :class:`Fp8Padding`."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        counts, padded = self._padded(m_splits, inp, rows_padded=True)
        if counts == padded:
            return inp
        return torch.cat([run[:count] for run, count in zip(inp.split(padded), counts, strict=True)])
