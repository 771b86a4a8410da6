"""The loss as the output layer of a transformers model, so that it runs where the layer's weight is gathered."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megascend.batch.micro_batch import MicroBatch
from megascend.changes import patch
from megascend.engines.base import OnOutput, ScalarOutput
from megascend.engines.heads import PlainOutput, output_layer, values_of
from megascend.errors import ConfigError
from megascend.lora.applied_adapters import AppliedAdapters


def more_than_product(model: Any) -> ConfigError:
    """Return the error for a model that changes what its output layer returns, which the engine would leave out."""
    kind = type(model).__name__.removeprefix("FSDP")  # of sharded modules
    return ConfigError(
        f"engine fsdp: {kind} does more with its logits than to return them (a cap or a scale in its configuration?); use "
        "another engine"
    )


class LossHead:
    """Stands in for the forward pass of a model's output layer: takes hidden states and returns the loss, a scalar.

    The hooks of ``fully_shard`` stay around it: the weight is gathered before, and its gradient reduced afterwards.

    Args:
        adapters: of the model, some of which may act on the layer.
        scalar: the layer is a scalar head.
    """

    def __init__(self, model: Any, vocab_size: int, adapters: AppliedAdapters | None, *, scalar: bool = False) -> None:
        self._model, self._layer, self._vocab_size = model, output_layer(model), vocab_size
        self._adapters, self._scalar = adapters, scalar
        self._call: tuple[MicroBatch, OnOutput] | None = None
        self._found: tuple[Tensor, Any] | None = None
        patch(
            self._layer,
            "forward",
            self._forward,
            "the loss is computed a chunk of tokens at a time, without whole logits",
        )

    def run(self, batch: MicroBatch, on_output: OnOutput, **options: Any) -> tuple[Tensor, Any]:
        """Call the model on a micro batch; what ``on_output`` returns.

        Raises:
            ConfigError: the model does more with its logits than to return them (a cap, a scale), which would be left out.
        """
        self._call, self._found = (batch, on_output), None
        try:
            output = self._model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **options)
            if self._found is None or output.logits is not self._found[0]:
                raise more_than_product(self._model)
            return self._found
        finally:
            self._call = self._found = None

    def _forward(self, hidden: Tensor) -> Tensor:
        assert self._call is not None, "the model is called by the engine only"
        batch, on_output = self._call
        if self._scalar:
            self._found = on_output(batch, ScalarOutput(values_of(self._layer, hidden)))
            return self._found[0]
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
        )
        self._found = on_output(batch, head)
        return self._found[0]
