"""The adapters of one call, side by side in the model's precision: what the layers compute with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascend.kernels.host_copy import to_device
from megascend.lora.adapter import Adapter
from megascend.lora.layout import Family

Factors4 = tuple[Tensor, Tensor, Tensor, Tensor]

RANK_MULTIPLE = 8  # grouped kernels take rows of 16 bytes


@dataclass(frozen=True)
class Stacked:
    """One family's factors of all adapters of the stage, and where their gradients gather.

    Attributes:
        a, a_grads: [layers, adapters, experts, in, parts * rank], the first in the model's precision, the second float32. In
            memory ``in`` comes last, as grouped kernels want it; of embeddings, which read whole rows, it does not.
        b, b_grads: [layers, adapters, experts, parts * rank, out]. B carries the adapter's scaling and is zero outside
            the output rows of a part.
    """

    a: Tensor
    a_grads: Tensor
    b: Tensor
    b_grads: Tensor


class Stage:
    """Copies of adapters' factors, padded with zeros to one rank.

    Rows that pad a rank, and parts that an adapter does not target, are zero in A and B alike; their gradients are then
    zero too, so they need no mask. A ``None`` among the adapters stands for the base model alone.

    Attributes:
        adapters: whose factors these are.
        dropouts: float32 [adapters] on the device, each one's dropout.
    """

    def __init__(
        self, adapters: Sequence[Adapter | None], families: Sequence[Family], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._families, self._device = families, device
        self._serve(adapters)
        self.rank = common_rank(adapters)
        self.stacks = [self._allocate(family, dtype, device) for family in families]
        self._masks = [part_masks(family, device) for family in families]
        self._whole = [len(family.one.parts[0].local_rows) == family.one.out_features for family in families]
        self._views: dict[tuple[int, int, int | None], Factors4] = {}

    def take(self, adapters: Sequence[Adapter | None]) -> bool:
        """Serve other adapters from now on, if they fit the memory that there is."""
        if len(adapters) != len(self.adapters) or common_rank(adapters) != self.rank:
            return False
        self._serve(adapters)
        for stack in self.stacks:  # whatever the last ones left where these have nothing
            stack.a.zero_()
            stack.b.zero_()
        return True

    def _serve(self, adapters: Sequence[Adapter | None]) -> None:
        self.adapters = tuple(adapters)
        rates = [0.0 if adapter is None else adapter.lora.dropout for adapter in adapters]
        self.dropouts = to_device(torch.tensor(rates), self._device)

    def _allocate(self, family: Family, dtype: torch.dtype, device: torch.device) -> Stacked:
        site = family.one
        lead = (len(family.sites), len(self.adapters), site.experts)
        inner = len(site.parts) * self.rank

        def zeros(dtype: torch.dtype) -> Tensor:
            if site.is_embedding:
                return torch.zeros(*lead, site.in_features, inner, dtype=dtype, device=device)
            return torch.zeros(*lead, inner, site.in_features, dtype=dtype, device=device).mT

        a, a_grads = zeros(dtype), zeros(torch.float32)
        b = torch.zeros(*lead, inner, site.out_features, dtype=dtype, device=device)
        return Stacked(a, a_grads, b, torch.zeros(b.shape, device=device))

    def fill(self) -> None:
        """Copy the adapters' present values in and zero the gradients."""
        for stack in self.stacks:
            stack.a_grads.zero_()
            stack.b_grads.zero_()
        for slot, adapter in enumerate(self.adapters):
            if adapter is None:
                continue
            rank, scaling = adapter.lora.rank, adapter.lora.scaling
            for span, values in adapter.views(adapter.values.detach()):
                stack = self.stacks[span.family]
                if span.factor == "a":
                    self._parts(span.family, stack.a.transpose(-1, -2), slot, rank).copy_(values)
                else:
                    target = self._parts(span.family, stack.b, slot, rank)
                    torch.mul(values.unsqueeze(2), self._masks[span.family] * scaling, out=target)

    def collect(self) -> None:
        """Add the gathered gradients to the adapters' own."""
        for slot, adapter in enumerate(self.adapters):
            if adapter is None:
                continue
            rank, scaling = adapter.lora.rank, adapter.lora.scaling
            for span, grads in adapter.views(adapter.grads):
                stack = self.stacks[span.family]
                if span.factor == "a":
                    grads.add_(self._parts(span.family, stack.a_grads.transpose(-1, -2), slot, rank))
                    continue
                found = self._parts(span.family, stack.b_grads, slot, rank)
                if found.shape[2] == 1 and self._whole[span.family]:
                    grads.add_(found[:, :, 0], alpha=scaling)
                else:
                    # where, not a product: outside its rows a part's gradient may be anything.
                    own = torch.where(self._masks[span.family] > 0, found, 0.0)
                    grads.add_(own.sum(2), alpha=scaling)
            adapter.accumulated = True

    def factors(self, family: int, layer: int, slot: int | None) -> Factors4:
        """(A, its gradients, B, its gradients) of one layer: [adapters * experts, ...], or of one adapter of a dense layer."""
        key = (family, layer, slot)
        if key not in self._views:
            stack = self.stacks[family]
            one = slice(None) if slot is None else slice(slot, slot + 1)
            a, a_grads, b, b_grads = (
                tensor[layer, one].flatten(0, 1) for tensor in (stack.a, stack.a_grads, stack.b, stack.b_grads)
            )
            self._views[key] = a, a_grads, b, b_grads
        return self._views[key]

    def _parts(self, family: int, of: Tensor, slot: int, rank: int) -> Tensor:
        """One adapter's rows, [layers, experts, parts, rank, x], of factors [layers, adapters, experts, parts * rank, x]."""
        parts = len(self._families[family].one.parts)
        return of[:, slot].unflatten(-2, (parts, self.rank))[..., :rank, :]


def common_rank(adapters: Sequence[Adapter | None]) -> int:
    """The rank that all are padded to: the largest; with several, a multiple that grouped kernels take."""
    largest = max((adapter.lora.rank for adapter in adapters if adapter is not None), default=1)
    return largest if len(adapters) == 1 else -(-largest // RANK_MULTIPLE) * RANK_MULTIPLE


def part_masks(family: Family, device: torch.device) -> Tensor:
    """float32 [parts, 1, out]: 1 where an output row belongs to a part."""
    site = family.one
    masks = torch.zeros(len(site.parts), 1, site.out_features)
    for number, part in enumerate(site.parts):
        masks[number, 0, part.local_rows] = 1
    return masks.to(device)
