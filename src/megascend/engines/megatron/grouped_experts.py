"""``moe.experts``: experts as grouped GEMMs with permutation by indices, chosen when a model is built.

All experts of a layer are one tensor, and their products one launch each: forward, input gradient and weight gradient. Megatron's
all-to-all dispatcher uses indices in place of masks, splits and concatenations: if one rank has all experts, the host never waits
for the device; under expert parallelism it only waits for the sizes of the exchanges, as upstream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megascend.changes import changed, patch
from megascend.config import Moe, Precision
from megascend.errors import ConfigError, PlatformError
from megascend.training.kernels.token_rows import Combine, Permutation, Spread, TokenRows, chunk_order, token_rows
from megascend.training.lora.grouped import SegmentedLinear, Segments, accumulate, kernel_of, product

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertSegments(Segments):
    """Segments of rows by expert, in the form of Megatron's ``tokens_per_expert``."""

    def tolist(self) -> ExpertSegments:
        """Return self: ``TEGroupedMLP`` calls this and only passes the result on; a real list would wait for the device."""
        return self


class ExpertWeights:
    """Stacked views of the weights ``weight0``, ``weight1``... of one grouped layer, which remain Megatron's parameters.

    Attributes:
        parameters: parameters of each expert, [out, in].
        stacked: [experts, out, in], a view of all of them; of quantised ones only while the layer runs.
        quantised: the parameters have values only while the layer runs.
        grads: float32, of the same shape, a view of Megatron's gradient buffer; None for frozen weights.
        ready: reports a parameter's complete gradient to Megatron's DDP, if that starts its reduction; else None.
    """

    def __init__(self, layer: Any, *, quantised: bool) -> None:
        self.quantised = quantised
        names = [f"weight{index}" for index in range(layer.num_gemms)]
        self.parameters: list[Any] = [getattr(layer, name) for name in names]
        self._biases = [getattr(layer, f"bias{index}") for index in range(layer.num_gemms)] if layer.use_bias else []
        self._returns_biases = layer.te_return_bias  # for add_biases
        # Megatron's buffers hold parameters and gradients in the reverse order of the modules' parameters. Registered in
        # descending order, they are contiguous in ascending order in the buffers.
        for name in reversed(names):
            layer._parameters[name] = layer._parameters.pop(name)
        changed(f"order of the parameters of {type(layer).__name__}", "last expert first, so that buffers are in order")
        # Until build_views() builds the view of all experts.
        self.stacked = self.parameters[0].data
        self.grads: Tensor | None = None
        self.ready: Callable[[Any], None] | None = None
        # The weights are not inputs of _Product: without this input autograd would skip the backward pass of the first layer.
        self._root = torch.empty(0, requires_grad=True)
        patch(layer, "forward", self._forward, "products of all experts in one launch")

    def build_views(self, ready: Callable[[Any], None] | None) -> None:
        """Build the views of parameters and gradients in Megatron's DDP buffers; copy frozen parameters into one tensor."""
        if self.quantised:
            return
        values = [parameter.data for parameter in self.parameters]
        stacked = one_view(values)
        if stacked is None:
            stacked = torch.stack(values)
            # They remain Megatron's parameters; only their memory moves.
            for parameter, part in zip(self.parameters, stacked, strict=True):
                parameter.data = part
        self.stacked, self.ready = stacked, ready
        if not self.parameters[0].requires_grad:
            return
        self.grads = one_view([parameter.main_grad for parameter in self.parameters])
        if self.grads is None:
            raise ConfigError(
                "moe.experts: grouped: gradients of a layer's experts are unevenly spaced in Megatron's buffers; set "
                "optimizer.overlap_grad_reduce: false"
            )

    def check(self) -> None:
        """Raise PlatformError if the parameters have been moved since :meth:`build_views`."""
        last = self.parameters[-1]
        # Addresses only: no wait for the device, so it can run in every forward pass.
        if self.parameters[0].data_ptr() != self.stacked.data_ptr() or last.data_ptr() != self.stacked[-1].data_ptr():
            raise PlatformError(
                "parameters of experts were moved after the model had been built; set moe.experts: upstream"
            )

    def _forward(self, rows: Tensor, segments: ExpertSegments) -> tuple[Tensor, Tensor | None]:
        out = self._product(rows, segments)
        if not self._biases:
            return out, None
        biases = torch.stack(self._biases)
        return (out, biases) if self._returns_biases else (add_biases(out, biases, segments), None)

    def _product(self, rows: Tensor, segments: ExpertSegments) -> Any:
        if self.quantised:
            stacked = one_view([parameter.data for parameter in self.parameters])
            assert stacked is not None, "all weights of a layer are dequantised to one tensor"
            return SegmentedLinear.apply(rows, stacked.mT, None, segments, None)
        self.check()
        return _Product.apply(rows, self._root if self.grads is not None else None, self, segments)


