"""What the losses of one ``forward_backward`` are divided by, for each adapter of its samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megascend.batch.loss_call import Gather, LossCall
from megascend.batch.losses import Loss
from megascend.batch.micro_batch import MicroBatch
from megascend.kernels.host_copy import to_device


class LossNormalizer:
    """Scales and sums the losses of one ``forward_backward``: each adapter's (or the model's own, "") by its own samples.

    Attributes:
        names: the adapters of all ranks' samples.
        loss_grad: the gradient that the engine's backward pass starts from at a micro batch's loss.
        function: calls the loss, micro batch by micro batch.
        figure_scale: what weights are multiplied by in the sums of figures: a power of two, so that nothing is rounded, with
            which sums in float32 stay finite where the averages are.

    Args:
        scales: [names], what each adapter's loss is multiplied by.
        count: what averages are divided by, of all adapters together.
    """

    def __init__(
        self,
        loss: Loss,
        names: list[str],
        scales: list[float],
        loss_grad: float,
        device: torch.device,
        gather_context: Gather | None,
        count: float,
    ) -> None:
        self.loss, self.names, self.loss_grad = loss, names, loss_grad
        self.function = LossCall(loss, gather_context)
        self.figure_scale = 2.0 ** -math.ceil(math.log2(max(count, 1.0)))
        self._scales = scales
        self._on_device = to_device(torch.tensor(scales), device)

    def of_tokens(self, batch: MicroBatch) -> Tensor | float:
        """The factor of each token's loss: [n], or one number for all."""
        return self._scales[0] if len(self.names) == 1 else self._on_device[batch.token_adapter_index]

    def of_pairs(self, batch: MicroBatch) -> Tensor | float:
        """The factor of each pair's loss: [pairs], or one number for all."""
        return self._scales[0] if len(self.names) == 1 else self._on_device[self._pair_adapter_index(batch)]

    def sums(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """``values`` [n] summed for each adapter: [names]."""
        return self._sum_per_adapter(values, batch.token_adapter_index)

    def pair_sums(self, values: Tensor, batch: MicroBatch) -> Tensor:
        """``values`` [pairs] summed for each adapter: [names]."""
        return self._sum_per_adapter(values, self._pair_adapter_index(batch))

    def _pair_adapter_index(self, batch: MicroBatch) -> Tensor:
        return to_device(torch.tensor(batch.adapter_index), batch.pairs.device)[batch.pairs[:, 0]]

    def _sum_per_adapter(self, values: Tensor, adapter_index: Tensor) -> Tensor:
        if len(self.names) == 1:
            return values.sum()[None]
        return values.new_zeros(len(self.names)).index_add(0, adapter_index, values)
