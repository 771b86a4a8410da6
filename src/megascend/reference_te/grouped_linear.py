"""GroupedLinear: one weight per expert, each applied to its own run of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference_te.base import (
    MEGATRON_NAMES,
    Initializer,
    ReferenceModule,
    TrackerGetter,
    default_init,
    mark_tensor_parallel,
)
from megascend.reference_te.unsupported import refuse, refuse_settings


class GroupedLinear(ReferenceModule):
    """Weights ``weight0 .. weight{n-1}``, each ``[out, in]``; biases ``bias0 ..`` alike.

    Never communicates: megatron-core's token dispatcher does, and passes sizes that are already split.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: TrackerGetter | None = None,
        rng_tracker_name: str | None = None,
        init_method: Initializer | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | int | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        refused = {
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "ub_overlap_rs": ub_overlap_rs,
            "ub_overlap_ag": ub_overlap_ag,
            "delay_wgrad_compute": delay_wgrad_compute,
        }
        refuse_settings(type(self).__name__, refused, MEGATRON_NAMES)
        self._set_tp(tp_group, tp_size)
        if self.tp_size > 1 and parallel_mode is not None:
            refuse(
                f"GroupedLinear(parallel_mode={parallel_mode!r}, tp_size={self.tp_size})",
                "leave the communication to the token dispatcher (parallel_mode=None)",
            )
        self.num_gemms = num_gemms
        self.in_features = in_features
        self.out_features = out_features
        self.parallel_mode = parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.ub_name = ub_name
        self.save_original_input = save_original_input
        dtype = params_dtype or torch.get_default_dtype()
        for index in range(num_gemms):
            weight = self._add_parameter(
                f"weight{index}",
                (out_features, in_features),
                init_method or default_init,
                dtype,
                device,
                get_rng_state_tracker,
                rng_tracker_name,
            )
            mark_tensor_parallel(weight, True, 1 if parallel_mode == "row" else 0)
        for index in range(num_gemms):
            if not bias:
                setattr(self, f"bias{index}", torch.empty(0, dtype=dtype, device=device))
                continue
            parameter = self._add_parameter(f"bias{index}", (out_features,), torch.nn.init.zeros_, dtype, device)
            if parallel_mode == "row":
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            elif parallel_mode == "column":
                mark_tensor_parallel(parameter, True, 0)

    def forward(self, inp: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Any:
        """Apply weight ``i`` to the ``i``-th run of rows.

        Args:
            inp: ``[tokens, in]``, the rows of expert 0 first.
            m_splits: rows of each expert, ``num_gemms`` integers that sum to ``tokens``. Zero is fine: that expert's
                weight gets a zero gradient, so that gradient hooks fire for it.

        Returns:
            ``[tokens, out]``, or ``(out, [bias0, ...])`` with the biases not added if ``return_bias``.
        """
        splits = [int(rows) for rows in m_splits]
        rows = inp.numel() // inp.shape[-1]
        if len(splits) != self.num_gemms or sum(splits) != rows:
            raise ConfigError(f"m_splits={splits} must be {self.num_gemms} counts that sum to {rows} rows")
        pieces = []
        for index, piece in enumerate(inp.reshape(rows, inp.shape[-1]).split(splits)):
            bias = getattr(self, f"bias{index}").to(inp.dtype) if self.apply_bias else None
            pieces.append(F.linear(piece, getattr(self, f"weight{index}").to(inp.dtype), bias))
        out = torch.cat(pieces).view(*inp.shape[:-1], self.out_features)
        if self.return_bias:
            return out, [getattr(self, f"bias{index}").to(inp.dtype) for index in range(self.num_gemms)]
        return out

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, in={self.in_features}, out={self.out_features}, bias={self.use_bias}"
