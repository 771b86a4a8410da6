"""A norm and a column parallel linear in one layer, as Transformer Engine's LayerNormLinear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_npu
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.utils import divide
from mindspeed.flavour import IS_0_16, named_by_branch
from mindspeed.te.pytorch.module.linear import _Linear, mark_shard
from mindspeed.te.pytorch.module.shards import allocate_bias, allocate_weight, sharded
from torch import Tensor


@named_by_branch
class TELayerNormColumnParallelLinear(_Linear):
    """Parameters: ``layer_norm_weight`` (``layer_norm_bias``), ``weight`` and ``bias``.

    The norm's parameters are on the device whatever ``use_cpu_initialization`` says.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[..., Any],
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        stride: int = 1,
    ) -> None:
        if gather_output or is_expert or skip_weight_param_allocation:
            raise ValueError(
                "Transformer Engine linear layers do not support gather_output, experts, or a foreign weight"
            )
        super().__init__(input_size, output_size, config, skip_bias_add, is_expert)
        self.parallel_mode = "column"
        self.parallel_group = get_tensor_model_parallel_group()
        self.sequence_parallel = config.sequence_parallel and self.world_size > 1
        shape = (divide(output_size, self.world_size), input_size)
        ranks = (self.rank, self.world_size)
        self.weight = allocate_weight(shape, (output_size, input_size), config, init_method, 0, ranks)
        self.register_parameter("bias", allocate_bias(shape[0], config) if bias else None)
        for parameter in self.parameters():
            mark_shard(parameter, dim=0)
        self.layer_norm_weight = self._norm_parameter(torch.nn.init.ones_)
        layer_norm = config.normalization == "LayerNorm"
        self.register_parameter("layer_norm_bias", self._norm_parameter(torch.nn.init.zeros_) if layer_norm else None)
        self.mark(reduced_with_experts=False)

    def _norm_parameter(self, fill: Callable[[Tensor], Tensor]) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.empty(self.input_size, device="npu", dtype=self.config.params_dtype))
        fill(parameter)
        parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def _layernorm(self, x: Tensor) -> Tensor:
        eps = self.config.layernorm_epsilon
        return F.layer_norm(x, [self.input_size], self.layer_norm_weight, self.layer_norm_bias, eps)

    def _rmsnorm(self, x: Tensor) -> Tensor:
        scale = self.layer_norm_weight
        scale = 1 + scale if self.config.layernorm_zero_centered_gamma else scale
        return torch_npu.npu_rms_norm(x, scale, epsilon=self.config.layernorm_epsilon)[0]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        normed = self._layernorm(x) if self.config.normalization == "LayerNorm" else self._rmsnorm(x)
        bias = None if self.skip_bias_add else self.bias
        reduce_gradient = self.world_size > 1 and not self.sequence_parallel
        out = self.multiply(normed, bias, self.sequence_parallel, reduce_gradient)
        return out, self.bias if self.skip_bias_add else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return sharded(self, {"weight": 0, "bias": 0}, prefix, sharded_offsets)


if not IS_0_16:
    MindSpeedTELayerNormColumnParallelLinear = TELayerNormColumnParallelLinear
    del TELayerNormColumnParallelLinear
