"""The device's random state, and norms for specs without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from mindspeed.core.fusions.fused_rms_norm import RMSNorm


def _set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    """Set the state of the NPU's generator; ``device`` is an index, a name or a ``torch.device``."""
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    if index is None or index < 0:
        index = torch.npu.current_device()
    torch.npu.default_generators[index].set_state(new_state)


class PTNorm:
    """Calling it makes a norm of the configured kind, not an instance of this class."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        if config.normalization == "RMSNorm":
            return RMSNorm(hidden_size, eps=eps, sequence_parallel=config.sequence_parallel, config=config)
        if config.normalization != "LayerNorm":
            raise Exception("Only LayerNorm and RMSNorm are curently supported")
        norm = torch.nn.LayerNorm(hidden_size, eps=eps)
        norm.config = config
        norm.weight.sequence_parallel = config.sequence_parallel
        norm.bias.sequence_parallel = config.sequence_parallel
        return norm
