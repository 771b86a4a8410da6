"""Quantised base weights of a Megatron model: layers are quantised one by one, as mcore-bridge builds and loads them.

Embeddings, output layers, norms, biases, routers and vision towers keep the run's precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_layer import TransformerLayer

from megascend.changes import changed, patched
from megascend.config import BaseWeights
from megascend.training.lora.quantised_weights import QuantisedLayer

LAYERS = (
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
)
"""Megatron's layers whose weights are quantised. Not the up projection of latent attention, which a cache reads by itself."""


class QuantisedBase:
    """All quantised layers of this rank, from the build of the model on.

    Args:
        method: ``fp8`` or ``nf4``.
    """

    def __init__(self, method: BaseWeights) -> None:
        self._method: BaseWeights = method
        self._layers: dict[Any, QuantisedLayer] = {}

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Release the weights of every layer of the decoder as soon as it is built, so that the full model is never in memory."""
        original = transformer_block.build_module

        def build(*args: Any, **options: Any) -> Any:
            module = original(*args, **options)
            if isinstance(module, TransformerLayer):
                self._add(module)
            return module

        with patched(
            transformer_block, "build_module", build, "weights that will be quantised are allocated layer by layer"
        ):
            yield

    def _add(self, layer: torch.nn.Module) -> list[QuantisedLayer]:
        """Return the layers in a decoder's layer that are quantised, and release new ones."""
        layers = []
        for name, module in layer.named_modules():
            kind = name.rpartition(".")[2]
            if kind not in LAYERS or not (hasattr(module, "weight") or hasattr(module, "weight0")):
                continue
            if module not in self._layers:
                self._layers[module] = QuantisedLayer(module)
            layers.append(self._layers[module])
        return layers

    @contextlib.contextmanager
    def loading(self, bridge: Any, chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Allocate the weights of a layer before mcore-bridge fills them, and quantise them after that."""
        load = bridge._set_layer_state
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer):
                    self._add(module)

        def load_layer(layer: torch.nn.Module, *args: Any, **options: Any) -> Any:
            layers = self._add(layer)
            for quantised in layers:
                quantised.allocate()
            result = load(layer, *args, **options)
            for quantised in layers:
                quantised.quantise(self._method)
            return result

        with patched(
            bridge, "_set_layer_state", load_layer, "quantises the weights of a layer when it has been loaded"
        ):
            yield
        changed("weights of linear layers", f"quantised ({self._method}), and dequantised in each product")

    def __contains__(self, module: object) -> bool:
        """Check whether the weights of a layer are quantised."""
        return module in self._layers

    def released(self) -> set[int]:
        """Return the ids of the parameters that have a shape only: they are quantised, or will be."""
        parameters = (parameter for layer in self._layers.values() for parameter in layer.parameters)
        return {id(parameter) for parameter in parameters if parameter.stride() == (0, 0)}

    @property
    def bytes(self) -> int:
        """Memory of all codes and scales."""
        return sum(layer.bytes for layer in self._layers.values())
