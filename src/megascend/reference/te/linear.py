"""Linear and LayerNormLinear, plain or tensor parallel, with or without sequence parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megascend.errors import ConfigError
from megascend.reference.te.base import (
    MEGATRON_NAMES,
    Initializer,
    ReferenceModule,
    TrackerGetter,
    default_init,
    divide_exactly,
    mark_tensor_parallel,
)
from megascend.reference.te.collectives import copy_to_ranks, gather_from_ranks, sum_and_scatter, sum_over_ranks
from megascend.reference.te.norms import layer_norm, rms_norm
from megascend.reference.te.unsupported import refuse, refuse_settings

PARALLEL_MODES = (None, "column", "row")


class _LinearBase(ReferenceModule):
    """Base of linear layers: weight ``[out, in]``, bias ``[out]`` and the collectives around the product.

    ``parallel_mode`` is read at every forward, not fixed at construction: megatron-core and mcore-bridge set it to
    None on layers whose collectives they drive themselves (overlapped shared experts).
    """

    def __init__(
        self,
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
        parameters_split: Any = None,
        device: torch.device | str | int | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        refused = {
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "parameters_split": parameters_split,
            "ub_overlap_ag": ub_overlap_ag,
            "ub_overlap_rs": ub_overlap_rs,
            "ub_overlap_rs_dgrad": ub_overlap_rs_dgrad,
            "ub_bulk_dgrad": ub_bulk_dgrad,
            "ub_bulk_wgrad": ub_bulk_wgrad,
            "delay_wgrad_compute": delay_wgrad_compute,
            "symmetric_ar_type": symmetric_ar_type,
        }
        refuse_settings(type(self).__name__, refused, MEGATRON_NAMES)
        if parallel_mode not in PARALLEL_MODES:
            raise ConfigError(f"parallel_mode must be one of {PARALLEL_MODES}, got {parallel_mode!r}")
        self._set_tp(tp_group, tp_size)
        self.parallel_mode = parallel_mode
        # A single rank has all tokens: there is nothing to gather, and no gradient to sum over ranks.
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.in_features = in_features
        self.out_features = out_features
        if parallel_mode == "column":
            self.out_features = divide_exactly(out_features, self.tp_size, "out_features")
        elif parallel_mode == "row":
            self.in_features = divide_exactly(in_features, self.tp_size, "in_features")
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.ub_name = ub_name
        self.save_original_input = save_original_input  # a memory hint of the fp8 path; autograd always saves it
        dtype = params_dtype or torch.get_default_dtype()
        weight = self._add_parameter(
            "weight",
            (self.out_features, self.in_features),
            init_method or default_init,
            dtype,
            device,
            get_rng_state_tracker,
            rng_tracker_name,
        )
        # In every mode: Transformer Engine marks the weights of duplicated layers as sharded, too.
        mark_tensor_parallel(weight, 1 if parallel_mode == "row" else 0)
        if bias:
            parameter = self._add_parameter("bias", (self.out_features,), torch.nn.init.zeros_, dtype, device)
            if parallel_mode == "row":
                # Added after the scatter, to this rank's tokens only: by this mark Megatron sums its gradients over TP.
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            elif parallel_mode == "column":
                mark_tensor_parallel(parameter, 0)
        else:
            self.bias = torch.empty(0, dtype=dtype, device=device)  # Transformer Engine has an empty tensor here too

    def _product(self, x: Tensor) -> Tensor:
        """Compute ``x @ weight.T`` (+ bias) with the collectives of ``parallel_mode``; ``x`` is ``[..., in]``."""
        communicates = self.tp_size > 1 and self.parallel_mode is not None
        if communicates and self.parallel_mode == "column":
            group = self._tp_group_for("input")
            x = gather_from_ranks(x, group) if self.sequence_parallel else copy_to_ranks(x, group)
        bias = self.bias.to(x.dtype) if self.apply_bias else None
        # In the dtype of the input, as Transformer Engine, also where parameters have another one.
        weight = self.weight.to(x.dtype)
        if not (communicates and self.parallel_mode == "row"):
            return F.linear(x, weight, bias)  # type: ignore[reportArgumentType]
        group = self._tp_group_for("output")
        # Each rank has a part of the inner dimension: with the bias in every product, the sum would hold it once a rank.
        partial = F.linear(x, weight)  # type: ignore[reportArgumentType]
        out = sum_and_scatter(partial, group) if self.sequence_parallel else sum_over_ranks(partial, group)
        return out if bias is None else out + bias  # added once, after the sum over ranks

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"parallel_mode={self.parallel_mode}, tp_size={self.tp_size}"
        )


class Linear(_LinearBase):
    """Linear layer ``[..., in] -> [..., out]`` (per-rank sizes under tensor parallelism).

    ``parallel_mode="column"`` splits ``out`` over ranks and takes the full input (under sequence parallelism: its
    slice of dim 0, which it gathers). ``"row"`` splits ``in`` and sums the outputs (under sequence parallelism: scatters
    the sum along dim 0). Returns ``out``, or with ``return_bias`` ``(out, bias)`` with the bias not added.
    """

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        out = self._product(inp)
        return (out, self.bias.to(inp.dtype)) if self.return_bias else out


class LayerNormLinear(_LinearBase):
    """A norm followed by a linear layer: ``[..., in] -> [..., out]``, as in :class:`Linear`.

    Returns ``out``, then the bias if ``return_bias``, then the norm's output if ``return_layernorm_output``: for this rank's
    tokens, not gathered under sequence parallelism (LoRA passes it to its own parallel layers).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        parallel_mode: str | None = None,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, parallel_mode=parallel_mode, device=device, **options)
        refused = {"return_layernorm_output_gathered": return_layernorm_output_gathered}
        refuse_settings(type(self).__name__, refused, MEGATRON_NAMES)
        if parallel_mode == "row":
            refuse("LayerNormLinear(parallel_mode='row')", "a norm needs the whole hidden dimension: use 'column'")
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ConfigError(f"normalization must be 'LayerNorm' or 'RMSNorm', got {normalization!r}")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        first = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        self.layer_norm_weight = self._norm_parameter("layer_norm_weight", first, device)
        self.layer_norm_bias = (
            self._norm_parameter("layer_norm_bias", torch.nn.init.zeros_, device)
            if normalization == "LayerNorm"
            else None
        )

    def _norm_parameter(self, name: str, init: Any, device: torch.device | str | int | None) -> torch.nn.Parameter:
        parameter = self._add_parameter(name, (self.in_features,), init, self.weight.dtype, device)  # type: ignore[reportArgumentType]
        # Each rank normalises its own tokens: by this mark Megatron sums the gradients over TP.
        parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        if self.layer_norm_bias is None:
            normed = rms_norm(inp, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        else:
            normed = layer_norm(inp, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)
        results = [self._product(normed)]
        if self.return_bias:
            results.append(self.bias.to(inp.dtype))
        if self.return_layernorm_output:
            results.append(normed)
        return results[0] if len(results) == 1 else tuple(results)


class GroupedLinear(ReferenceModule):
    """Linear layers of several experts: weights ``weight0 .. weight{n-1}``, each ``[out, in]``, and biases ``bias0 ..``.

    It does not communicate: megatron-core's token dispatcher does, and passes sizes that are already split.
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
        # As in linear layers: a single rank has all tokens.
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
            mark_tensor_parallel(weight, 1 if parallel_mode == "row" else 0)
        for index in range(num_gemms):
            if not bias:
                setattr(self, f"bias{index}", torch.empty(0, dtype=dtype, device=device))
                continue
            parameter = self._add_parameter(f"bias{index}", (out_features,), torch.nn.init.zeros_, dtype, device)
            if parallel_mode == "row":
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            elif parallel_mode == "column":
                mark_tensor_parallel(parameter, 0)

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
