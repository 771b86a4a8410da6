"""Models with a vision tower: mcore-bridge's wrapper of a language model, and transformers' own tower on the first stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from megascend.changes import patch
from megascend.config import VisionTower
from megascend.engines.common.vision import add_unused_features, features_of
from megascend.engines.common.vision import arguments as image_arguments
from megascend.models import Images
from megascend.training.batch.micro_batch import MicroBatch


def language_model(chunk: Any) -> Any:
    """Return the language model of a chunk: the chunk itself without a vision tower."""
    return chunk.language_model if hasattr(chunk, "language_model") else chunk


def tower(chunk: Any, images: Images | None) -> nn.Module | None:
    """Return transformers' vision tower of a chunk; None for a model of text, and on later pipeline stages."""
    if images is None or getattr(chunk, "visual", None) is None:
        return None
    # mcore-bridge keeps it in its wrapper under the last part of its name in the checkpoint.
    return getattr(chunk.visual, images.tower.rstrip(".").rpartition(".")[2])


def install(chunks: Sequence[Any], images: Images | None, token: int | None, trained: VisionTower) -> None:
    """Prepare the vision tower of a rank's chunks: freeze it if it is not trained, and put its features into the sequence.

    Args:
        token: id of the token that stands for a feature.
    """
    for chunk in chunks:
        module = tower(chunk, images)
        if module is None:
            continue
        if trained == "frozen":
            module.requires_grad_(False)
        assert token is not None
        features = Features(module, token, chunk.config)
        reason = "features of a batch's images in the order of its tokens, and their complete gradient with SP"
        # mcore-bridge calls it within the embedding layer, before sequence parallelism divides the tokens: every tensor parallel
        # rank inserts all features, and receives their complete gradient.
        patch(chunk.visual, "get_inputs_embeds", features.insert, reason)


class Features:
    """Features of a micro batch's images, in place of mcore-bridge's own insertion of them.

    mcore-bridge 1.6.5 adds the features of inner layers (DeepStack) to the tokens of a padded batch in another order than theirs,
    and under sequence parallelism leaves each rank with the gradients of its own tokens' features.

    Args:
        tower: transformers' module; its output has ``pooler_output`` and, with DeepStack, ``deepstack_features``.
        token: id of the token that stands for a feature.
        config: mcore-bridge's ModelConfig.
    """

    def __init__(self, tower: nn.Module, token: int, config: Any) -> None:
        self._tower, self._token = tower, token
        self._divides_sequence = config.sequence_parallel and config.tensor_model_parallel_size > 1

    def insert(
        self,
        embeddings: Tensor,
        *,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        **unused: Any,
    ) -> dict[str, Any]:
        """Return mcore-bridge's inputs of the decoder: embeddings, and the features that its first layers add.

        Args:
            embeddings: [batch, sequence, h].
            input_ids: [batch, sequence].
        """
        if pixel_values is None:
            # In contrast to engine fsdp, the tower is not sharded: a frozen one does nothing together with other ranks.
            if not any(parameter.requires_grad for parameter in self._tower.parameters()):
                return {"inputs_embeds": embeddings}
            # Every rank and micro batch gives the tower a gradient, which data parallel ranks reduce together: here one of zeros.
            # With overlap_grad_reduce Megatron starts a bucket's reduction once all of its parameters have gradients, and
            # asserts at the end of the step that it has been started.
            return {"inputs_embeds": add_unused_features(self._tower, embeddings, self._dtype)}
        assert image_grid_thw is not None
        # Patches are fp32 in every precision, as the image processor makes them.
        final, *inner = features_of(self._tower, pixel_values.to(self._dtype), image_grid_thw)
        # masked_scatter takes features in the order of [batch, sequence], which is that of the samples and so of their images.
        mask = input_ids == self._token
        inputs: dict[str, Any] = {
            "inputs_embeds": embeddings.masked_scatter(
                mask[..., None].expand_as(embeddings), final.to(embeddings.dtype)
            )
        }
        if inner:
            # mcore-bridge's block selects tokens by a mask [sequence, batch], in whose order the tokens of a batch's samples
            # alternate. Each token therefore carries the number of its feature, by which the features are then sorted.
            numbers = torch.full_like(input_ids, -1)
            numbers[mask] = torch.arange(len(final), device=mask.device)
            numbers = numbers.mT  # hidden states are [sequence, batch, h]
            if self._divides_sequence:
                # Identity forward, sum over ranks backward: each rank adds only its own tokens' features of the same tower.
                inner = [copy_to_tensor_model_parallel_region(features) for features in inner]
                size = parallel_state.get_tensor_model_parallel_world_size()
                numbers = numbers.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
            inputs["visual_pos_masks"] = numbers >= 0
            order = numbers[numbers >= 0]
            inputs["deepstack_visual_embeds"] = torch.stack([features[order] for features in inner])
        return inputs

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._tower.parameters()).dtype


@contextlib.contextmanager
def frequencies_in_fp32(chunk: Any, images: Images | None) -> Iterator[None]:
    """Keep the rotary frequencies of the tower in fp32 while the model is cast to 16 bits, as transformers does."""
    module = tower(chunk, images)
    buffers = {} if module is None else dict(module.named_buffers())
    # Float16Module's cast puts other tensors in the buffers' place, so that these keep their values until they are put back.
    yield
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, buffer)  # type: ignore[union-attr]


def arguments(batch: MicroBatch, chunk: Any, images: Images | None) -> dict[str, Tensor]:
    """Return the images of a micro batch as arguments of a chunk with a vision tower; none for other chunks."""
    return {} if tower(chunk, images) is None else image_arguments(batch)
