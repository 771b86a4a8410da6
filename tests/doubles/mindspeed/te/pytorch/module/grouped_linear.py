"""One linear per local expert, on tokens that are sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.utils import divide
from mindspeed.flavour import IS_0_16, named_by_branch
from mindspeed.te.pytorch.module.shards import allocate_weight
from torch import Tensor


@named_by_branch
class TEGroupedLinear(torch.nn.Module):
    """Weights ``weight0`` ... of the local experts. The product is plain PyTorch here, the real one a grouped kernel."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: Callable[..., Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.config = config
        self.parallel_mode = parallel_mode
        self.use_bias = bias
        self.te_return_bias = skip_bias_add and bias
        self.expert_parallel = config.expert_model_parallel_size > 1
        rank, size = 0, 1
        if is_expert:
            rank = parallel_state.get_expert_tensor_parallel_rank()
            size = parallel_state.get_expert_tensor_parallel_world_size()
        self.explicit_expert_comm = is_expert and (size > 1 or self.expert_parallel)
        column = parallel_mode == "column"
        self.input_size = input_size if column else divide(input_size, size)
        self.output_size = divide(output_size, size) if column else output_size
        for index in range(num_gemms):
            weight = allocate_weight(
                (self.output_size, self.input_size),
                (output_size, input_size),
                config,
                init_method,
                partition_dim=0 if column else 1,
                ranks=(rank, size),
                is_expert=is_expert,
            )
            weight.allreduce = not (is_expert and self.expert_parallel)  # type: ignore[attr-defined]
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x: Tensor, m_splits: Any) -> tuple[Tensor, None]:
        """``x`` ``[tokens, in]``; ``m_splits`` counts the tokens of each expert."""
        counts = m_splits.tolist() if torch.is_tensor(m_splits) else list(m_splits)
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        pieces = [F.linear(piece, weight) for piece, weight in zip(x.split(counts), weights, strict=True)]
        return torch.cat(pieces), None


@named_by_branch
class TEColumnParallelGroupedLinear(TEGroupedLinear):
    """Each expert's weight is split by rows."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(num_gemms, input_size, output_size, parallel_mode="column", **kwargs)


@named_by_branch
class TERowParallelGroupedLinear(TEGroupedLinear):
    """Each expert's weight is split by columns."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(num_gemms, input_size, output_size, parallel_mode="row", **kwargs)


if not IS_0_16:
    MindSpeedTEGroupedLinear = TEGroupedLinear
    MindSpeedTEColumnParallelGroupedLinear = TEColumnParallelGroupedLinear
    MindSpeedTERowParallelGroupedLinear = TERowParallelGroupedLinear
    del TEGroupedLinear, TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
