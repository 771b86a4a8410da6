"""Images in conversations: where they come from, decoding within limits, and the patches that a model's processor makes."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from megascend.apps.data.document import Document, Message, Messages
from megascend.config import DataImages
from megascend.config.data import ImageLimits
from megascend.errors import DataError, MissingDependencyError
from megascend.models import ImageLayout, architecture_of
from megascend.models.checkpoint_files.files import read_config
from megascend.training.batch.image_sources import ImageIdentity, ImageSource, ImageSources

if TYPE_CHECKING:
    from PIL.Image import Image

    from megascend.training.batch.images import SampleImages

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
"""Pillow's names of the formats that are decoded."""
DATA_URL = re.compile(r"data:[^,]{0,200};base64,(?P<data>.*)", re.DOTALL | re.IGNORECASE)
PLACEHOLDER = "<image>"
"""Place of an image in the text of messages, in data sets with a column of images."""
ANY_PLACEHOLDER = re.compile(
    r"<(\|?)((image|video|audio|media(?=_))(_\d+|_pad|_soft_token|_placeholder)?|vision_start|\w+_of_image)\1>|\[IMG\]|<IMG_CONTEXT>"
)
"""Places of images, videos and sounds in the texts of models and data sets."""
KEYS = ("image", "path", "url", "base64", "bytes")
"""Keys of a part for the image itself."""


# --- in records ---


def image_part(part: dict[str, Any], label: str) -> dict[str, Any]:
    """Return a part of a message's content that is an image; without a source, it takes the next one of the column of images.

    It is ``{"type": "image", "image": ...}``, with another of :data:`KEYS`, or OpenAI's ``{"type": "image_url", ...}``; ``label``
    begins every error.
    """
    if part["type"] == "image_url":
        url = part.get("image_url")
        values = [url.get("url") if isinstance(url, dict) else url]
    else:
        if isinstance(text := part.get("base64"), str) and not DATA_URL.fullmatch(text):
            part = part | {"base64": _from_base64(text, label)}
        values = [part[key] for key in KEYS if part.get(key) is not None]
    if len(values) > 1:
        raise DataError(f"{label} names more than one image: leave one of {', '.join(KEYS)}")
    if part["type"] == "image_url" and values == [None]:
        raise DataError(f"{label} has no url")
    return {"type": "image", "image": image_source(values[0], label) if values else None}


def image_source(value: Any, label: str) -> ImageSource:
    """Return the source of an image: a path, a data URL with base64, bytes, or what parquet and datasets have."""
    if isinstance(value, dict) and (value.get("bytes") is not None or value.get("path") is not None):
        # datasets stores both keys; where bytes are set, path is only the name that the file once had.
        content = value.get("bytes")
        return image_source(value["path"] if content is None else content, label)
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageSource(data=bytes(value))
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{label} must be a path, a data: URL with base64, or bytes, found {value!r:.60}")
    if match := DATA_URL.fullmatch(value):
        return ImageSource(data=_from_base64(match["data"], label))
    if value[:5].lower() == "data:":
        raise DataError(f"{label} is a data: URL without base64, {value!r:.60}")
    if value.startswith("file://"):
        value = value.removeprefix("file://")
    # Not a drive letter of Windows.
    if re.match(r"[a-zA-Z][\w+.-]+:", value) and not re.match(r"[a-zA-Z]:[\\/]", value):
        raise DataError(
            f"{label} is {value!r:.60}; images are read from files and data: URLs, never from a network: fetch them first"
        )
    return ImageSource(path=value)


def _from_base64(text: str, label: str) -> bytes:
    try:
        # Without line breaks, which tools for base64 insert; any other foreign character is an error.
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{label} is not valid base64: {error}") from None