def add_biases(out: Tensor, biases: Tensor | None, segments: ExpertSegments, probs: Tensor | None = None) -> Tensor:
    """Add its expert's bias to each row: as a product, so that its gradient is summed in the same order every time.

    Args:
        out: [rows, width]. ``biases``: [experts, width].
        probs: [rows, 1], factors of the biases; None: 1. ``TEGroupedMLP``, whose ``_apply_bias`` this replaces, has multiplied
            the activations by them already.
    """
    if biases is None:
        return out
    row = torch.arange(len(out), device=out.device, dtype=torch.int32)
    expert = torch.searchsorted(segments.ends, row, right=True)
    share = (expert[:, None] == torch.arange(len(biases), device=out.device)).to(out.dtype)
    return torch.addmm(out, share if probs is None else (share * probs).to(out.dtype), biases)


class _Product(torch.autograd.Function):
    """Grouped product of rows [n, in] to [n, out], which accumulates weight gradients into Megatron's buffer itself."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, root: Tensor | None, weights: ExpertWeights, segments: Segments) -> Tensor:
        # Rows are needed for the weights' gradient only; frozen experts keep no activations here.
        ctx.save_for_backward(None if root is None else rows)
        ctx.weights, ctx.segments = weights, segments
        return product(rows, weights.stacked.mT, segments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        # Autograd may pass an expanded gradient, that of a sum for example.
        grad, weights, segments = grads[0].contiguous(), ctx.weights, ctx.segments
        input_grad = product(grad, weights.stacked, segments) if ctx.needs_input_grad[0] else None
        (rows,) = ctx.saved_tensors
        if rows is not None:
            accumulate(weights.grads, grad, rows, segments)
            if weights.ready is not None:
                for parameter in weights.parameters:
                    weights.ready(parameter)
        return input_grad, None, None, None


def one_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view [len(tensors), ...] of tensors of one shape, evenly spaced in one storage; else None."""
    first, size = tensors[0], tensors[0].element_size()
    distances = {(b.data_ptr() - a.data_ptr()) for a, b in pairwise(tensors)}
    distance = distances.pop() // size if distances else first.numel()
    same_storage = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    same_shape = all(tensor.is_contiguous() and tensor.shape == first.shape for tensor in tensors)
    if distances or distance < first.numel() or not same_storage or not same_shape:
        return None
    return first.as_strided((len(tensors), *first.shape), (distance, *first.stride()))


