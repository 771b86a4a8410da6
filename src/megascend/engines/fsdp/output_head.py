"""LossHead: computes the loss inside a transformers model's output layer, while the layer's weight is gathered."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from megascend.changes import patch
from megascend.engines.base import OnOutput, ScalarOutput
from megascend.engines.common import vision
from megascend.engines.common.heads import PlainOutput, output_layer, values_of
from megascend.errors import ConfigError
from megascend.training.batch.micro_batch import MicroBatch
from megascend.training.lora.adapter_layers import AdapterLayers


def more_than_product(model: Any) -> ConfigError:
    """Return the error for a model that changes its output layer's result, which the engine would omit."""
    kind = type(model).__name__.removeprefix("FSDP")  # fully_shard adds the prefix to the class
    return ConfigError(
        f"{kind} changes its logits after the output layer (a cap or a scale in its configuration?), which no engine supports"
    )


def check_product(model: Any, *, sharded: bool, **inputs: Any) -> Tensor:
    """Run a model with its own output layer, and return its logits; ConfigError if they are not that layer's result.

    Args:
        sharded: the backward pass begins at the model's output, which must then be that very tensor. A model on one rank may
            change it without effect, such as by a scale of 1.
    """
    products: list[Any] = []
    hook = output_layer(model).register_forward_hook(lambda module, args, product: products.append(product))
    try:
        logits = model(use_cache=False, **inputs).logits
    finally:
        hook.remove()
    same = len(products) == 1 and (
        logits is products[0] or (not sharded and torch.equal(logits.float(), products[0].float()))
    )
    if not same:
        raise more_than_product(model)
    return logits


class LossHead:
    """Replacement of the forward pass of a model's output layer: from hidden states to the loss, a scalar.

    The hooks of ``fully_shard`` still run around it: the weight is gathered before, and its gradient reduced afterwards.

    Args:
        adapters: adapters of the model, including any on the output layer.
        scalar: the layer is a scalar head.
        sharded: the model is sharded; if not, :func:`check_product` has accepted it.
    """

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        adapters: AdapterLayers | None,
        *,
        scalar: bool = False,
        sharded: bool = True,
    ) -> None:
        self._model, self._layer, self._vocab_size = model, output_layer(model), vocab_size
        self._adapters, self._scalar, self._sharded = adapters, scalar, sharded
        self._call: tuple[MicroBatch, OnOutput] | None = None
        self._result: tuple[Tensor, Any] | None = None
        patch(
            self._layer,
            "forward",
            self._forward,
            "the loss is computed a chunk of tokens at a time, without materialising all logits",
        )

    def run(self, batch: MicroBatch, on_output: OnOutput, **options: Any) -> tuple[Tensor, Any]:
        """Run the model on a micro batch, and return the result of ``on_output``."""
        self._call, self._result = (batch, on_output), None
        try:
            options |= {"position_ids": batch.position_ids, **vision.arguments(batch)}
            with warnings.catch_warnings():
                # transformers also returns the features of images, as views; they are not modified in place.
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
                output = self._model(input_ids=batch.input_ids, use_cache=False, **options)
            # The layer returns the loss in place of logits: a model that scales or caps its logits would change it.
            if self._result is None or (self._sharded and output.logits is not self._result[0]):
                raise more_than_product(self._model)
            return self._result
        finally:
            # They reference the micro batch's graph, which would otherwise live until the next call.
            self._call = self._result = None

    def _forward(self, hidden: Tensor) -> Tensor:
        assert self._call is not None, "the model is called by the engine only"
        loss, _ = self._result = self._compute(hidden, *self._call)
        # Models may look at the shape of their logits.
        return loss if self._sharded else loss.view(1, 1, 1)

    def _compute(self, hidden: Tensor, batch: MicroBatch, on_output: OnOutput) -> tuple[Tensor, Any]:
        if self._scalar:
            values = values_of(self._layer, hidden)
            if self._adapters is not None:
                values = self._adapters.values(hidden, values)
            return on_output(batch, ScalarOutput(values))
        down = lora_delta = None
        if self._adapters is not None:
            down, lora_delta = self._adapters.down_of_output(hidden), self._adapters.lora_delta(batch.segments)
        head = PlainOutput(
            hidden.flatten(0, 1),
            self._layer.weight,
            batch.targets,
            self._vocab_size,
            None if down is None else down.flatten(0, 1),
            lora_delta,
            batch.temperature,
            getattr(self._model, "logit_cap", None),
        )
        return on_output(batch, head)
