"""Vision towers and images on engines that run transformers' own models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megascend.config import VisionTower
from megascend.models import Images
from megascend.training.batch.micro_batch import MicroBatch


def arguments(batch: MicroBatch) -> dict[str, Tensor]:
    """Return the images of a micro batch as arguments of transformers' models; none without images."""
    if batch.images is None:
        return {}
    # Without mm_token_type_ids: transformers computes positions from these, and every micro batch has positions already.
    return {"pixel_values": batch.images.pixel_values, "image_grid_thw": batch.images.grids}


def tower(model: nn.Module, images: Images) -> nn.Module:
    """Return the vision tower of a transformers model."""
    return model.get_submodule(images.tower.rstrip("."))


def attention_of(name: str, images: Images | None) -> str | dict[str, str]:
    """Return the ``attn_implementation`` that gives the language model the attention function ``name``, and the tower torch's."""
    # The tower attends within an image in both directions (is_causal=False), which engine fsdp's causal function refuses.
    return name if images is None else {"": name, "text_config": name, "vision_config": "sdpa"}


def features_of(vision_tower: Callable[..., Any], pixel_values: Tensor, grids: Tensor) -> tuple[Tensor, ...]:
    """Return the features of images: those of the last layer, and those of inner layers (DeepStack), if any."""
    output = vision_tower(pixel_values, grid_thw=grids)
    return output.pooler_output, *(getattr(output, "deepstack_features", None) or ())


def add_unused_features(vision_tower: Any, embeddings: Tensor, dtype: torch.dtype) -> Tensor:
    """Add 0 times the features of a black image to the embeddings of a batch without images.

    Every parameter of the tower then has a gradient, of zeros: those of the mergers of inner features too.

    Args:
        dtype: precision of the image.
    """
    config = vision_tower.config
    side = config.spatial_merge_size
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    # The smallest image that has a feature: one square of patches, which the merger joins.
    black = torch.zeros(side * side, width, dtype=dtype, device=embeddings.device)
    features = features_of(vision_tower, black, torch.tensor([[1, side, side]], device=embeddings.device))
    zero = torch.stack([part.float().mean() * 0.0 for part in features]).sum()
    return embeddings + zero.to(embeddings.dtype)


class DummyImage:
    """Runs the vision tower on a black image in micro batches without images, and adds 0 times its features to the text.

    So all ranks gather a sharded tower together and reduce the same gradients, even if only some of them have images.

    Args:
        model: a transformers model; call :meth:`enter` before each forward pass.
    """

    def __init__(self, model: Any, images: Images) -> None:
        self._tower, self._runs = tower(model, images), False
        # On the embeddings, of which every loss is a function: the backward pass then reaches the tower, and FSDP reduces its
        # gradients. A frozen tower runs too: it is sharded as well, so that its forward pass is a collective.
        model.get_input_embeddings().register_forward_hook(self._after_embedding)

    def enter(self, batch: MicroBatch) -> None:
        """Set the micro batch of the next forward pass."""
        self._runs = batch.images is None

    def _after_embedding(self, module: nn.Module, inputs: Any, embeddings: Tensor) -> Tensor:
        return add_unused_features(self._tower, embeddings, embeddings.dtype) if self._runs else embeddings


def freeze_tower(model: nn.Module, images: Images | None, trained: VisionTower) -> None:
    """Freeze the vision tower of a transformers model, unless it is trained."""
    if images is not None and trained == "frozen":
        tower(model, images).requires_grad_(False)
