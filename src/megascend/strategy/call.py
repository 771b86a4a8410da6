"""What one ``forward_backward`` normalises by, for each adapter of its samples."""

from __future__ import annotations

import torch
from torch import Tensor

from megascend.kernels.host_copy import to_device
from megascend.train.loss_call import Gather, LossCall
from megascend.train.losses import Loss
from megascend.train.micro_batch import MicroBatch


class Call:
    """What one ``forward_backward`` normalises by: each adapter (or the model itself, "") by its own samples.

    Attributes:
        names: the adapters of all ranks' samples.
        upstream: the gradient that Megatron's schedule hands to a micro batch's loss.
        function: calls the loss, micro batch by micro batch.
    """

    def __init__(
        self,
        loss: Loss,
        names: list[str],
        scales: list[float],
        upstream: float,
        device: torch.device,
        gather_context: Gather | None,
    ) -> None:
        self.loss, self.names, self.upstream = loss, names, upstream
        self.function = LossCall(loss, gather_context)
        self._scales = scales
        self._on_device = to_device(torch.tensor(scales), device)

    def of_tokens(self, batch: MicroBatch) -> Tensor | float:
        """The factor of each token's loss: [n], or one number for all."""
        return self._scales[0] if len(self.names) == 1 else self._on_device[batch.token_slots]

    def of_pairs(self, batch: MicroBatch) -> Tensor | float:
        """The factor of each pair's loss: [pairs], or one number for all."""
        return self._scales[0] if len(self.names) == 1 else self._on_device[self._pair_slots(batch)]

    def sums(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """``values`` [n] summed for each adapter: [names]."""
        return self._by_slot(values, batch.token_slots)

    def pair_sums(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """``values`` [pairs] summed for each adapter: [names]."""
        return self._by_slot(values, self._pair_slots(batch))

    def _pair_slots(self, batch: MicroBatch) -> Tensor:
        return to_device(torch.tensor(batch.slots), batch.pairs.device)[batch.pairs[:, 0]]

    def _by_slot(self, values: Tensor, slots: Tensor) -> Tensor:
        if len(self.names) == 1:
            return values.sum()[None]
        return values.new_zeros(len(self.names)).index_add(0, slots, values)
