"""Models with a vision tower: mcore-bridge's wrapper of a language model, and transformers' own tower on the first stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from megascend.batch.micro_batch import MicroBatch
from megascend.changes import patch
from megascend.config import VisionTower
from megascend.errors import ConfigError
from megascend.models import Images
from megascend.topology.topology import Topology


def check(config: Any, topology: Topology, *, trains_head: bool) -> None:
    """Raise ConfigError for layouts and settings in which models with a vision tower are not proven."""
    if topology.context > 1:
        raise ConfigError(
            f"parallel.context: {topology.context} with {config.hf_model_type}, whose pictures are not divided over context "
            "parallel ranks: set 1"
        )
    if trains_head:
        raise ConfigError(f"mtp: train with {config.hf_model_type}: set keep")
    deepest = len(getattr(config.hf_config.vision_config, "deepstack_visual_indexes", None) or [])
    first = config.num_layers // (topology.pipeline * topology.virtual_pipeline)
    if deepest > first:
        raise ConfigError(
            f"{config.hf_model_type} adds features of {deepest} layers of its vision tower to as many layers of the language "
            f"model, and the first of {topology.pipeline * topology.virtual_pipeline} pipeline stages has {first}: set "
            "parallel.pipeline or parallel.virtual_pipeline lower"
        )


def language_model(chunk: Any) -> Any:
    """Return the language model of a chunk: the chunk itself without a vision tower."""
    return chunk.language_model if hasattr(chunk, "language_model") else chunk


def tower(chunk: Any, images: Images | None) -> nn.Module | None:
    """Return transformers' vision tower of a chunk; None for a model of text, and on later pipeline stages."""
    if images is None or getattr(chunk, "visual", None) is None:
        return None
    # mcore-bridge keeps it in its wrapper under the last part of its name in the checkpoint.
    return getattr(chunk.visual, images.tower.rstrip(".").rpartition(".")[2])


def install(chunks: Sequence[Any], images: Images | None, trained: VisionTower) -> None:
    """Prepare the vision tower of a rank's chunks: freeze it if it is not trained, and mend its gradients."""
    for chunk in chunks:
        module = tower(chunk, images)
        if module is None:
            continue
        config: Any = chunk.config
        if trained == "frozen":
            module.requires_grad_(False)
            inputs = partial(_without_pictures, chunk.visual.get_inputs_embeds)
            patch(chunk.visual, "get_inputs_embeds", inputs, "a frozen tower does not run for text")
        elif config.sequence_parallel and config.tensor_model_parallel_size > 1:
            module.register_forward_hook(_sum_gradients_of_inner_features)


def _without_pictures(original: Any, embeddings: Tensor, **inputs: Any) -> Any:
    """Return the embeddings of a micro batch without pictures unchanged, else ``original``'s result.

    mcore-bridge runs the tower on a black picture, so that data parallel ranks reduce the same gradients.
    """
    if inputs.get("pixel_values") is None:
        return {"inputs_embeds": embeddings}
    return original(embeddings, **inputs)


def _sum_gradients_of_inner_features(module: nn.Module, arguments: Any, output: Any) -> Any:
    """Sum over tensor parallel ranks the gradients of features that each adds to its own tokens only.

    Under sequence parallelism mcore-bridge cuts the features of inner layers (DeepStack) to a rank's tokens, and gathers those of
    the last layer: the former's gradients would be a part of what they are, the latter's all of it.
    """
    inner = getattr(output, "deepstack_features", None)
    if inner:
        output.deepstack_features = [copy_to_tensor_model_parallel_region(features) for features in inner]
    return output


@contextlib.contextmanager
def frequencies_in_fp32(chunk: Any, images: Images | None) -> Iterator[None]:
    """Keep the rotary frequencies of the tower as they are while the model is cast to 16 bits, as transformers does."""
    module = tower(chunk, images)
    buffers = {} if module is None else {name: buffer for name, buffer in module.named_buffers()}
    yield
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, buffer)  # type: ignore[union-attr]


def arguments(batch: MicroBatch, chunk: Any, images: Images | None) -> dict[str, Tensor]:
    """Return the pictures of a micro batch as arguments of a chunk with a vision tower; none for other chunks."""
    if batch.images is None or tower(chunk, images) is None:
        return {}
    return {"pixel_values": batch.images.pixel_values, "image_grid_thw": batch.images.grids}

