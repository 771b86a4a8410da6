"""Base class of all reference layers: tensor parallel group, extra state, parameters and their attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megascend.errors import ConfigError, ProcessGroupError
from megascend.reference.te.unsupported import refuse

Initializer = Callable[[Tensor], Any]
TrackerGetter = Callable[[], Any]

DEFAULT_INIT_STD = 0.023  # Transformer Engine's default: normal(0, 0.023)
MEGATRON_NAMES = {
    "fuse_wgrad_accumulation": "gradient_accumulation_fusion",
    "delay_wgrad_compute": "delay_wgrad_compute",
    "ub_overlap_ag": "tp_comm_overlap",
    "ub_overlap_rs": "tp_comm_overlap",
    "ub_overlap_rs_dgrad": "tp_comm_overlap",
    "ub_bulk_dgrad": "tp_comm_overlap",
    "ub_bulk_wgrad": "tp_comm_overlap",
}


class ReferenceModule(torch.nn.Module):
    """Base class of the layers.

    It has the attributes of Transformer Engine's base class that megatron-core and mcore-bridge read: ``tp_group``,
    ``tp_size``, ``fp8``, ``fp8_calibration``, ``fp8_meta``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.tp_group: dist.ProcessGroup | None = None
        self.tp_size = 1

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: fp8 is never active."""

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Set the group of the layer's collectives; may be called after construction."""
        self.tp_group = tp_group

    def backward_dw(self) -> None:
        refuse("a delayed weight gradient", "switch delay_wgrad_compute off")

    def get_extra_state(self) -> Tensor:
        """Return an empty uint8 tensor, which Transformer Engine saves when fp8 is off."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Accept the empty state; refuse a state with fp8 scales."""
        if state is not None and state.numel() > 0:
            refuse("fp8 state in a checkpoint", "load it on CUDA with transformer-engine")

    def _set_tp(self, tp_group: dist.ProcessGroup | None, tp_size: int) -> None:
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.set_tensor_parallel_group(tp_group)

    def _tp_group_for(self, tensor: str) -> dist.ProcessGroup:
        if self.tp_group is None:
            raise ProcessGroupError(
                f"{type(self).__name__} with tp_size={self.tp_size} needs a tensor parallel group for its {tensor}: "
                "call set_tensor_parallel_group() first"
            )
        return self.tp_group

    def _add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        init: Initializer,
        dtype: torch.dtype,
        device: torch.device | str | int | None,
        get_rng_state_tracker: TrackerGetter | None = None,
        rng_tracker_name: str | None = None,
    ) -> Parameter:
        """Register and initialise a parameter, with megatron-core's random tracker if one is given.

        On the meta device nothing is initialised: the code that materialises the parameters does that.
        """
        parameter = Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.register_parameter(name, parameter)
        if parameter.is_meta:
            return parameter
        with torch.no_grad():
            if get_rng_state_tracker is None:
                init(parameter)
            else:
                fork_args = (rng_tracker_name,) if rng_tracker_name else ()
                with get_rng_state_tracker().fork(*fork_args):
                    init(parameter)
        return parameter


def default_init(weight: Tensor) -> None:
    """Apply Transformer Engine's default initialisation."""
    torch.nn.init.normal_(weight, mean=0.0, std=DEFAULT_INIT_STD)


def mark_tensor_parallel(parameter: Parameter, dim: int) -> None:
    """Set the attributes by which megatron-core distinguishes shards from replicas (gradient norm, checkpoints)."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = dim  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]


def divide_exactly(size: int, parts: int, setting: str) -> int:
    """Return ``size / parts``; raise ConfigError if it is not an integer."""
    if size % parts:
        raise ConfigError(f"{setting}={size} does not divide over a tensor parallel size of {parts}")
    return size // parts
