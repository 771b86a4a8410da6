"""The fp8 API without fp8: switches that stay off, recipes that nothing uses, and padding of experts' rows.

Names, fields and defaults of recipes are those of Transformer Engine 2.8 to 2.11, which also ignores unknown fields. Programs
build a recipe before they decide whether fp8 is on, so only ``fp8_autocast(enabled=True)`` is refused. The variables
``NVTE_...``, which change defaults of Transformer Engine, have no effect here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference.te.unsupported import refuse

NO_FP8 = "the reference Transformer Engine has no fp8 and no fp4"
REMEDY = "unset fp8 / fp4 in the model config, or run on CUDA with transformer-engine"


class FP8GlobalStateManager:
    """The state of fp8 that megatron-core queries: always off."""

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


@dataclass(frozen=True)
class MMParams:
    """Options of a matrix product."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Options of a quantisation."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def _recipe(cls: type) -> type:
    """Make a dataclass that ignores unknown arguments: megatron-core passes some of older releases."""
    recipe = dataclass(cls)
    names, construct = {entry.name for entry in fields(recipe)}, recipe.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        construct(self, *args, **{name: value for name, value in settings.items() if name in names})

    recipe.__init__ = __init__  # type: ignore[misc]
    return recipe


class Recipe:
    """Base class of recipes, with a predicate for each kind."""

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


def _require(recipe: object, name: str, allowed: tuple[Any, ...]) -> None:
    chosen = getattr(recipe, name)
    if chosen not in allowed:
        raise ConfigError(f"{type(recipe).__name__}: {name} must be one of {allowed}, got {chosen!r}")


FP8 = (Format.E4M3, Format.HYBRID)


@_recipe
class DelayedScaling(Recipe):
    """Scales from the history of largest values. Raises ConfigError for a format that is not usable for training."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        _require(self, "fp8_format", FP8)


@_recipe
class Float8CurrentScaling(Recipe):
    """A scale from each tensor's current values. Raises ConfigError as :class:`DelayedScaling`."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    # Transformer Engine's defaults: the forward product takes the faster accumulation, gradients the more precise one.
    fp8_gemm_fprop: MMParams = field(default_factory=lambda: MMParams(use_split_accumulator=False))
    fp8_gemm_dgrad: MMParams = field(default_factory=MMParams)
    fp8_gemm_wgrad: MMParams = field(default_factory=MMParams)
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        _require(self, "fp8_format", FP8)
        quantisation = QParams(power_2_scale=self.use_power_2_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = quantisation


@_recipe
class MXFP8BlockScaling(Recipe):
    """A scale for each block of 32 values. Raises ConfigError as :class:`DelayedScaling`."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        _require(self, "fp8_format", FP8)


@_recipe
class Float8BlockScaling(Recipe):
    """A scale for each block of 128 values, or of 128 by 128. Raises ConfigError for blocks of other dimensions, too."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = field(default_factory=MMParams)
    fp8_gemm_dgrad: MMParams = field(default_factory=MMParams)
    fp8_gemm_wgrad: MMParams = field(default_factory=MMParams)
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        _require(self, "fp8_format", FP8)
        for name in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"):
            _require(self, name, (1, 2))
        quantisation = QParams(power_2_scale=not self.use_f32_scales)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = quantisation


@_recipe
class NVFP4BlockScaling(Recipe):
    """Scales for blocks of 16 values and for the tensor. Raises ConfigError for other formats than E2M1 and E4M3."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        _require(self, "fp4_format", (Format.E2M1,))
        _require(self, "fp8_format", (Format.E4M3,))
        rounds, plane = not self.disable_stochastic_rounding, not self.disable_2d_quantization
        rotates = not self.disable_rht
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=rotates)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=plane)
        self.fp4_quant_bwd_grad = QParams(random_hadamard_transform=rotates, stochastic_rounding=rounds)


@_recipe
class CustomRecipe(Recipe):
    """User-defined quantisers: ``qfactory(role)`` returns the quantiser of a role."""

    qfactory: Callable[..., Any]
    fp8_dpa: bool = False
    fp8_mha: bool = False


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