class IndexedDispatcher(MoEAlltoAllTokenDispatcher):
    """Replacement of a layer's all-to-all dispatcher that permutes by indices.

    Attributes:
        rows: the rows of the current micro batch before the exchange.
        order: permutation of received rows to expert order, and its inverse; None: they are in order.
    """

    def __init__(self, built: MoEAlltoAllTokenDispatcher) -> None:
        # Takes over the state of the layer's dispatcher instead of building it again from settings.
        vars(self).update(vars(built))
        self.rows: TokenRows | None = None
        self.order: tuple[Tensor, Tensor] | None = None
        self._single_rank = self.tp_size == self.ep_size == 1

    def preprocess(self, routing_map: Tensor) -> Tensor:
        counts = super().preprocess(routing_map)
        # Kept on the device: upstream moves its own references to the host.
        self._counts, self._received = counts, getattr(self, "num_global_tokens_per_local_expert", None)
        return counts

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Any:
        # On a single rank no size is needed on the host; upstream would copy the counts there, and wait.
        return tokens_per_expert if self._single_rank else super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)  # type: ignore[reportArgumentType]

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sort rows [tokens * k, h] and their probabilities by expert."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        hidden = hidden_states.view(-1, hidden_states.shape[-1])
        self.hidden_shape_before_permute = hidden.shape
        self.tokens_per_expert = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        self.rows = rows = token_rows(routing_map, self.config.moe_router_topk)
        self.reversed_local_input_permutation_mapping = rows.token
        spread: Any = Spread.apply(hidden, rows.token, rows.row_index)
        return spread, probs.reshape(-1).index_select(0, rows.choice)

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, ExpertSegments, Tensor]:
        """Sort the received rows by expert; return them, their segments and their probabilities."""
        tokens, probs = self.gather_slices(global_input_tokens), self.gather_slices(global_probs)
        # Upstream's points at which the host may have to wait for sizes, in upstream's order.
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        self.tokens_per_expert, self.order = None, None
        if self.num_local_experts > 1 and not self._single_rank:
            assert self._received is not None
            self.order = chunk_order(self._received.view(-1, self.num_local_experts), len(tokens))
        segments = ExpertSegments(self._counts.cumsum(0).int())
        return self.sort_received(tokens), segments, self.sort_received(probs)

    def gather_slices(self, values: Tensor) -> Tensor:
        """Gather ``values`` of all tensor parallel ranks that share these experts."""
        if self.tp_size == 1:
            return values
        splits = None if self.output_splits_tp is None else self.output_splits_tp.tolist()
        return gather_from_sequence_parallel_region(values, group=self.tp_group, output_split_sizes=splits)

    def sort_received(self, values: Tensor) -> Tensor:
        """Sort received rows from (source rank, expert) order by expert."""
        if self.order is None:
            return values
        sorted_rows: Any = Permutation.apply(values, *self.order)
        return sorted_rows

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Undo :meth:`dispatch_postprocess`."""
        if self.order is not None:
            order, inverse = self.order
            hidden_states = Permutation.apply(hidden_states, inverse, order)  # type: ignore[reportAssignmentType]
        if self.tp_size > 1:
            splits = None if self.output_splits_tp is None else self.output_splits_tp.tolist()
            # As upstream: ranks' partial results are summed in the dtype of the probabilities.
            dtype = hidden_states.dtype
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs.dtype), group=self.tp_group, input_split_sizes=splits
            ).to(dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Sum each token's rows, in the shape of the layer's input."""
        assert self.rows is not None
        combined: Any = Combine.apply(permutated_local_input_tokens, self.rows.token, self.rows.row_index)
        return combined.view(self.hidden_shape)


def is_enabled(moe: Moe, config: Any, precision: Precision, device: torch.device, *, overlapped: bool) -> bool:
    """Check whether experts are to be grouped. ``auto`` groups them on GPUs, if that is possible.

    Args:
        overlapped: gradients are reduced during the backward pass, in buckets that may divide a layer's experts.
    """
    if moe.experts == "upstream":
        return False
    problem = _unsupported(config, precision, device)
    if moe.experts == "grouped":
        if problem:
            raise ConfigError(f"moe.experts: grouped, but {problem}; set moe.experts: upstream")
        return True
    if not config.num_moe_experts or device.type != "cuda":
        return False
    if problem is None and overlapped:
        problem = "optimizer.overlap_grad_reduce may divide a layer's gradients (set moe.experts: grouped to try)"
    if problem:
        _logger.info("moe.experts: auto: experts are Transformer Engine's: %s", problem)
    return problem is None


