"""The output head in place of mcore-bridge's: from hidden states to log-probabilities of the targets."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from megascend.changes import patch
from megascend.engines.common.heads import PlainOutput
from megascend.training.kernels.low_rank import LowRank
from megascend.training.kernels.softmax import VocabShard


class OutputHead:
    """Projection of the last pipeline stage's hidden states onto the vocabulary, a chunk of tokens at a time.

    The model's output layer remains a module of the model, for the hooks of Megatron's DDP and for checkpoints, but its forward
    only gathers the hidden states of sequence parallel ranks. Adapters of it append ``A x`` to them there
    (:mod:`megascend.training.lora.adapter_layers`); :meth:`output` gets the ``lora_delta`` that multiplies those columns by B.
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

    def output(
        self,
        hidden: Tensor,
        targets: Tensor,
        lora_delta: LowRank | None = None,
        *,
        temperature: float = 1.0,
        prediction: PlainOutput | None = None,
    ) -> PlainOutput:
        """Return the output for a micro batch's ``targets`` [n].

        Args:
            hidden: [batch, sequence, h (+ r)], with the columns that adapters of the output layer have appended.
            lora_delta: those adapters' contribution to the logits, or None.
        """
        states, down, weight = hidden.flatten(0, 1), None, self.weight
        if lora_delta is not None:
            parts = states.split([weight.shape[1], lora_delta.up.shape[1]], dim=1)
            states, down = (part.contiguous() for part in parts)
        return PlainOutput(
            states,
            weight,
            targets,
            self.vocab_size,
            down,
            lora_delta,
            temperature,
            prediction=prediction,
            local=self.shard,
            direct=self._direct,
        )
