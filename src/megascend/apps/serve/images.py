"""Images in requests: chunks of a ``ModelInput`` become tokens and images, decoded once within the server's limits."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megascend.apps.data.images import ImageProcessor, decode, encoded
from megascend.config.serve import RequestImages
from megascend.errors import DataError
from megascend.training.batch.image_sources import ImageSource, ImageSources

PART = 4096
"""Numbers converted in one call."""
FORMATS = {"png": ("PNG",), "jpeg": ("JPEG",)}
"""The protocol's names of formats, with Pillow's."""


@dataclass(frozen=True)
class ImageChunk:
    """An image on the wire.

    Attributes:
        expected_tokens: tokens that the client counts for it, or None.
    """

    data: bytes
    format: str
    expected_tokens: int | None = None


@dataclass(frozen=True)
class PlacedImage:
    """An image among a sample's tokens.

    Attributes:
        start, tokens: its first token, and their number.
        grid: frames, rows and columns of its patches.
    """

    chunk: ImageChunk
    start: int
    tokens: int
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class ModelInput:
    """Tokens of a sample or prompt.

    Attributes:
        tokens: int64 [n], with those that stand for images.
        images: in the order of their tokens.
    """

    tokens: np.ndarray
    images: tuple[PlacedImage, ...] = ()

    @property
    def sources(self) -> ImageSources | None:
        """The images for the ranks, which decode those that they compute with."""
        if not self.images:
            return None
        return ImageSources(
            tuple(ImageSource(data=image.chunk.data) for image in self.images),
            Path(),
            grids=tuple(image.grid for image in self.images),
        )

    def is_image(self) -> np.ndarray:
        """Return which tokens stand for images, bool [n]."""
        mask = np.zeros(len(self.tokens), bool)
        for image in self.images:
            mask[image.start : image.start + image.tokens] = True
        return mask

    def chunks(self) -> list[np.ndarray | ImageChunk]:
        """Return the chunks that this was read from, texts between images as one."""
        parts: list[np.ndarray | ImageChunk] = []
        end = 0
        for image in self.images:
            parts += [self.tokens[end : image.start], image.chunk]
            end = image.start + image.tokens
        return [*parts, self.tokens[end:]]


class ImageReader:
    """Reads the chunks of one request, whose images share a limit of pixels.

    Args:
        processor: decodes images for the served model; None: it takes none.
    """

    def __init__(self, processor: ImageProcessor | None) -> None:
        self._processor, self._pixels = processor, 0

    def read(self, chunks: Iterable[np.ndarray | ImageChunk]) -> ModelInput:
        """Assemble tokens and images. Decodes the images, so that a damaged one is refused; takes milliseconds for each.

        Raises:
            DataError: a chunk cannot be read, or is not within the limits; the message begins with its index.
        """
        parts: list[np.ndarray] = []
        images: list[PlacedImage] = []
        length = 0
        for number, chunk in enumerate(chunks):
            label = f"chunks[{number}]"
            if isinstance(chunk, ImageChunk):
                tokens, grid = self._image(chunk, label, len(images))
                images.append(PlacedImage(chunk, length, len(tokens), grid))
            else:
                tokens = chunk
                token = None if self._processor is None else self._processor.layout.token
                if token is not None and (tokens == token).any():
                    raise DataError(
                        f"{label} has token {token}, which stands for an image: send an image chunk in its place"
                    )
            parts.append(tokens)
            length += len(tokens)
        return ModelInput(np.concatenate(parts) if parts else np.zeros(0, np.int64), tuple(images))

    def _image(self, chunk: ImageChunk, label: str, before: int) -> tuple[np.ndarray, tuple[int, int, int]]:
        processor = self._processor
        if processor is None:
            raise DataError(f"{label} is an image, and the served model takes none")
        limits = processor.limits
        assert isinstance(limits, RequestImages)
        if before >= limits.max_count:
            raise DataError(
                f"{label} is image {before + 1} of its sample, over the limit of {limits.max_count} (images.max_count)"
            )
        if chunk.format not in FORMATS:
            raise DataError(f"{label}: format {str(chunk.format)[:40]!r}; this server takes {' and '.join(FORMATS)}")
        source = ImageSource(data=chunk.data)
        try:
            decoded = decode(encoded(source, limits), source.name, limits, FORMATS[chunk.format])
            self._pixels += decoded.width * decoded.height
            if self._pixels > limits.max_total_pixels:
                raise DataError(
                    f"the request's images up to here have {self._pixels} pixels, over the limit of {limits.max_total_pixels} "
                    "(images.max_total_pixels)"
                )
            grid = processor.grid(decoded, source.name)
        except DataError as error:
            raise DataError(f"{label}: {error}") from None
        count = processor.layout.features(*grid)
        if chunk.expected_tokens not in (None, count):
            raise DataError(
                f"{label}: the image of {decoded.width} x {decoded.height} pixels has {count} tokens, and expected_tokens is "
                f"{chunk.expected_tokens}: use the image processor of the served model"
            )
        return np.full(count, processor.layout.token, np.int64), grid


def chunks_of_json(model_input: Any) -> Iterable[np.ndarray | ImageChunk]:
    """Yield the chunks of a ``ModelInput`` in JSON."""
    for number, chunk in enumerate(model_input["chunks"]):
        kind = chunk.get("type", "encoded_text")
        if kind == "image":
            data, expected = chunk["data"], chunk.get("expected_tokens")
            if not isinstance(data, str) or not (expected is None or type(expected) is int):
                raise DataError(f"chunks[{number}]: data must be base64, and expected_tokens an integer")
            try:
                yield ImageChunk(base64.b64decode(data, validate=True), str(chunk["format"]), expected)
            except (binascii.Error, ValueError) as error:
                raise DataError(f"chunks[{number}]: data is not valid base64: {error}") from None
            continue
        if kind != "encoded_text":
            raise DataError(unsupported(number, str(kind)))
        tokens = integers(chunk["tokens"])
        if tokens.ndim != 1:
            raise DataError(f"tokens {list(tokens.shape)}; expected a list of integers")
        yield tokens


def chunks_of_message(model_input: Iterable[Any]) -> Iterable[np.ndarray | ImageChunk]:
    """Yield the chunks of a protobuf ``Datum``."""
    for number, chunk in enumerate(model_input):
        kind = chunk.WhichOneof(chunk.DESCRIPTOR.oneofs[0].name)
        if kind == "image":
            image = chunk.image
            expected = int(image.expected_tokens) if image.HasField("expected_tokens") else None
            yield ImageChunk(bytes(image.data), str(image.format), expected)
            continue
        if kind != "encoded_text":
            raise DataError(unsupported(number, str(kind)))
        # int32 on the wire, in the byte order of x86 and Arm; torch indexes with int64.
        yield np.frombuffer(chunk.encoded_text.tokens, np.int32).astype(np.int64)


def unsupported(number: int, kind: str) -> str:
    advice = "; it opens no files and addresses of clients: send the image in an image chunk"
    return (
        f"chunks[{number}] is {kind[:40]!r}; this server takes encoded_text and image"
        f"{advice if 'asset' in kind else ''}"
    )


def json_of_chunks(chunks: Sequence[np.ndarray | ImageChunk]) -> list[dict[str, Any]]:
    """Encode chunks for :func:`chunks_of_json`."""
    return [
        {
            "type": "image",
            "data": base64.b64encode(chunk.data).decode(),
            "format": chunk.format,
            "expected_tokens": chunk.expected_tokens,
        }
        if isinstance(chunk, ImageChunk)
        else {"tokens": chunk.tolist()}
        for chunk in chunks
    ]


def integers(values: Any) -> np.ndarray:
    """Return a list of integers, or of lists of them, as int64."""
    return _array(values, np.int64, {int})


def floats(values: Any) -> np.ndarray:
    """Return a list of numbers, or of lists of them, as float32; null, which clients send for NaN, is NaN."""
    return _array(values, np.float32, {int, float, type(None)})


def _array(values: Any, dtype: Any, types: set[type]) -> np.ndarray:
    if not isinstance(values, list):
        raise DataError(f"a list of numbers is expected, got {type(values).__name__}")
    if values and isinstance(values[0], list):
        if set(map(type, values)) != {list} or len(set(map(len, values))) != 1:
            raise DataError("lists of numbers must have the same length")
        return _array(list(chain.from_iterable(values)), dtype, types).reshape(len(values), len(values[0]))
    parts = [np.zeros(0, dtype)]
    # Types first: numpy converts texts and true, and gives each number of a list the bytes of its longest text. In parts: no
    # other thread runs within one call.
    for start in range(0, len(values), PART):
        part = values[start : start + PART]
        if other := set(map(type, part)) - types:
            names = ", ".join(sorted(kind.__name__ for kind in other))
            raise DataError(f"expected {'integers' if dtype is np.int64 else 'numbers'}, got {names}")
        with np.errstate(over="ignore"):  # infinite, which is refused where it counts
            parts.append(np.array(part, dtype))
    return np.concatenate(parts)