def with_images(document: Document, column: Any) -> Document:
    """Return a document whose parts without a source have the images of its column, one or a list of them, in order."""
    values = [] if column is None or column == [] else column if isinstance(column, list) else [column]
    images = [image_source(value, f"images[{number}]") for number, value in enumerate(values)]

    # Each side of a preference pair has the prompt with its images, and takes all of them.
    sides = {name: getattr(document, name) for name in ("messages", "chosen", "rejected")}
    placed = {name: _placed(messages, images, name) for name, messages in sides.items() if isinstance(messages, tuple)}
    return replace(document, **placed)


def _placed(messages: Messages, images: Sequence[ImageSource], label: str) -> Messages:
    """Put images into the parts that lack one or, if no message has such a part, in place of ``<image>`` in the texts."""
    parts = [part for message in messages for part in _parts(message) if part["type"] == "image"]
    # Only without such parts: in data that mark images by parts, <image> is ordinary text.
    if images and not parts:
        messages = tuple(_split(message) for message in messages)
        parts = [part for message in messages for part in _parts(message) if part["type"] == "image"]
    missing = sum(part["image"] is None for part in parts)
    if missing != len(images):
        raise DataError(
            f"{label} have {missing} places for images ({PLACEHOLDER} in a text, or parts of type 'image' without one), and "
            f"images has {len(images)}"
        )
    remaining, placed = iter(images), []
    for message in messages:
        if _parts(message):
            content = [
                part | {"image": next(remaining)} if part["type"] == "image" and part["image"] is None else part
                for part in message["content"]
            ]
            message = message | {"content": content}
        placed.append(message)
    return tuple(placed)


