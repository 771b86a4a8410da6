"""Images of samples: patches and grids beside the tokens that stand for them, and the positions of those tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascend.errors import DataError
from megascend.models import ImageLayout
from megascend.training.batch.image_sources import ImageSources
from megascend.training.kernels.host_copy import to_device

DECODING_THREADS = 8
"""Threads on which a rank decodes the images of a step."""


@dataclass(eq=False)
class SampleImages:
    """Images of one sample, in the order of their tokens, as the model's image processor returns them.

    Attributes:
        pixel_values: float32 [patches, numbers of a patch], the patches of all images, one image after the other.
        grids: int64 [images, 3], frames, rows and columns of each image's grid of patches (``image_grid_thw``).
    """

    pixel_values: Any
    grids: Any

    def __post_init__(self) -> None:
        try:
            pixels = torch.as_tensor(self.pixel_values, device="cpu").detach().to(torch.float32)
            grids = torch.as_tensor(self.grids, device="cpu").detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"images cannot become tensors: {error}") from None
        if pixels.dim() != 2 or not len(pixels):
            raise DataError(
                f"images: pixel_values must be [patches, numbers of a patch], got shape {list(pixels.shape)}"
            )
        if grids.dim() != 2 or grids.shape[1] != 3 or grids.is_floating_point() or grids.dtype == torch.bool:
            raise DataError(f"images: grids must be integers [images, 3], got {grids.dtype} {list(grids.shape)}")
        if bool((grids < 1).any()):
            raise DataError(f"images: grids must be positive, got {grids.tolist()}")
        self.pixel_values, self.grids = pixels, grids.to(torch.int64)
        if int(self.grids.prod(1).sum()) != len(pixels):
            raise DataError(
                f"images: grids {self.grids.tolist()} have {int(self.grids.prod(1).sum())} patches, and pixel_values has "
                f"{len(pixels)}"
            )
        if not bool(pixels.isfinite().all()):
            raise DataError("images: pixel_values must be finite")

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.pixel_values.shape[1]


class DeferredImages(SampleImages):
    """Images that are decoded when they are first used, on the ranks that use them.

    Args:
        grids: frames, rows and columns of each, if they are known before.
        width: numbers of a patch, with ``grids``.
    """

    def __init__(
        self,
        load: Callable[[], SampleImages],
        grids: Sequence[tuple[int, int, int]] = (),
        width: int | None = None,
    ) -> None:
        # Not super().__init__(): __getattr__ is called for missing attributes only, so the fields stay unset until they are read.
        self._load, self._width = load, width if grids else None
        if grids:
            self.grids = torch.tensor(grids, dtype=torch.int64)

    @property
    def patch_width(self) -> int:
        return self.pixel_values.shape[1] if self._width is None else self._width

    def __getattr__(self, name: str) -> Any:
        if name not in ("pixel_values", "grids"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        images = self._load()
        if "grids" in vars(self) and not torch.equal(self.grids, images.grids):
            raise DataError(f"images: the grids are {images.grids.tolist()}, and were {self.grids.tolist()} before")
        self.pixel_values, self.grids = images.pixel_values, images.grids
        return getattr(self, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def decode_together(images: Sequence[SampleImages | ImageSources | None]) -> None:
    """Decode the deferred images of samples on several threads. One that fails raises its error where it is used."""
    deferred = [item for item in images if isinstance(item, DeferredImages)]

    def decode(deferred_images: DeferredImages) -> None:
        # Raised again in the checks of the step, whose result all ranks exchange; an error here would leave the others waiting.
        with contextlib.suppress(DataError):
            _ = deferred_images.pixel_values

    if len(deferred) > 1:
        with ThreadPoolExecutor(min(len(deferred), DECODING_THREADS)) as threads:
            list(threads.map(decode, deferred))


@dataclass(frozen=True)
class ImageBatch:
    """Images of a micro batch, on the device, in the order of their tokens.

    Attributes:
        pixel_values: float32 [patches, numbers of a patch].
        grids: int64 [images, 3].
    """

    pixel_values: Tensor
    grids: Tensor


def problem(input_ids: Tensor, images: SampleImages | ImageSources | None, layout: ImageLayout | None) -> str | None:
    """Return why a sample's images do not fit its tokens or the model, or None.

    Args:
        layout: layout of the model's images; None for a model of text.
    """
    if layout is None:
        return None if images is None else "has images, which this model does not take: leave them out"
    tokens = int((input_ids == layout.token).sum())
    if isinstance(images, ImageSources):
        return "has images that are not decoded: take samples from the data reader, or pass megascend.SampleImages"
    if images is None:
        if not tokens:
            return None
        return f"has {tokens} tokens that stand for an image (id {layout.token}) and no images: set images"
    if images.patch_width != layout.patch_width:
        return (
            f"has patches of {images.patch_width} numbers, and the model's have {layout.patch_width}: use the image "
            "processor of this checkpoint"
        )
    # The tower merges squares of patches into one feature; an uneven grid has patches that belong to no square.
    uneven = [grid for grid in images.grids.tolist() if grid[1] % layout.merge or grid[2] % layout.merge]
    if uneven:
        return f"has an image of {uneven[0][1]} x {uneven[0][2]} patches, which {layout.merge} x {layout.merge} do not divide"
    expected = [layout.features(*grid) for grid in images.grids.tolist()]
    # Features replace these tokens in order: with another number of them they would be put in the wrong places.
    if tokens != sum(expected):
        return (
            f"has {tokens} tokens that stand for an image (id {layout.token}), and its {len(expected)} images need "
            f"{sum(expected)} ({', '.join(map(str, expected))})"
        )
    return None


def positions(input_ids: Tensor, grids: Tensor | None, layout: ImageLayout) -> Tensor:
    """Return positions by time, height and width, int64 [3, length] (arXiv:2409.12191, section 2.1).

    Text counts on from the largest position before it, in all three rows alike; an image's tokens begin there and spread over
    its rows and columns.

    Args:
        input_ids: [length]; the tokens of an image follow one another.
        grids: [images, 3], or None.
    """
    length = len(input_ids)
    rows = torch.empty(3, length, dtype=torch.int64)
    starts = (input_ids == layout.token).nonzero().flatten().tolist()
    begin, position, used = 0, 0, 0
    for frames, height, width in [] if grids is None else grids.tolist():
        height, width = height // layout.merge, width // layout.merge
        start = starts[used]
        text = start - begin
        rows[:, begin:start] = torch.arange(position, position + text)
        position += text
        begin = start + frames * height * width
        grid = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
        rows[:, start:begin] = torch.stack(grid).flatten(1) + position
        # One more than the largest row or column; frames do not count, as in transformers.
        position += max(height, width)
        used += frames * height * width
    rows[:, begin:] = torch.arange(position, position + length - begin)
    return rows


def joined(images: Sequence[SampleImages | ImageSources | None], device: torch.device) -> ImageBatch | None:
    """Return the images of samples on a device; None if no sample has any."""
    # None: each engine decides whether its tower must run for a micro batch without images.
    present = [item for item in images if isinstance(item, SampleImages)]
    if not present:
        return None
    return ImageBatch(
        to_device(torch.cat([item.pixel_values for item in present]), device),
        to_device(torch.cat([item.grids for item in present]), device),
    )
