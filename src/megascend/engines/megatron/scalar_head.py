"""The scalar head on the last pipeline stage: from hidden states to a value for each label and token.

mcore-bridge builds such a model as its task ``seq_cls``, with an output layer of Transformer Engine without a bias. It is
replaced by a plain product in fp32, with the bias and the dropout of transformers' token classifiers. Under sequence parallelism
every rank computes the values of its own tokens, and mcore-bridge gathers them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from megascend.changes import changed
from megascend.models.checkpoint_files.scalar_head import BIAS, ScalarHead


class ScalarHeadLayer(nn.Module):
    """Scalar head as a model's output layer.

    Args:
        config: mcore-bridge's; its ``params_dtype`` is that of the parameters.
    """

    def __init__(self, head: ScalarHead, config: Any, device: torch.device) -> None:
        super().__init__()
        self._dropout, self._divided = head.dropout, config.sequence_parallel
        options = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(head.outputs, config.hidden_size, **options))
        self.bias = nn.Parameter(torch.empty(head.outputs, **options)) if head.bias else None
        for parameter in self.parameters():
            # With sequence parallelism each rank has the gradients of its own tokens, and Megatron sums them; without it, all
            # ranks have the complete gradient.
            parameter.sequence_parallel = self._divided  # type: ignore[attr-defined]
            parameter.allreduce = True  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Compute values, fp32 [sequence, batch, labels], from ``hidden`` [sequence, batch, h]; the signature is Megatron's."""
        if self.training and self._dropout:
            # Ranks with different tokens draw different masks; ranks with the same tokens must draw the same mask.
            fork = tensor_parallel.get_cuda_rng_tracker().fork() if self._divided else contextlib.nullcontext()  # type: ignore[reportOptionalMemberAccess]
            with fork:
                hidden = nn.functional.dropout(hidden, self._dropout)
        bias = None if self.bias is None else self.bias.float()
        # As engines.heads.values_of, so that a value does not depend on the engine.
        return nn.functional.linear(hidden.float(), self.weight.float(), bias), None


def bridge_arguments(head: ScalarHead | None) -> dict[str, Any]:
    """Return mcore-bridge's settings for a model with this head, whose weight is never tied to the embedding."""
    if head is None:
        return {}
    return {"task_type": "seq_cls", "num_labels": head.outputs, "untie_embeddings_and_output_weights": True}


def install(chunks: Sequence[Any], config: Any, head: ScalarHead, device: torch.device) -> None:
    """Replace the output layer of the last pipeline stage by the head, and make mcore-bridge convert its bias."""
    last = chunks[-1]
    if last.post_process:
        last.output_layer = ScalarHeadLayer(head, config, device)
    changed("mcore-bridge's conversion of classifiers", "converts their head without padding, with its bias")
    # mcore-bridge has built this object already; replacing its class keeps its state.
    config.bridge.__class__ = _bridge(type(config.bridge), bias=head.bias)


def _bridge(kind: Any, *, bias: bool) -> Any:
    """Return a subclass of mcore-bridge's bridge class ``kind`` for a head that is replicated on every rank.

    mcore-bridge would pad it to a row for each tensor parallel rank, like a vocabulary, and does not support a bias.
    """

    class ScalarHeadBridge(kind):
        def _set_weight(self, mg_param: Any, hf_weight: Tensor, mg_key: str, *args: Any, **options: Any) -> Any:
            if mg_key.startswith("output_layer."):
                mg_param.data.copy_(hf_weight)
                return None
            return super()._set_weight(mg_param, hf_weight, mg_key, *args, **options)

        def _convert_post_process(self, mg_model: Any, hf_state_dict: Any, hf_prefix: str, to_mcore: bool) -> Any:
            converted = super()._convert_post_process(mg_model, hf_state_dict, hf_prefix, to_mcore)
            if not bias:
                return converted
            if to_mcore:
                weights = self._remove_prefix(hf_state_dict, hf_prefix)
                if BIAS in weights:
                    self._set_state_dict(mg_model, "output_layer.bias", weights, BIAS, to_mcore)
                return converted
            weights = {}
            self._set_state_dict(mg_model, "output_layer.bias", weights, BIAS, to_mcore)
            return {**converted, **self._add_prefix(weights, hf_prefix)}

    ScalarHeadBridge.__name__ = kind.__name__
    return ScalarHeadBridge


def fill(chunks: Sequence[Any], weights: Mapping[str, Tensor]) -> None:
    """Copy ``weights``, by name in a checkpoint, into the head on the last pipeline stage."""
    if not weights or not chunks[-1].post_process:
        return
    for name, values in weights.items():
        getattr(chunks[-1].output_layer, name.rpartition(".")[2]).data.copy_(values)
