"""The recipes of ``transformer_engine.common.recipe``: settings only, by which nothing computes.

Names, fields and defaults are those of Transformer Engine 2.8 to 2.11, and as there a field that is not known is ignored.
Programs build a recipe before they decide whether fp8 is on; ``fp8_autocast(enabled=True)`` is what is refused.
The variables ``NVTE_...`` that change a default there change nothing here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal, NamedTuple

from megascend.errors import ConfigError


class Limits(NamedTuple):
    """Largest value of the format in the forward pass and in the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Number formats: e2m1 (fp4), e4m3 and e5m2 (fp8), and e4m3 forward with e5m2 backward."""

    E2M1 = Limits(6, 6)
    E4M3 = Limits(448, 448)
    E5M2 = Limits(57344, 57344)
    HYBRID = Limits(448, 57344)


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
    """A dataclass that ignores names which are not its fields: megatron-core passes some of older releases."""
    made = dataclass(cls)
    known, construct = {each.name for each in fields(made)}, made.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        construct(self, *args, **{name: value for name, value in settings.items() if name in known})

    made.__init__ = __init__  # type: ignore[misc]
    return made


class Recipe:
    """What every recipe answers: which one it is."""

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
    """Scales from the history of largest values. Raises ConfigError for a format that nobody can train in."""

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
    """A scale from each tensor itself. Raises ConfigError as :class:`DelayedScaling`."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
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
    """Scales for blocks of 16 values and for the tensor. Raises ConfigError for other formats than its own."""

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
    """Quantisers of the program's own: ``qfactory(role)`` gives the one of a role."""

    qfactory: Callable[..., Any]
    fp8_dpa: bool = False
    fp8_mha: bool = False


CLASSES: tuple[type, ...] = (
    Recipe, Format, MMParams, QParams, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling,
    NVFP4BlockScaling, CustomRecipe,
)  # fmt: skip
