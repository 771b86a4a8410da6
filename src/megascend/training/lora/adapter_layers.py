"""Add ``scaling * B A x`` to ``W x``, with each token's adapter. Called by the hooks that an engine adds to its layers."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascend.errors import ConfigError
from megascend.training.kernels.low_rank import LowRank
from megascend.training.kernels.token_rows import Permutation
from megascend.training.lora.grouped import SegmentedLinear
from megascend.training.lora.segments import ExpertAdapterRows, TokenSegments
from megascend.training.lora.stacked_adapters import StackedAdapters
from megascend.training.lora.target_modules import TargetModule, matches

AdapterSlot = tuple[int, int, TargetModule]
"""An adapted layer: index of its shape group, its index in the group, target module."""


class AdapterLayers:
    """Adapters that a model's layers currently apply, and the arithmetic for each kind of layer.

    Args:
        exchange: communicates ``A x`` from the ranks that apply A to those that apply B; None: they are the same.
        sequence_parallel: tensor parallel ranks hold slices of the tokens between layers.
        sequence_first: layers see the tokens of a plain batch as [sequence, batch], not [batch, sequence].

    Attributes:
        stacked: adapters of the current call, or None while adapters are off.
        segments: per-token adapter segments of the current micro batch.
        output, head: the output layer and the scalar head, with the index of their shape groups; None if they are not adapted.
        linear: the adapted linear layers by module.
    """

    def __init__(
        self,
        *,
        exchange: Callable[[Tensor, TargetModule], Tensor] | None = None,
        sequence_parallel: bool = False,
        sequence_first: bool = False,
    ) -> None:
        self._exchange, self._sequence_parallel = exchange, sequence_parallel
        self.sequence_first = sequence_first
        self.stacked: StackedAdapters | None = None
        self.segments: TokenSegments | None = None
        self.output: tuple[int, TargetModule] | None = None
        self.head: tuple[int, TargetModule] | None = None
        self.linear: dict[Any, AdapterSlot] = {}
        self._not_called: dict[int, str] = {}
        self._root = torch.empty(0, requires_grad=True)  # makes autograd call LookUp.backward; token ids cannot

    @property
    def mixed(self) -> TokenSegments | None:
        """The micro batch's segments, if several adapters are active."""
        return self.segments if self.stacked is not None and len(self.stacked.adapters) > 1 else None

    def exchange(self, down: Tensor, target: TargetModule) -> Tensor:
        """Communicate ``A x`` from the ranks that apply A to those that apply B."""
        return down if self._exchange is None else self._exchange(down, target)

    def watch(self, output: Tensor) -> None:
        """Restore this micro batch's segments when its backward pass begins, for layers that are recomputed."""
        if self.stacked is not None and output.requires_grad:
            segments = self.segments
            # With pipelining, ``segments`` is already a later micro batch's at the time of the backward pass.
            output.register_hook(lambda _: setattr(self, "segments", segments))

    def deltas(self, module: Any) -> list[tuple[slice, Tensor]]:
        """Return the micro batch's additions to the weight of a linear layer: (tokens, scaling * B A [out, in]) for each adapter.

        Adapters that do not act on the layer are left out.
        """
        if self.stacked is None or module not in self.linear:
            return []
        shape_group, layer, target = self.linear[module]
        stacked, segments = self._active()
        a, _, b, _ = stacked.factors(shape_group, layer, segments.single)
        return [(tokens, (a[index] @ b[index]).mT) for index, tokens in adapted_segments(stacked, segments, target)]

    # --- layers that a model may leave out ---

    def expect_call(self, target: TargetModule) -> None:
        """Let :meth:`require_called` raise until this layer has been called."""
        self._not_called[id(target.module)] = target.slices[0].name

    def record_call(self, target: TargetModule, states: Tensor | None) -> None:
        """Record the call of a layer.

        Args:
            states: [..., features], checked to have a row for each token; None: its rows are not those of the tokens.
        """
        self._not_called.pop(id(target.module), None)
        if states is None:
            return
        _, segments = self._active()
        # Rows of one adapter need no tokens, unless these draw their dropout.
        if segments.single is not None and segments.keys is None and not target.is_expert:
            return
        tokens, rows = len(segments.adapter_index), states.shape[:-1].numel()
        if rows != tokens:
            raise ConfigError(
                f"{target.slices[0].name} computes {rows} rows in a micro batch of {tokens} tokens, whose adapters are unknown; "
                "leave it out of adapters.targets"
            )

    def require_called(self) -> None:
        """Check after a forward pass that all layers of :meth:`expect_call` were called."""
        if self.stacked is not None and self._not_called:
            raise ConfigError(
                f"the model does not call its layer {next(iter(self._not_called.values()))}, so adapters of it would have no "
                "effect; leave it out of adapters.targets"
            )

    # --- arithmetic ---

    def to_linear(self, shape_group: int, layer: int, target: TargetModule, x: Tensor, out: Tensor) -> Tensor:
        """Return ``out`` plus the adapters' part of a linear layer; both are [..., features]."""
        stacked, segments = self._active()
        if target.rows != "tokens":
            segments = _tower_segments(segments, target, x.shape[:-1].numel())
            if segments is None:  # the dummy image of a micro batch without images
                return out
            if torch.is_grad_enabled() and not x.requires_grad:
                # Below the first adapter nothing requires a gradient, and autograd would leave out that adapter's factors.
                x = x.detach().requires_grad_(True)
        a, a_grads, b, b_grads = stacked.factors(shape_group, layer, segments.single)
        # Only row parallel layers get all tokens as input, the others this rank's slice; only column parallel ones return all.
        before = segments.full if target.split == "row" else segments.local
        after = segments.full if target.split == "column" else segments.local
        x = drop(x, stacked, segments, target, local=self._sequence_parallel and target.split != "row")
        down = SegmentedLinear.apply(x.flatten(0, -2), a, a_grads, before, None).unflatten(0, x.shape[:-1])
        down = self.exchange(down, target)
        total = SegmentedLinear.apply(down.flatten(0, -2), b, b_grads, after, out.flatten(0, -2))
        return total.view(out.shape)

    def to_experts(self, shape_group: int, layer: int, rows: ExpertAdapterRows, x: Tensor, out: Tensor) -> Tensor:
        """Add the adapters' part of a product of experts, x [rows, features], to ``out``."""
        assert self.stacked is not None
        a, a_grads, b, b_grads = self.stacked.factors_of_experts(shape_group, layer)
        if rows.order is None:
            down = SegmentedLinear.apply(x, a, a_grads, rows.segments, None)
            return SegmentedLinear.apply(down, b, b_grads, rows.segments, out)
        # Grouped products need sorted rows; only the delta is moved back, as the base output is in order.
        down = SegmentedLinear.apply(Permutation.apply(x, rows.order, rows.inverse), a, a_grads, rows.segments, None)
        delta = SegmentedLinear.apply(down, b, b_grads, rows.segments, None)
        return out + Permutation.apply(delta, rows.inverse, rows.order)

    def to_embedding(self, shape_group: int, target: TargetModule, ids: Tensor, out: Tensor) -> Tensor:
        """Add the adapters' part of the embedding of ``ids`` [batch, sequence] to ``out``.

        ``out`` is [batch, sequence, h], or this rank's slice [sequence, batch, h] under sequence parallelism.
        """
        stacked, segments = self._active()
        if not adapted_segments(stacked, segments, target):
            return out
        a, a_grads, b, b_grads = stacked.factors(shape_group, 0, segments.single)
        adapter_index = None if segments.single is not None else segments.adapter_index
        down = LookUp.apply(self._root, ids, adapter_index, target.in_start, a, a_grads)
        if self._sequence_parallel:
            # Megatron's layers are sequence first.
            down = down.transpose(0, 1).contiguous()
        down = self.exchange(down, target)
        return SegmentedLinear.apply(down.flatten(0, -2), b, b_grads, segments.local, out.flatten(0, -2)).view(
            out.shape
        )

    def values(self, x: Tensor, out: Tensor) -> Tensor:
        """Return a scalar head's values, computed by the head of each token's adapter instead of the model's.

        Args:
            x: [..., h], the head's input for this rank's tokens.
            out: fp32, the values of the model's head: [..., labels], or without that dimension for one label.
        """
        if self.stacked is None or self.head is None:
            return out
        stacked, segments = self._active()
        a, a_grads, _, _ = stacked.factors(self.head[0], 0, segments.single)
        # The first row of A is the weight [labels, h] of each adapter's head.
        weight, grads = (factor[..., 0].unflatten(-1, (-1, x.shape[-1])).mT for factor in (a, a_grads))
        # In fp32, as the model's head.
        rows = SegmentedLinear.apply(x.flatten(0, -2).float(), weight.float(), grads, segments.local, None)
        values = rows.view(out.shape)
        base = [index for index, adapter in enumerate(stacked.adapters) if adapter is None]
        if not base:
            return values
        tokens = segments.adapter_index[segments.local_slice]
        is_base = torch.isin(tokens, tokens.new_tensor(base))
        return torch.where(is_base[:, None], out.view(rows.shape), rows).view(out.shape)

    def down_of_output(self, x: Tensor) -> Tensor | None:
        """Return ``A x`` [..., r] of the output layer's input; None if no adapter of the micro batch acts on that layer."""
        if self.lora_delta(self.segments) is None:
            return None
        assert self.output is not None
        stacked, segments = self._active()
        shape_group, target = self.output
        a, a_grads, _, _ = stacked.factors(shape_group, 0, segments.single)
        x = drop(x, stacked, segments, target, local=self._sequence_parallel)
        down = SegmentedLinear.apply(x.flatten(0, -2), a, a_grads, segments.local, None).unflatten(0, x.shape[:-1])
        return self.exchange(down, target)

    def lora_delta(self, segments: TokenSegments | None) -> LowRank | None:
        """Return the adapters' low-rank addition to a micro batch's logits; None if none acts on the output layer."""
        if self.stacked is None or self.output is None:
            return None
        assert segments is not None
        shape_group, target = self.output
        adapted = adapted_segments(self.stacked, segments, target)
        if not adapted:
            return None
        factors = self.stacked.factors(shape_group, 0, segments.single)
        return LowRank(factors.b, factors.b_grads, adapted)

    def _active(self) -> tuple[StackedAdapters, TokenSegments]:
        assert self.stacked is not None
        assert self.segments is not None, "the micro batch has no segments"
        return self.stacked, self.segments


