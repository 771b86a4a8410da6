"""A head for multi-token prediction on the last pipeline stage (DeepSeek-V3, arXiv:2412.19437, section 2.2).

At position i the head joins the model's hidden state with the embedding of token i + 1 and computes one more layer, whose output
predicts token i + 2 with the model's own output layer. Megatron-Core has the layer; its inputs, its targets and its loss are
megascend's. Megatron-Core shifts them with ``roll_tensor``, on every rank and for every micro batch, and divides the loss of each
micro batch by its own number of targets, so that the sum depends on how samples are divided. Here they are shifted within each
sample before it is cut (:class:`megascend.training.batch.micro_batch.MtpTargets`), and the loss is normalised over the global
batch (:mod:`megascend.engines.step.loss`). Rotary positions stay those of the hidden states: attention depends on their
differences only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megascend.changes import patch
from megascend.models.checkpoint_files.files import TensorHeader, tensor_headers
from megascend.models.checkpoint_files.info import ModelInfo, equal_tensors
from megascend.training.batch.micro_batch import MtpTargets

logger = logging.getLogger(__name__)

REPLAY_UNSUPPORTED_REASON = (
    "mtp: train adds a layer with a router of its own, whose choices an inference engine does not record"
)
"""Reason why experts cannot be replayed in a model whose head is trained."""


class PredictionHead:
    """The head of the last pipeline stage's model chunk.

    Attributes:
        targets: targets of the micro batch that the chunk computes next; None: the head does not run.
    """

    def __init__(self, chunk: Any) -> None:
        self.targets: MtpTargets | None = None
        self._chunk = chunk
        (self._layer,) = chunk.mtp.layers
        postprocess = chunk._postprocess

        def with_prediction(hidden_states: Tensor, **options: Any) -> Tensor:
            if self.targets is not None:
                prediction = self._predict(hidden_states, self.targets, **options)
                # In the batch's dimension: the output layer gathers the sequence of sequence parallel ranks.
                hidden_states = torch.cat([hidden_states, prediction], dim=1)
            return postprocess(hidden_states=hidden_states, **options)

        patch(chunk, "_postprocess", with_prediction, "the head's hidden states are returned after the model's")

    def _predict(
        self,
        hidden: Tensor,
        targets: MtpTargets,
        *,
        position_ids: Tensor,
        rotary_pos_emb: Tensor | None,
        packed_seq_params: Any,
        **options: Any,
    ) -> Tensor:
        """Return the head's hidden states, [sequence, batch, h] like the model's, whose last norm has been applied."""
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        # mcore-bridge switches the fused rotary embedding off in this layer; the other one takes the angles of each token.
        if packed and rotary_pos_emb is not None and self._chunk.position_embedding_type == "rope":
            rotary_pos_emb = rotary_pos_emb[position_ids[0]]
        embedded = self._chunk.embedding(input_ids=targets.input_ids, position_ids=position_ids)

        def run(hidden: Tensor, embedded: Tensor) -> Tensor:
            return self._layer._proj_and_transformer_layer(
                hidden_states=hidden,
                decoder_input=embedded,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
            )

        config = self._chunk.config
        if config.recompute_granularity == "full" and self._layer.training:
            return tensor_parallel.checkpoint(run, config.distribute_saved_activations, hidden, embedded)
        return run(hidden, embedded)


def split(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Split a chunk's output [2 batch, sequence, h] into the model's hidden states and the head's."""
    model, head = hidden.chunk(2)
    return model, head


def with_copies(stream: Iterable[tuple[str, Tensor]], copies: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight, and after it those of ``copies`` (name -> original) that repeat it."""
    for name, tensor in stream:
        yield name, tensor
        for copy in (copy for copy, original in copies.items() if original == name):
            yield copy, tensor
        del tensor  # no local variable may keep a tensor alive while the next one is gathered


def warn_of_different_copies(info: ModelInfo, model_dir: Any) -> None:
    """Warn of copies of embedding and output layer in the head that differ from the model's: training uses the model's."""
    headers: Mapping[str, TensorHeader] = tensor_headers(model_dir) if info.copies else {}
    for name, original in info.copies.items():
        if not equal_tensors(headers[name], headers[original], name, original):
            logger.warning(
                "mtp: train: %s differs from %s, which the head shares with the model from now on; an export writes the "
                "model's under both names",
                name,
                original,
            )
