"""The output head in place of mcore-bridge's: from hidden states to log-probabilities of the targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from megascend.changes import patch
from megascend.training.kernels.linear_divergence import TeacherDivergence, linear_divergence
from megascend.training.kernels.linear_logprobs import (
    LowRank,
    VocabShard,
    gather_logits,
    linear_cross_entropy,
    linear_logprobs,
)


class OutputHead:
    """Projection of the last pipeline stage's hidden states onto the vocabulary, a chunk of tokens at a time.

    The model's output layer remains a module of the model, for the hooks of Megatron's DDP and for checkpoints, but its forward
    only gathers the hidden states of sequence parallel ranks. Adapters of it append ``A x`` to them there
    (:mod:`megascend.training.lora.adapter_layers`); the ``lora_delta`` that multiplies those columns by B is passed to every
    call.
    """

    def __init__(self, model: Any, vocab_size: int, *, overlap_grad_reduce: bool) -> None:
        self._model = model
        size = parallel_state.get_tensor_model_parallel_world_size()
        group = parallel_state.get_tensor_model_parallel_group() if size > 1 else None
        rank = parallel_state.get_tensor_model_parallel_rank()
        cap = getattr(model, "logit_cap", None)  # of a family's class
        self.shard = VocabShard.for_rank(vocab_size, len(self.weight), rank, group, cap)  # type: ignore[reportArgumentType]
        self.vocab_size = vocab_size
        # Gradients may be accumulated directly unless DDP must be notified of them; for a weight shared with the embedding of
        # the same stage, the embedding's gradient notifies it.
        shared = model.share_embeddings_and_output_weights and model.pre_process
        self._direct = shared or not overlap_grad_reduce
        sequence_parallel = model.config.sequence_parallel and size > 1

        def gather_hidden(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
            # Each rank computes the hidden states' gradient for its vocabulary rows: the backward of both regions sums them.
            if sequence_parallel:
                return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True), None
            return copy_to_tensor_model_parallel_region(hidden), None

        patch(
            model.output_layer, "forward", gather_hidden, "hidden states are brought together; the loss projects them"
        )

    @property
    def weight(self) -> Tensor:
        """Weight [local rows, h]; the embedding's if they are tied."""
        if self._model.share_embeddings_and_output_weights:
            return self._model.shared_embedding_or_output_weight()
        return self._model.output_layer.weight

    @property
    def can_fuse(self) -> bool:
        """False for fp16: gradients computed before the loss scale is applied would underflow."""
        return self.weight.dtype != torch.float16

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        entropy: bool,
        lora_delta: LowRank | None = None,
        candidates: Tensor | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute fp32 [n] log-probabilities (and entropies) of ``targets`` [n] from ``hidden`` [batch, sequence, h (+ r)].

        Also those of ``candidates`` [n, K], fp32 [n, K].
        """
        states, down = self._split(hidden, lora_delta)
        return linear_logprobs(
            states, self.weight, targets, self.shard, entropy, self._direct, down, lora_delta, candidates, temperature
        )

    def cross_entropy(
        self,
        hidden: Tensor,
        targets: Tensor,
        coefficients: Tensor,
        loss_grad: float,
        lora_delta: LowRank | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Compute ``sum(-coefficients * logprobs)``, which will receive the gradient ``loss_grad``, and log-probabilities."""
        states, down = self._split(hidden, lora_delta)
        return linear_cross_entropy(
            states,
            self.weight,
            targets,
            coefficients,
            self.shard,
            loss_grad,
            self._direct,
            down,
            lora_delta,
            temperature,
        )

    def logits(self, hidden: Tensor, lora_delta: LowRank | None = None, rows: Tensor | None = None) -> Tensor:
        """Compute logits, fp32 [n, vocabulary] on the CPU, or only ``rows`` of them."""
        states, down = self._split(hidden, lora_delta)
        return gather_logits(states, self.weight, self.shard, down, lora_delta, rows)[:, : self.vocab_size]

    def logit_factors(self, hidden: Tensor, lora_delta: LowRank | None = None) -> tuple[Tensor, Tensor, float | None]:
        """Return hidden states [n, h], this rank's rows of tokens of the weight, and the cap of their product."""
        states, _ = self._split(hidden.detach(), lora_delta)
        return states, self.weight.detach()[: self.shard.rows], self.shard.cap

    def divergence(
        self,
        hidden: Tensor,
        targets: Tensor,
        divergence: TeacherDivergence,
        teacher_states: Tensor,
        lora_delta: LowRank | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute fp32 [n] log-probabilities, and divergences from a teacher by its last hidden states [n, its h]."""
        states, down = self._split(hidden, lora_delta)
        return linear_divergence(
            states, self.weight, targets, self.shard, teacher_states, divergence, self._direct, down, lora_delta
        )

    def _split(self, hidden: Tensor, lora_delta: LowRank | None) -> tuple[Tensor, Tensor | None]:
        """Split into hidden states [n, h] and the columns that adapters have appended [n, r]."""
        rows = hidden.flatten(0, 1)
        if lora_delta is None:
            return rows, None
        states, down = rows.split([self.weight.shape[1], lora_delta.up.shape[1]], dim=1)
        return states.contiguous(), down.contiguous()


@dataclass(frozen=True)
class HeadOutput:
    """Output of the head for one micro batch; see :class:`megascend.engines.base.Output`.

    Attributes:
        hidden: [batch, sequence, h (+ r)], with the columns that adapters of the output layer have appended.
        targets: int64 [n].
        lora_delta: those adapters' contribution to the logits, or None.
        prediction: output of the head for multi-token prediction, which shares the projection; or None.
        temperature: divides the logits of log-probabilities.
    """

    head: OutputHead
    hidden: Tensor
    targets: Tensor
    lora_delta: LowRank | None
    prediction: HeadOutput | None = None
    temperature: float = 1.0

    @property
    def fuses_loss(self) -> bool:
        return self.head.can_fuse

    def select(self, rows: Tensor, targets: Tensor) -> HeadOutput:
        lora_delta = None if self.lora_delta is None else self.lora_delta.select(rows)
        return replace(self, hidden=self.hidden.flatten(0, 1)[rows][None], targets=targets, lora_delta=lora_delta)

    def cross_entropy(self, coefficients: Tensor, loss_grad: float) -> tuple[Tensor, Tensor]:
        return self.head.cross_entropy(
            self.hidden, self.targets, coefficients, loss_grad, self.lora_delta, self.temperature
        )

    def logprobs(self, entropy: bool, candidates: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.head.logprobs(self.hidden, self.targets, entropy, self.lora_delta, candidates, self.temperature)

    def logits(self, rows: Tensor | None = None) -> Tensor:
        return self.head.logits(self.hidden, self.lora_delta, rows)

    def logit_factors(self) -> tuple[Tensor, Tensor, float | None]:
        return self.head.logit_factors(self.hidden, self.lora_delta)

    def divergence(self, divergence: TeacherDivergence, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.head.divergence(self.hidden, self.targets, divergence, states, self.lora_delta)
