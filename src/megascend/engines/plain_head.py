"""A model's last step where one rank has the whole of it: hidden states in, log-probabilities out, without whole logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascend.kernels.linear_logprobs import (
    LowRank,
    VocabShard,
    gather_logits,
    linear_cross_entropy,
    linear_logprobs,
)


@dataclass(frozen=True)
class HeadOutput:
    """The head's view of one micro batch; see :class:`megascend.engines.base.Output`.

    Attributes:
        hidden: [n, h].
        weight: [vocabulary, h]; its ``main_grad``, where it is trained, takes its gradient in fp32.
        targets: int64 [n].
        vocab_size: rows of the weight that stand for tokens.
        down, lora_delta: ``A x`` [n, r] of adapters of this layer, and what it adds to the logits; or both None.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    vocab_size: int
    down: Tensor | None = None
    lora_delta: LowRank | None = None

    @property
    def shard(self) -> VocabShard:
        """The whole vocabulary."""
        return VocabShard(0, self.vocab_size)

    @property
    def fuses_loss(self) -> bool:
        """False for fp16, where gradients formed before the loss scale is applied would underflow."""
        return self.weight.dtype != torch.float16

    def cross_entropy(self, coefficients: Tensor, loss_grad: float) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(
            self.hidden,
            self.weight,
            self.targets,
            coefficients,
            self.shard,
            loss_grad,
            direct_weight_gradient=True,
            down=self.down,
            lora_delta=self.lora_delta,
        )

    def logprobs(self, entropy: bool) -> tuple[Tensor, Tensor | None]:
        return linear_logprobs(
            self.hidden,
            self.weight,
            self.targets,
            self.shard,
            entropy,
            direct_weight_gradient=True,
            down=self.down,
            lora_delta=self.lora_delta,
        )

    def logits(self, rows: Tensor | None = None) -> Tensor:
        whole = gather_logits(self.hidden, self.weight, self.shard, self.down, self.lora_delta, rows)
        return whole[:, : self.vocab_size]