def _tower_segments(segments: TokenSegments, target: TargetModule, rows: int) -> TokenSegments | None:
    """Return the segments of the rows of a vision tower's layer, all of which every rank has; None without images."""
    tower = segments.patches if target.rows == "patches" else segments.features
    if tower is not None and rows != len(tower.adapter_index):
        raise ConfigError(
            f"adapters: {target.slices[0].name} computes {rows} rows for {len(tower.adapter_index)} {target.rows} of images, so "
            "the adapters of its rows are unknown; leave it out of adapters.targets"
        )
    return tower


def start_graph(module: object, inputs: object, output: Tensor) -> Tensor:
    """Make a frozen embedding's output require a gradient: otherwise recomputation would skip the layers' backward pass."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def adapted_segments(
    stacked: StackedAdapters, segments: TokenSegments, target: TargetModule
) -> tuple[tuple[int, slice], ...]:
    """Return (index of the adapter in the stack, its tokens) of the micro batch's adapters that act on ``target``.

    Tokens are those of all ranks of the tensor parallel group, so that its ranks issue the same collectives.
    """
    name = target.slices[0].name
    acts = [adapter is not None and matches(name, adapter.lora.targets) for adapter in stacked.adapters]
    if segments.single is not None:
        return ((0, slice(0, len(segments.adapter_index))),) if acts[segments.single] else ()
    assert segments.full is not None
    adapted, start = [], 0
    for index, count in enumerate(segments.full.sizes()):
        if count and acts[index]:
            adapted.append((index, slice(start, start + count)))
        start += count
    return tuple(adapted)


class LookUp(torch.autograd.Function):
    """Lookup of this rank's part of ``A x`` for one-hot x: a row of the token's adapter, zero if another rank has it.

    The gradient goes straight into a float32 buffer, as in :class:`megascend.training.lora.grouped.SegmentedLinear`.
    """

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, ids: Tensor, adapter_index: Tensor | None, start: int, tables: Tensor, grads: Tensor
    ) -> Tensor:
        """Return [..., r] in the precision of ``tables``. Waits for no device.

        Args:
            root: any tensor that requires a gradient, since token ids cannot.
            ids: int64 [...], token ids of the whole vocabulary.
            adapter_index: int64 [n], every token's table; None if there is one.
            start: first token id of this rank.
            tables, grads: [tables, tokens of this rank, r], contiguous; ``grads`` in float32.
        """
        count, size, rank = tables.shape
        local = ids.flatten() - start
        is_local = ((local >= 0) & (local < size))[:, None]
        # Tokens of other ranks need a valid index: use row 0, which is masked below.
        rows = torch.where(is_local[:, 0], local, 0)
        if adapter_index is not None:
            rows = rows + adapter_index * size
        ctx.save_for_backward(rows, is_local)
        # Not by save_for_backward, which refuses tensors that change in between: other micro batches add their gradients here.
        ctx.grads = grads.view(count * size, rank)
        if not size:  # all of this rank's vocabulary is padding
            return tables.new_zeros(*ids.shape, rank)
        # where, not a product: a row of another rank's token may be NaN or inf.
        return torch.where(is_local, tables.view(count * size, rank)[rows], 0).view(*ids.shape, rank)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[None, ...]:
        (grad,) = outputs
        rows, is_local = ctx.saved_tensors
        if len(ctx.grads):
            values = torch.where(is_local, grad.reshape(len(rows), -1), 0).float()
            ctx.grads.index_put_((rows,), values, accumulate=True)
        return None, None, None, None, None, None


def token_keys(seed: int, step: int, input_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the dropout keys of the tokens at ``positions`` int64 [n] of a sample, in [0, 2^31).

    ``seed`` and ``step`` are the adapter's, ``input_ids`` the sample's: equal samples of one step share masks.
    """
    # crc32, not hash(): every process must draw the same masks.
    sample = zlib.crc32(input_ids.numpy().tobytes(), zlib.crc32(f"{seed}/{step}".encode()))
    return mix(positions + sample)


