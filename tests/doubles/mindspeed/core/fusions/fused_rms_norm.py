"""RMSNorm on the NPU's fused kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root mean square norm. Its weight is made on the CPU: the model has to be moved to the device after building."""

    def __init__(self, dim: int, eps: float = 1e-6, sequence_parallel: bool = False, config: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.config = config
        self.weight = torch.nn.Parameter(torch.ones(dim))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight if self.config.layernorm_zero_centered_gamma else self.weight
        return torch_npu.npu_rms_norm(x, weight, epsilon=self.eps)[0]
