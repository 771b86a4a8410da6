"""Linears of their own kind: neither megatron-core's classes nor subclasses of each other.

Libraries that recognise a layer by ``isinstance`` with TELinear or megatron-core's RowParallelLinear (LoRA) do not
know TEColumnParallelLinear and TERowParallelLinear. On branch 0.15 those two exist here but are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    linear_with_grad_accumulation_and_async_allreduce,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import divide
from mindspeed.flavour import IS_0_16, named_by_branch
from mindspeed.te.pytorch.module.shards import allocate_bias, allocate_weight, sharded
from torch import Tensor


class _Linear(torch.nn.Module):
    """What the linears share. ``forward`` returns ``(output, bias or None)``."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, input_size: int, output_size: int, config: Any, skip_bias_add: bool, is_expert: bool) -> None:
        super().__init__()
        self.config = config
        self.input_size = input_size
        self.output_size = output_size
        self.skip_bias_add = skip_bias_add
        self.is_expert = is_expert
        self.expert_parallel = config.expert_model_parallel_size > 1
        if is_expert:
            self.rank = parallel_state.get_expert_tensor_parallel_rank()
            self.world_size = parallel_state.get_expert_tensor_parallel_world_size()
        else:
            self.rank = parallel_state.get_tensor_model_parallel_rank()
            self.world_size = parallel_state.get_tensor_model_parallel_world_size()
        self.explicit_expert_comm = is_expert and (self.world_size > 1 or self.expert_parallel)

    def multiply(self, x: Tensor, bias: Tensor | None, sequence_parallel: bool, reduce_gradient: bool) -> Tensor:
        """``x @ weight.T + bias``, with Megatron's communication and gradient accumulation."""
        return linear_with_grad_accumulation_and_async_allreduce(
            input=x,
            weight=self.weight,
            bias=bias,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            allreduce_dgrad=reduce_gradient,
            sequence_parallel=sequence_parallel,
        )

    def mark(self, reduced_with_experts: bool) -> None:
        """Tell Megatron's gradient reduction which data parallel group the parameters belong to."""
        for parameter in self.parameters():
            parameter.allreduce = not reduced_with_experts  # type: ignore[attr-defined]

    def set_extra_state(self, state: Any) -> None:
        """Transformer Engine's entry in the checkpoint is ignored."""

    def get_extra_state(self) -> None:
        return None


@named_by_branch
class TELinear(_Linear):
    """A linear whose whole weight is on every tensor parallel rank; other modes are not offered."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: Callable[..., Any],
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool,
        tp_comm_buffer_name: str | None = None,
        is_expert: bool = False,
        symmetric_ar_type: str | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        if is_expert or skip_weight_param_allocation or tp_group is not None or parallel_mode != "duplicated":
            raise ValueError("this TELinear is for parallel_mode='duplicated', without experts, with its own weight")
        super().__init__(input_size, output_size, config, skip_bias_add, is_expert=False)
        self.parallel_mode = parallel_mode
        shape = (output_size, input_size)
        self.weight = allocate_weight(shape, shape, config, init_method, partition_dim=0)
        self.register_parameter("bias", allocate_bias(output_size, config) if bias else None)
        self.mark(reduced_with_experts=False)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out = self.multiply(x, None if self.skip_bias_add else self.bias, False, False)
        return out, self.bias if self.skip_bias_add else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return sharded(self, {}, prefix, sharded_offsets)


class TEColumnParallelLinear(_Linear):
    """The weight's rows are split over the tensor parallel ranks."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[..., Any],
        gather_output: bool = False,
        bias: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        stride: int = 1,
    ) -> None:
        if gather_output or skip_weight_param_allocation:
            raise ValueError("Transformer Engine linear layers do not support gather_output = True")
        super().__init__(input_size, output_size, config, skip_bias_add, is_expert)
        self.parallel_mode = "column"
        self.sequence_parallel = config.sequence_parallel and self.world_size > 1
        shape = (divide(output_size, self.world_size), input_size)
        whole, ranks = (output_size, input_size), (self.rank, self.world_size)
        self.weight = allocate_weight(shape, whole, config, init_method, 0, ranks, is_expert)
        self.register_parameter("bias", allocate_bias(shape[0], config) if bias else None)
        self.mark(is_expert and self.expert_parallel)
        for parameter in self.parameters():
            mark_shard(parameter, dim=0)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        gather = self.sequence_parallel and not self.explicit_expert_comm
        reduce_gradient = self.world_size > 1 and not gather and not self.explicit_expert_comm
        out = self.multiply(x, None if self.skip_bias_add else self.bias, gather, reduce_gradient)
        return out, self.bias if self.skip_bias_add else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return sharded(self, {"weight": 0, "bias": 0}, prefix, sharded_offsets)


class TERowParallelLinear(_Linear):
    """The weight's columns are split over the tensor parallel ranks; their partial results are summed."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[..., Any],
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        stride: int = 1,
        tp_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        if not input_is_parallel:
            raise ValueError("Transformer Engine linear layers do not support input_is_parallel = False")
        super().__init__(input_size, output_size, config, skip_bias_add, is_expert)
        self.parallel_mode = "row"
        self.sequence_parallel = config.sequence_parallel and self.world_size > 1
        shape = (output_size, divide(input_size, self.world_size))
        whole, ranks = (output_size, input_size), (self.rank, self.world_size)
        self.weight = allocate_weight(shape, whole, config, init_method, 1, ranks, is_expert)
        self.register_parameter("bias", allocate_bias(output_size, config) if bias else None)
        self.mark(is_expert and self.expert_parallel)
        mark_shard(self.weight, dim=1)
        if self.bias is not None:
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out = self.multiply(x, None, False, False)
        if not self.explicit_expert_comm:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            out = reduce(out)
        if self.bias is None or self.skip_bias_add:
            return out, self.bias
        return out + self.bias, None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return sharded(self, {"weight": 1}, prefix, sharded_offsets)


def mark_shard(parameter: Tensor, dim: int) -> None:
    """Let Megatron's gradient norm and checkpoints see a shard, also where nothing was initialised."""
    if not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)


if not IS_0_16:
    MindSpeedTELinear = TELinear
    del TELinear