def mix(values: Tensor) -> Tensor:
    """Hash int64 values to [0, 2^31): the finaliser of MurmurHash3 (Appleby), on 31 bits."""
    bits = values & 0x7FFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return bits ^ (bits >> 16)


def drop(x: Tensor, stacked: StackedAdapters, segments: TokenSegments, target: TargetModule, *, local: bool) -> Tensor:
    """Apply each token's adapter's dropout to ``x`` [..., in] in training mode; ``local``: x is this rank's slice of the tokens.

    Each element's mask is a hash of (token key, layer, feature), so a tenant's masks are the same in its own or a mixed batch, in
    every layout, and when a layer is recomputed.
    """
    if segments.keys is None or not target.module.training:
        return x
    rows = segments.local_slice if local else slice(None)
    rate = stacked.dropouts[segments.adapter_index[rows]][:, None]
    # By name, which is the same in every layout; an index is not.
    layer = zlib.crc32((target.drawn_as or target.slices[0].name).encode())
    columns = mix(torch.arange(target.in_start, target.in_start + x.shape[-1], device=x.device) + layer)
    bits = mix(segments.keys[rows][:, None] ^ columns)
    # double: float32 cannot represent all thresholds below 2^31.
    keep = (bits >= rate.double() * 2.0**31).to(x.dtype) / (1 - rate).to(x.dtype)
    return x * keep.view(x.shape)
