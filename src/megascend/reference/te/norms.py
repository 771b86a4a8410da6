"""RMSNorm and LayerNorm: computed in fp32, returned in the input's dtype, as Transformer Engine's kernels do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference.te.base import ReferenceModule

Device = torch.device | str | int | None


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool = False) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; ``weight`` is stored minus one if zero-centered."""
    wide = x.float() if x.dtype != torch.float64 else x
    gamma = weight.to(wide.dtype) + 1.0 if zero_centered_gamma else weight.to(wide.dtype)
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * gamma).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered_gamma: bool = False) -> Tensor:
    """Apply layer normalisation over the last dimension; shapes and dtypes as in :func:`rms_norm`."""
    wide = x.float() if x.dtype != torch.float64 else x
    gamma = weight.to(wide.dtype) + 1.0 if zero_centered_gamma else weight.to(wide.dtype)
    return F.layer_norm(wide, (x.shape[-1],), gamma, bias.to(wide.dtype), eps).to(x.dtype)


class _Norm(ReferenceModule):
    """Base class of both norms: the weight and its initialisation."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,  # the name that megatron-core uses before 0.17
        device: Device = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise ConfigError(f"{type(self).__name__} got unknown settings: {sorted(unknown)}")
        size = normalized_shape if hidden_size is None else hidden_size
        if not isinstance(size, int) or None not in (normalized_shape, hidden_size):
            raise ConfigError(
                f"{type(self).__name__} got normalized_shape={normalized_shape!r} and hidden_size={hidden_size!r}; it needs one "
                "of them, an integer"
            )
        self.hidden_size = size
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        self._dtype = params_dtype or dtype or torch.get_default_dtype()
        first = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        self.weight = self._norm_parameter("weight", first, device)

    def _norm_parameter(self, name: str, init: Any, device: Device) -> torch.nn.Parameter:
        parameter = self._add_parameter(name, (self.hidden_size,), init, self._dtype, device)
        if self.sequence_parallel is not None:
            # megatron-core sums the gradients of marked parameters over the tensor parallel ranks.
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class RMSNorm(_Norm):
    """RMSNorm of ``x`` ``[..., hidden]``; same shape and dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)


class LayerNorm(_Norm):
    """LayerNorm of ``x`` ``[..., hidden]``; same shape and dtype."""

    def __init__(self, *args: Any, device: Device = None, **kwargs: Any) -> None:
        super().__init__(*args, device=device, **kwargs)
        self.bias = self._norm_parameter("bias", torch.nn.init.zeros_, device)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.zero_centered_gamma)