def _unsupported(config: Any, precision: Precision, device: torch.device) -> str | None:
    if not config.num_moe_experts:
        return f"{config.hf_model_type} has no experts"
    if device.type == "npu":
        return "on NPUs experts are those of the provider's packages"
    if device.type == "cuda":
        if kernel_of(device) != "torch":
            return f"torch's grouped products need compute capability 9.0, and this is {torch.cuda.get_device_name(device)}"
        if precision != "bf16":
            return f"torch's grouped products need precision bf16, not {precision}"
        width = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        if config.hidden_size % 8 or width % 8:
            return f"sizes must be multiples of 8, not {config.hidden_size} and {width}"
    for name in ("moe_permute_fusion", "moe_shared_expert_overlap", "fp8"):
        if getattr(config, name, None):
            return f"the model has {name}"
    if config.moe_expert_capacity_factor is not None:
        return "tokens above a capacity are dropped"
    return None


def install(
    chunks: Sequence[torch.nn.Module],
    device: torch.device,
    *,
    required: bool,
    quantised: Container[torch.nn.Module] = (),
) -> list[ExpertWeights]:
    """Patch every layer of experts in ``chunks``, before Megatron's DDP takes their parameters.

    Args:
        quantised: layers whose weights have values only while they run.
        required: raise for layers of other classes; otherwise log, and leave all layers unchanged.
    """
    layers: list[Any] = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    # All layers are checked before the first is patched.
    for layer in layers:
        experts, dispatcher = layer.experts, layer.token_dispatcher
        if not isinstance(experts, TEGroupedMLP) or type(dispatcher) is not MoEAlltoAllTokenDispatcher:
            classes = f"the model has {type(experts).__name__} and {type(dispatcher).__name__}"
            if required:
                raise ConfigError(f"moe.experts: grouped, but {classes}; set moe.experts: upstream")
            _logger.info("moe.experts: auto: experts are upstream's: %s", classes)
            return []
    weights = []
    for layer in layers:
        dispatcher = IndexedDispatcher(layer.token_dispatcher)
        patch(layer, "token_dispatcher", dispatcher, "permutes by indices on the device")
        patch(layer.experts, "_apply_bias", add_biases, "takes the experts' segments")
        for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
            weights.append(ExpertWeights(linear, quantised=linear in quantised))
    if not weights:  # a pipeline stage of dense layers only
        return []
    method = "torch._grouped_mm" if kernel_of(device) == "torch" else "a loop of products (no grouped kernel here)"
    _logger.info(
        "experts are grouped: %d layers of experts by %s on %s; moe.experts: upstream switches it off",
        len(weights) // 2,
        method,
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )
    return weights


def release_routing(chunks: Sequence[Any]) -> None:
    """Let the dispatchers of all layers of experts forget autograd's graph once their layer has run.

    A dispatcher keeps the routing probabilities until its layer runs again, and with them the graph. Under recomputation, that
    graph ends at a copy of the layer's input with its gradient: two activations a layer, which outlive the backward pass.
    """
    for layer in (module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)):
        dispatcher: Any = layer.token_dispatcher
        if not isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
            continue

        def finish(*rows: Any, dispatcher: Any = dispatcher, upstream: Any = dispatcher.combine_postprocess) -> Any:
            output = upstream(*rows)
            dispatcher.probs = dispatcher.probs.detach()
            return output

        patch(dispatcher, "combine_postprocess", finish, "forgets the graph of the layer")


def build_views(weights: Sequence[ExpertWeights], chunks: Sequence[Any]) -> None:
    """Build the views of all :class:`ExpertWeights`, after DDP has wrapped the chunks."""
    groups: dict[Any, Any] = {}
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_grad_reduce:
            groups.update(dict.fromkeys(chunk.param_to_bucket_group, chunk))

    def ready(parameter: Any) -> None:
        chunk = groups[parameter]
        options = [chunk.force_all_reduce] if hasattr(chunk, "force_all_reduce") else []  # not in 0.15
        chunk.param_to_bucket_group[parameter].register_grad_ready(parameter, *options)

    for layer_weights in weights:
        layer_weights.build_views(ready if groups else None)
