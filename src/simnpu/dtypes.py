"""Types that aten's operators have on a 910B (Atlas A2): a call outside them warns once, or raises with ``SIMNPU_STRICT=1``.

Source: torch_npu's list of PyTorch's APIs (Ascend/pytorch 9e73e708, docs/zh/api/native_api/pytorch_2-11-0, 2026-08-21), by the
type of the first tensor. The list is of verified types and in places older than the A2's bfloat16: it counts where float16 does.
``histc`` is left out: Megatron's router counts integers with it on cards.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simnpu.settings import STRICT_VARIABLE

LETTERS = {
    "b": torch.bfloat16, "h": torch.float16, "f": torch.float32, "d": torch.float64, "B": torch.uint8, "c": torch.int8,
    "s": torch.int16, "i": torch.int32, "l": torch.int64, "?": torch.bool, "F": torch.complex64, "D": torch.complex128,
}  # fmt: skip
TABLE = """
bhf adaptive_avg_pool2d adaptive_avg_pool3d addbmm addcdiv addmm avg_pool1d avg_pool2d baddbmm binary_cross_entropy
  binary_cross_entropy_with_logits bmm cdist ceil celu convolution_overrideable dist elu gelu group_norm hardshrink
  hardsigmoid hardswish kl_div layer_norm lerp linalg_norm log_sigmoid log_softmax logit mish mm mse_loss
  multilabel_margin_loss multinomial mv nanmean nll_loss norm prelu rrelu selu silu smooth_l1_loss soft_margin_loss
  softplus softshrink trunc var vdot
bhfBcsil? acos addr amin aminmax asin atan2 copysign cummax div erfinv exp2 gt isneginf isposinf le log1p logical_not
  logsumexp lt maximum minimum nan_to_num nansum nonzero select_scatter tanh tril triu xlogy
bhfdBcsil? abs add all amax any argwhere asin atan cat cummin deg2rad equal ge isfinite narrow_copy ones pixel_unshuffle
  rad2deg slice_scatter sqrt stack sum unique where
bhfBcsil?FD asinh atanh cos count_nonzero cumsum eq flip logical_and logical_or logical_xor mul ne prod reciprocal rsqrt
  sigmoid sin zeros_like
bhfdBcsil?FD acosh clone cosh dequantize diag_embed empty_like full_like isinf isnan log log10 log2 ones_like pixel_shuffle
  scatter square tan
- adaptive_max_pool1d adaptive_max_pool2d avg_pool3d embedding_bag heaviside linalg_ldl_factor max_unpool3d nanquantile pdist
  poisson quantize_per_channel quantize_per_tensor scatter_reduce std_mean unique_consecutive var_mean
bhfBcsil addmv argmin argsort bucketize clamp floor_divide isin median sort threshold
bhfdBcsil argmax cumprod floor hardtanh rand_like relu6 searchsorted sub topk
bhfd elu glu leaky_relu sinh softmax
bhfsil? diagonal_scatter gather index_select masked_select repeat_interleave take
Bcsil? bitwise_and bitwise_not bitwise_or bitwise_xor
bhfl? erfc index_add max min
bhfBcil fmod relu
f index_copy linalg_cholesky randn_like
fd adaptive_max_pool3d ctc_loss
bhfdBcil addcmul max_unpool2d
bhfBcsil?F angle diag
Bcsil bincount bitwise_left_shift
bhfdl? erf expm1
fdFD linalg_qr linalg_solve_triangular
bhfil? roll sign
bhfcil neg
bhfBci dot
bhfil embedding
bhfdl?FD exp
bhfBcsil?D float_power
bhfcsil hardtanh
bhfi kthvalue
bhdF ldexp
bhfFD mean
bhfcilFD neg
bhfBcsilFD positive
bhfdsl pow
bhfl randint_like
bhfsil remainder
bhfdil round
bhfil?FD sgn
fFD slogdet
"""
"""Types, then operators; ``-``: none."""


def strict() -> bool:
    return os.environ.get(STRICT_VARIABLE) == "1"


@functools.cache
def by_operator() -> dict[str, frozenset[torch.dtype]]:
    """Return the types of each operator in :data:`TABLE`."""
    table = {}
    for line in TABLE.replace("\n  ", " ").strip().split("\n"):
        letters, *operators = line.split(" ")
        types = frozenset(LETTERS[letter] for letter in letters if letter != "-")
        table.update(dict.fromkeys(operators, types))
    return table


def family(name: str) -> str:
    """Return the published name of an operator: ``gelu`` of ``gelu_backward.grad_input``, ``softmax`` of ``_softmax``."""
    base = name.partition(".")[0].removeprefix("_foreach_").lstrip("_").removeprefix("native_").rstrip("_")
    return re.sub(r"_(backward|forward)(_data)?$", "", base)


def watched(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` of ``aten::<name>`` behind a look at the type of its first tensor, if the operator's types are published."""
    types = by_operator().get(family(name), EVERY_TYPE)

    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        if isinstance(first, (list, tuple)) and first:
            first = first[0]
        if isinstance(first, Tensor) and first.dtype not in types:
            report(name, first.dtype)
        return kernel(*args, **kwargs)

    return call


EVERY_TYPE = frozenset(LETTERS.values())  # others, such as float8, a 910B has not at all
_reported: set[tuple[str, torch.dtype]] = set()


def report(name: str, dtype: torch.dtype) -> None:
    """Warn of an operator and a type once, or raise in strict mode."""
    message = f"aten::{name} of {dtype} is not among the types that torch_npu lists for a 910B"
    if strict():
        raise RuntimeError(f"{message} [{STRICT_VARIABLE}=1, simulated by simnpu]")
    if (name, dtype) not in _reported:
        _reported.add((name, dtype))
        warnings.warn(f"{message}; {STRICT_VARIABLE}=1 refuses it", RuntimeWarning, stacklevel=3)
