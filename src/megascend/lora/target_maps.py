"""Which layers of a model adapters can act on: a map of one transformer layer for every architecture, in a registry.

Architectures whose modules are named as in Llama share :func:`megascend.lora.llama_targets.layer_targets`, which is what a
``model_type`` that nobody has registered gets. :func:`register_lora_targets` adds others, from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from megascend.errors import ConfigError
from megascend.lora import llama_targets
from megascend.lora.target_modules import EMBEDDING, OUTPUT, FusedSlice, ModelLayout, TargetModule

TargetMap = Callable[[Any, int, ModelLayout], Iterable[TargetModule]]
"""(a transformer layer of Megatron's, its number from 0, the layout) -> the target modules in it, in the model's order.

It raises ConfigError for a layer of a kind that it does not know. Factors live under the names in ``FusedSlice.name``, which
are those of peft, so a map decides what a saved adapter of its architecture looks like.
"""

_by_model_type: dict[str, TargetMap] = {}


def register_lora_targets(model_type: str, target_map: TargetMap) -> None:
    """Say where adapters of an architecture can go. Every rank does so before it constructs a backend.

    Args:
        model_type: as in the model's ``config.json``.

    Raises:
        ConfigError: another map is registered for it.
    """
    if _by_model_type.setdefault(model_type, target_map) is not target_map:
        raise ConfigError(f"register_lora_targets: another map is registered for model_type {model_type!r}")


def find_target_modules(chunks: Sequence[Any], layout: ModelLayout) -> list[TargetModule]:
    """Every layer of this rank's chunks that an adapter could act on, in the model's order.

    Raises:
        ConfigError: the architecture has attention or MLP layers of a kind that its map does not know.
    """
    layer_targets = _by_model_type.get(layout.config.hf_model_type, llama_targets.layer_targets)
    found: list[TargetModule] = []
    for chunk in chunks:
        tied = chunk.share_embeddings_and_output_weights
        if chunk.pre_process and not tied:
            found += _embedding(chunk.embedding, layout)
        for layer in chunk.decoder.layers:
            found += layer_targets(layer, layer.layer_number - 1, layout)
        if chunk.post_process and not tied:
            found += _output(chunk.output_layer, layout)
    return found


def _embedding(embedding: Any, layout: ModelLayout) -> Iterator[TargetModule]:
    """Its A looks columns of the vocabulary up, where B is whole on every rank: a row parallel layer of one-hot inputs."""
    name, module = f"{layout.prefix}{EMBEDDING}", embedding.word_embeddings
    sliced = layout.topology.sequence_parallel and layout.topology.tensor > 1
    # With learned positions Megatron slices the sequence after adding them, so that B would see all of it on every rank.
    if not layout.has(name) or (sliced and not module.reduce_scatter_embeddings):
        return
    shard, everything = layout.vocab_shard(module), torch.arange(module.weight.shape[1])
    whole = FusedSlice(name, len(everything), everything, everything)
    yield TargetModule(module, "row", (whole,), shard.rows, len(everything), shard.start, layout.vocab_size)


def _output(module: Any, layout: ModelLayout) -> Iterator[TargetModule]:
    if not layout.has(OUTPUT):
        return
    shard, columns = layout.vocab_shard(module), module.weight.shape[1]
    rows = torch.arange(shard.rows)
    own = FusedSlice(OUTPUT, layout.vocab_size, rows, shard.start + rows)
    yield TargetModule(module, "column", (own,), columns, shard.rows, 0, columns)