def _parts(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _split(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or PLACEHOLDER not in content:
        return message
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(PLACEHOLDER)):
        parts += [{"type": "image", "image": None}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return message | {"content": parts}


def sources_of(messages: Iterable[Message]) -> list[ImageSource]:
    return [part["image"] for message in messages for part in _parts(message) if part["type"] == "image"]


def folder_of(source: str) -> Path:
    """Return the folder that paths in a record are relative to, from the record's ``file:line`` or ``file[row]``."""
    match = re.fullmatch(r"(.+?)(?::\d+|\[\d+\])", source, re.DOTALL)
    path = Path(match[1] if match else source)
    # Of several splits that datasets saved, their common folder.
    return path if path.is_dir() and not (path.parent / "dataset_dict.json").is_file() else path.parent


# --- decoding ---
# The only place where images are read and decoded: for data, stores, prompts and requests.


def location(source: ImageSource, folder: Path | None, limits: ImageLimits) -> Path:
    """Return the absolute path of an image's file, links followed; paths are relative to ``folder``.

    Raises:
        DataError: the path leads nowhere, or out of the folder that all images must be in.
    """
    assert source.path is not None
    path = (folder or Path()) / source.path
    try:
        file = path.resolve(strict=True)
    except FileNotFoundError:
        raise DataError(f"image {source.name}: {str(path)!r} is no file") from None
    except RuntimeError:  # Python before 3.13
        raise DataError(f"image {source.name}: {str(path)!r} is a link that leads back to itself") from None
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise DataError(f"image {source.name}: {str(path)!r} cannot be read: {problem}") from None
    root = limits.folder if isinstance(limits, DataImages) else None
    if root is not None and not file.is_relative_to(root.resolve()):
        raise DataError(f"image {source.name}: {str(file)!r} is outside {root} (data.images.folder)")
    return file


def encoded(source: ImageSource, limits: ImageLimits, folder: Path | None = None) -> bytes:
    """Return the bytes of an image's file; paths are relative to ``folder``."""
    if source.data is not None:
        content, size = source.data, len(source.data)
    else:
        path = location(source, folder, limits)
        try:
            # Before it is opened: a named pipe would wait for a writer, and a device has no end.
            if not path.is_file():
                raise DataError(f"image {source.name}: {str(path)!r} is no file")
            size = path.stat().st_size
            # One byte more than allowed: a file that grows meanwhile is refused too.
            with path.open("rb") as file:
                content = file.read(limits.max_bytes + 1)
        except OSError as error:
            raise DataError(f"image {source.name}: {str(path)!r} cannot be read: {error.strerror or error}") from None
    if not content:
        raise DataError(f"image {source.name} is empty: 0 bytes")
    if max(size, len(content)) > limits.max_bytes:
        raise DataError(
            f"image {source.name} has {size} bytes, over the limit of {limits.max_bytes} ({limits.setting}.max_bytes)"
        )
    return content


def decode(content: bytes, name: str, limits: ImageLimits, formats: Sequence[str] = FORMATS) -> Image:
    """Decode a still image to RGB, upright, as transformers' processors do; of 16 bits a channel, the upper 8 are taken.

    Raises:
        DataError: it has more pixels than the limit, which is read before they are decoded; is damaged; or of other ``formats``.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # The limit below is checked instead, before any pixel is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=tuple(formats))
            width, height = image.size
            if width * height > limits.max_pixels:
                raise DataError(
                    f"image {name} has {width} x {height} pixels, over the limit of {limits.max_pixels} "
                    f"({limits.setting}.max_pixels)"
                )
            if width < 1 or height < 1:
                raise DataError(f"image {name} has {width} x {height} pixels")
            if getattr(image, "is_animated", False) and image.format != "MPO":  # MPO: a photograph with its preview
                raise DataError(f"image {name} is animated; only still images are read: save one frame")
            image.load()
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):
                # Grey of 16 bits. Pillow's own conversion would make white of every value above 255.
                image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
            return image.convert("RGB")
    except DataError:
        raise
    except Image.DecompressionBombError:
        raise DataError(
            f"image {name} has more pixels than Pillow decodes, over the limit of {limits.max_pixels} "
            f"({limits.setting}.max_pixels)"
        ) from None
    except Image.UnidentifiedImageError:
        raise DataError(f"image {name} is in none of the formats {', '.join(formats)}, or damaged") from None
    except Exception as error:  # decoders raise any kind of error for damaged files
        raise DataError(f"image {name} is damaged: {type(error).__name__}: {error}") from error


# --- the model's processor ---


class ImageProcessor:
    """Decodes images and cuts them into patches with the image processor of a checkpoint.

    Attributes:
        layout: sizes by which the model's images and tokens fit together.
        limits: limits on decoded images.
    """

    def __init__(self, model: Path, layout: ImageLayout, limits: ImageLimits) -> None:
        """Read the processor's settings in a checkpoint's directory; DataError if it has none."""
        self.layout, self.limits = layout, limits
        self._processor = _image_processor(model)

    @classmethod
    def for_model(cls, model: Path, limits: ImageLimits | None = None) -> ImageProcessor | None:
        """Return the processor of a model that takes images; None for a model of text."""
        if not (model / "config.json").is_file():  # a directory with a tokenizer only
            return None
        config = read_config(model)
        layout = architecture_of(config).image_layout(config)
        return None if layout is None else cls(model, layout, limits or DataImages())

    def encode(self, sources: Sequence[ImageSource], folder: Path) -> EncodedImages:
        """Read and decode the images of a sample, so that a damaged one is refused, and count their tokens.

        Raises:
            DataError: one of them, or their number, is not within the limits.
        """
        if len(sources) > self.limits.max_count:
            raise DataError(
                f"the conversation has {len(sources)} images, over the limit of {self.limits.max_count} "
                f"({self.limits.setting}.max_count)"
            )
        identities, tokens = [], []
        for source in sources:
            # Before it is read: of a file that changes meanwhile, the next start of the run sees another time.
            file = None if source.path is None else location(source, folder, self.limits)
            size, modified = (0, 0) if file is None else file_state(file)
            content = encoded(source, self.limits, folder)
            tokens.append(self._tokens(decode(content, source.name, self.limits), source.name))
            identities.append(ImageIdentity(file, image_digest(content), size, modified))
        return EncodedImages(ImageSources(tuple(sources), folder, tuple(identities)), tuple(tokens))

    def _tokens(self, image: Image, name: str) -> int:
        # Counted, not made: samples are stored without patches, which are made again when a batch needs them.
        with _named(image, name):
            return self._processor.get_number_of_image_patches(image.height, image.width) // self.layout.merge**2

    def images(self, contents: Sequence[bytes], names: Sequence[str]) -> SampleImages:
        """Return the patches of a sample's images, from their files."""
        import torch

        from megascend.training.batch.images import SampleImages  # here: it needs torch

        # One by one: decoded images are far larger than their patches.
        outputs = [
            self._patches(decode(content, name, self.limits), name)
            for content, name in zip(contents, names, strict=True)
        ]
        return SampleImages(
            torch.cat([output["pixel_values"] for output in outputs]),
            torch.cat([output["image_grid_thw"] for output in outputs]),
        )

    def grid(self, image: Image, name: str) -> tuple[int, int, int]:
        """Return frames, rows and columns of a decoded image's patches."""
        frames, rows, columns = self._patches(image, name)["image_grid_thw"][0].tolist()
        return frames, rows, columns

    def _patches(self, image: Image, name: str) -> Any:
        with _named(image, name):
            return self._processor(images=[image], return_tensors="pt")

    def deferred(self, sources: ImageSources) -> SampleImages:
        """Return the images of a sample, decoded when they are first used."""
        from megascend.training.batch.images import DeferredImages  # here: it needs torch

        return DeferredImages(lambda: self.load(sources), sources.grids, self.layout.patch_width)

    def load(self, sources: ImageSources) -> SampleImages:
        """Return the patches of a sample's images, from where they are."""
        contents = [encoded(source, self.limits, sources.folder) for source in sources.sources]
        return self.images(contents, [source.name for source in sources.sources])


@contextlib.contextmanager
def _named(image: Image, name: str) -> Iterator[None]:
    """Name the image that a processor refuses within the context."""
    try:
        yield
    except ValueError as error:
        raise DataError(f"image {name} of {image.width} x {image.height} pixels: {error}") from error


def image_digest(content: bytes) -> int:
    """Return a digest of an image's file that fits int64."""
    return int.from_bytes(xxhash.xxh3_64_digest(content), "little", signed=True)


def file_state(path: Path) -> tuple[int, int]:
    """Return a file's size and time of change in nanoseconds, or (-1, -1) if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _image_processor(model: Path) -> Any:
    from transformers import AutoImageProcessor
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    # transformers warns that it takes Pillow where torchvision is not installed.
    logging.set_verbosity_error()
    try:
        return AutoImageProcessor.from_pretrained(model, local_files_only=True)
    except ImportError as error:
        raise MissingDependencyError(f"the image processor of {model} needs a package: {error}") from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"{model} takes images, and transformers cannot read its image processor (preprocessor_config.json): {error}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


@dataclass(frozen=True)
class EncodedImages:
    """Images of a sample while it is made, and the number of tokens of each."""

    sources: ImageSources
    tokens: tuple[int, ...]

    def expand(self, ids: Sequence[int], weights: Sequence[float], token: int) -> tuple[list[int], list[float]]:
        """Return ids and weights with as many tokens for each image as it has features, none of which is learned.

        The chat template writes one ``token``, which stands for a feature, for each image.
        """
        count = ids.count(token)
        if count != len(self.tokens):
            raise DataError(
                f"the chat template writes {count} tokens of images (id {token}) for {len(self.tokens)} images; use another "
                "one (data.chat_template), and no such token in texts"
            )
        features = iter(self.tokens)
        all_ids: list[int] = []
        all_weights: list[float] = []
        for number, weight in zip(ids, weights, strict=True):
            copies = next(features) if number == token else 1
            all_ids += [number] * copies
            # Also with train_on_prompt: the token is the same for every feature, and the features are inputs only.
            all_weights += [0.0 if number == token else weight] * copies
        return all_ids, all_weights
