"""Images in conversations: every form in which data has them, limits and damage, and the patches of the model's processor."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megascend.apps.cli.random_checkpoint import ModelSize, byte_tokenizer, write_checkpoint
from megascend.apps.data.files import read_documents
from megascend.apps.data.images import ImageProcessor, decode
from megascend.apps.data.prepare import prepare_samples
from megascend.apps.data.samples import SampleLimits, build_samples
from megascend.apps.data.store import Samples
from megascend.config import Data, DataImages
from megascend.config.data import DataSource
from megascend.errors import DataError
from megascend.models.families.qwen3_vl import IMAGES
from megascend.training.batch.images import SampleImages, decode_together

PAD = 261
LIMITS = SampleLimits(400, vocab_size=320)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny Qwen3-VL with its processor."""
    path = tmp_path_factory.mktemp("models") / "qwen3_vl"
    write_checkpoint(path, ModelSize(arch="qwen3_vl", hidden=32, layers=2))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with an image, and use a separate cache."""
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "cache"))
    save(tmp_path / "data" / "cats" / "one.png")
    return tmp_path / "data"


def save(path: Path, seed: int = 0, size: tuple[int, int] = (48, 32)) -> bytes:
    """Save an image of noise (width, height), and return the file's bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path.read_bytes()


def conversation(*parts: Any, answer: str = "a cat") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": answer},
    ]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def samples_of(path: Path, model: Path, limits: SampleLimits = LIMITS, **settings: Any) -> Samples:
    data = Data(path=path, **settings)
    return prepare_samples(DataSource(path, data, "data.path"), byte_tokenizer(2048, IMAGES), limits, model)


def expected_images(model: Path, *files: Path) -> SampleImages:
    """Return the patches that transformers' processor makes of files."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(model)
    outputs = processor(images=[Image.open(file).convert("RGB") for file in files], return_tensors="pt")
    return SampleImages(outputs["pixel_values"], outputs["image_grid_thw"])


def assert_same_images(images: Any, expected: SampleImages) -> None:
    assert isinstance(images, SampleImages)
    assert torch.equal(images.pixel_values, expected.pixel_values)
    assert torch.equal(images.grids, expected.grids)


# --- forms of data ---

PATH = "cats/one.png"


def record_forms(content: bytes) -> dict[str, dict[str, Any]]:
    text = base64.b64encode(content).decode()
    url = f"data:image/png;base64,{text}"
    plain = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a cat"}]
    sharegpt = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "a cat"}]
    return {
        "path": {"messages": conversation({"type": "image", "image": PATH})},
        "path key": {"messages": conversation({"type": "image", "path": PATH})},
        "data URL": {"messages": conversation({"type": "image", "image": url})},
        "image_url": {"messages": conversation({"type": "image_url", "image_url": {"url": url}})},
        "broken lines": {"messages": conversation({"type": "image", "base64": base64.encodebytes(content).decode()})},
        "base64 key with a URL": {"messages": conversation({"type": "image", "base64": url})},
        "URL with a parameter": {
            "messages": conversation({"type": "image", "image": f"data:image/png;name=a.png;base64,{text}"})
        },
        "column and parts": {"messages": conversation({"type": "image"}), "images": [PATH]},
        "column and placeholders": {"messages": plain, "images": [PATH]},
        "one in a column": {"messages": plain, "image": PATH},
        "ShareGPT": {"conversations": sharegpt, "images": [PATH]},
        "prompt and completion": {"prompt": plain[:1], "completion": plain[1:], "images": [PATH]},
    }


@pytest.mark.parametrize("form", record_forms(b""))
def test_every_form_gives_the_same_sample(form: str, folder: Path, model: Path) -> None:
    content = (folder / PATH).read_bytes()
    store = samples_of(write(folder / "data.jsonl", record_forms(content)[form]), model)
    sample = store[0]
    assert_same_images(sample.images, expected_images(model, folder / PATH))
    # 48 x 32 pixels, a patch of 8, four patches a feature: 3 x 2 tokens.
    text = byte_tokenizer(2048, IMAGES).decode([*sample.input_ids.tolist(), int(sample.target_ids[-1])])
    image = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"
    assert text == f"<|im_start|>user\n{image}what?<|im_end|>\n<|im_start|>assistant\na cat<|im_end|>\n"
    learned = sample.target_ids[sample.weights > 0].tolist()
    assert byte_tokenizer(2048, IMAGES).decode(learned) == "a cat<|im_end|>"


def test_parquet_and_saved_data_sets_have_the_same_images(folder: Path, model: Path, tmp_path: Path) -> None:
    import datasets

    content = (folder / PATH).read_bytes()
    messages = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a cat"}]
    rows = datasets.Dataset.from_dict(
        {"messages": [messages], "images": [[{"bytes": content, "path": None}]]},
        features=datasets.Features(
            {
                "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
                "images": [datasets.Image()],
            }
        ),
    )
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "saved")
    expected = expected_images(model, folder / PATH)
    for path in (tmp_path / "rows.parquet", tmp_path / "saved"):
        assert_same_images(samples_of(path, model)[0].images, expected)


def test_several_images_and_none_in_one_file(folder: Path, model: Path) -> None:
    save(folder / "two.png", 1, (32, 64))
    two_images = conversation({"type": "image", "image": PATH}, {"type": "image", "image": "two.png"})
    path = write(folder / "data.jsonl", {"messages": two_images}, {"messages": conversation()})
    store = samples_of(path, model)
    assert_same_images(store[0].images, expected_images(model, folder / PATH, folder / "two.png"))
    assert int((store[0].input_ids == PAD).sum()) == 6 + 8
    assert store[1].images is None
    in_memory = build_samples(
        read_documents(path), byte_tokenizer(2048, IMAGES), 400, image_processor=ImageProcessor.for_model(model)
    )
    for stored, built in zip(store, in_memory, strict=True):
        assert torch.equal(stored.input_ids, built.input_ids)
        assert torch.equal(stored.weights, built.weights)
    expected = in_memory[0].images
    assert isinstance(expected, SampleImages)
    assert_same_images(store[0].images, expected)


def test_tokens_of_images_carry_no_loss_with_the_prompt_learned(folder: Path, model: Path) -> None:
    record = {"messages": conversation({"type": "image", "image": PATH})}
    sample = samples_of(write(folder / "data.jsonl", record), model, train_on_prompt=True)[0]
    assert float(sample.weights[sample.target_ids == PAD].sum()) == 0
    assert float(sample.weights[sample.target_ids != PAD].min()) == 1


def test_preference_pair_has_the_image_on_both_sides(folder: Path, model: Path) -> None:
    sides = {name: conversation({"type": "image", "image": PATH}, answer=name) for name in ("chosen", "rejected")}
    store = samples_of(write(folder / "data.jsonl", sides), model)
    expected = expected_images(model, folder / PATH)
    for index in range(2):
        assert_same_images(store[index].images, expected)
    assert [store[index].chosen for index in range(2)] == [True, False]


# --- refusals ---


def png(*chunks: bytes) -> bytes:
    """Return a PNG file of chunks, each its name and content."""
    body = b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    """Return the first chunk of a PNG file; ``colour``: 0 grey, 2 RGB, 4 grey and alpha, 6 RGB and alpha."""
    return b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)


def png_header(width: int, height: int) -> bytes:
    """Return a PNG file that says its size and has no pixels."""
    return png(header(width, height), b"IDAT" + zlib.compress(b"\0"))


def text_bomb() -> bytes:
    """Return a small PNG file with a comment that is 200 MB when it is decompressed."""
    packer = zlib.compressobj(9)
    comment = b"".join(packer.compress(b"a" * 2**20) for _ in range(200)) + packer.flush()
    return png(header(8, 8), b"zTXtbomb\0\0" + comment, b"IDAT" + zlib.compress(bytes(8 * 25)))


def animation(kind: str) -> Callable[[Path], object]:
    def save_frames(path: Path) -> None:
        frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
        frames[0].save(path, kind, save_all=True, append_images=frames[1:])

    return save_frames


def part_of(kind: str, share: float) -> Callable[[Path], object]:
    """Save the first share of a file of noise."""

    def save_part(path: Path) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, kind)
        path.write_bytes(buffer.getvalue()[: int(len(buffer.getvalue()) * share)])

    return save_part


def link_loop(path: Path) -> None:
    path.symlink_to(path.with_name("other"))
    path.with_name("other").symlink_to(path)


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "is no file"),
    "folder": (lambda path: path.mkdir(), "is no file"),
    "link to nothing": (lambda path: path.symlink_to(path.with_name("nothing")), "is no file"),
    "link to itself": (link_loop, "bad.png' "),
    "pipe": (lambda path: os.mkfifo(path), "is no file"),
    "device without an end": (lambda path: path.symlink_to("/dev/zero"), "is no file"),
    "empty": (lambda path: path.write_bytes(b""), "is empty: 0 bytes"),
    "not an image": (lambda path: path.write_text("hello"), "is in none of the formats JPEG, PNG, WEBP, BMP, GIF"),
    # A program that Pillow would run Ghostscript for.
    "EPS": (lambda path: Image.new("RGB", (8, 8)).save(path, "EPS"), "is in none of the formats"),
    "TIFF": (lambda path: Image.new("RGB", (8, 8)).save(path, "TIFF"), "is in none of the formats"),
    "header alone": (lambda path: path.write_bytes(png(header(8, 8))), "damaged"),
    "no pixels": (lambda path: path.write_bytes(png_header(8, 8)), "is damaged"),
    "no width": (lambda path: path.write_bytes(png_header(0, 8)), "image 'bad.png' "),
    "bomb": (
        lambda path: path.write_bytes(png_header(60_000, 60_000)),
        "has more pixels than Pillow decodes, over the limit of 67108864 (data.images.max_pixels)",
    ),
    "large": (
        lambda path: path.write_bytes(png_header(9_000, 9_000)),
        "has 9000 x 9000 pixels, over the limit of 67108864 (data.images.max_pixels)",
    ),
    "comment that is a bomb": (lambda path: path.write_bytes(text_bomb()), "is damaged: ValueError: Decompressed data"),
    "animated GIF": (animation("GIF"), "is animated; only still images are read"),
    "animated PNG": (animation("PNG"), "is animated; only still images are read"),
    "animated WebP": (animation("WEBP"), "is animated; only still images are read"),
    "thin": (lambda path: save(path, size=(2000, 8)), "absolute aspect ratio must be smaller than 200"),
    **{
        f"{share:.0%} of a {kind}": (part_of(kind, share), "damaged")
        for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF")
        for share in (0.001, 0.5)
    },
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_image_is_refused_with_its_line(kind: str, folder: Path, model: Path) -> None:
    make, problem = DAMAGED[kind]
    make(folder / "bad.png")
    good = {"messages": conversation({"type": "image", "image": PATH})}
    bad = {"messages": conversation({"type": "image", "image": "bad.png"})}
    path = write(folder / "data.jsonl", good, bad)
    with pytest.raises(DataError) as error:
        samples_of(path, model)
    assert str(error.value).startswith(f"{path}:2: image 'bad.png'")
    assert problem in str(error.value)


@pytest.mark.parametrize("name", ["a\0b.png", "x" * 5000, "\ud800.png", "", " "])
def test_paths_that_are_none_are_refused_with_their_line(name: str, folder: Path, model: Path) -> None:
    path = write(folder / "data.jsonl", {"messages": conversation({"type": "image", "image": name})})
    with pytest.raises(DataError) as error:
        samples_of(path, model)
    assert str(error.value).startswith(f"{path}:1: ")
    assert str(error.value).isascii()


def test_images_outside_their_folder_are_refused(folder: Path, model: Path) -> None:
    save(folder / "secret.png", 7)
    (folder / "cats" / "link.png").symlink_to(folder / "secret.png")
    (folder / "cats" / "inner.png").symlink_to(folder / PATH)
    limits = DataImages(folder=folder / "cats")
    for name in ("secret.png", "cats/../secret.png", "cats/link.png", str(folder / "secret.png")):
        path = write(folder / "data.jsonl", {"messages": conversation({"type": "image", "image": name})})
        with pytest.raises(DataError) as error:
            samples_of(path, model, images=limits)
        expected = (
            f"{path}:1: image {name!r}: '{folder / 'secret.png'}' is outside {folder / 'cats'} (data.images.folder)"
        )
        assert str(error.value) == expected
    path = write(folder / "data.jsonl", {"messages": conversation({"type": "image", "image": "cats/inner.png"})})
    images = samples_of(path, model, images=limits)[0].images
    assert_same_images(images, expected_images(model, folder / PATH))


# --- pixels ---


def grey16(path: Path) -> np.ndarray:
    values = np.random.default_rng(1).integers(0, 2**16, (16, 24), dtype=np.uint16)
    Image.fromarray(values).save(path)
    return np.repeat((values >> 8)[..., None], 3, 2)


def colour16(path: Path) -> np.ndarray:
    values = np.random.default_rng(2).integers(0, 2**16, (16, 24, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    path.write_bytes(png(header(24, 16, 16), b"IDAT" + zlib.compress(rows), b"IEND"))
    return values >> 8


def palette(path: Path) -> np.ndarray:
    rng = np.random.default_rng(3)
    colours, numbers = rng.integers(0, 256, (7, 3), dtype=np.uint8), rng.integers(0, 7, (16, 24), dtype=np.uint8)
    image = Image.fromarray(numbers, "P")
    image.putpalette(colours.tobytes())
    image.save(path, transparency=bytes([0, 128, 255, 255, 255, 255, 255]))
    return colours[numbers]


def grey_with_alpha(path: Path) -> np.ndarray:
    values = np.random.default_rng(4).integers(0, 256, (16, 24, 2), dtype=np.uint8)
    Image.fromarray(values, "LA").save(path)
    return np.repeat(values[..., :1], 3, 2)


def colour_with_alpha(path: Path) -> np.ndarray:
    values = np.random.default_rng(5).integers(0, 256, (16, 24, 4), dtype=np.uint8)
    Image.fromarray(values, "RGBA").save(path)
    return values[..., :3]


def black_and_white(path: Path) -> np.ndarray:
    values = np.random.default_rng(6).integers(0, 2, (16, 24)).astype(bool)
    Image.fromarray(values).save(path)
    return np.repeat(values[..., None] * 255, 3, 2)


def bitmap(path: Path) -> np.ndarray:
    values = np.random.default_rng(7).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    Image.fromarray(values).save(path, "BMP")
    return values


def still_gif(path: Path) -> np.ndarray:
    values = palette(path)
    Image.open(path).convert("RGB").save(path, "GIF")
    return values


KINDS = (grey16, colour16, palette, grey_with_alpha, colour_with_alpha, black_and_white, bitmap, still_gif)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_every_kind_of_pixels_becomes_rgb(make: Callable[[Path], np.ndarray], tmp_path: Path) -> None:
    expected = make(tmp_path / "it.png")
    assert np.array_equal(np.asarray(decode((tmp_path / "it.png").read_bytes(), "it", DataImages())), expected)


UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90,
}
"""How a viewer turns an image, by the tag Orientation of EXIF 2.3."""


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_every_orientation_is_turned_upright(orientation: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(8).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "it.png", exif=exif)
    image = decode((tmp_path / "it.png").read_bytes(), "it", DataImages())
    assert np.array_equal(np.asarray(image), UPRIGHT[orientation](pixels))


def test_limits_are_settings(folder: Path, model: Path) -> None:
    part = {"type": "image", "image": PATH}
    path = write(folder / "data.jsonl", {"messages": conversation(part, part)})
    size = (folder / PATH).stat().st_size
    cases = {
        f"image '{PATH}' has {size} bytes, over the limit of 100 (data.images.max_bytes)": {"max_bytes": 100},
        f"image '{PATH}' has 48 x 32 pixels, over the limit of 1000 (data.images.max_pixels)": {"max_pixels": 1000},
        "the conversation has 2 images, over the limit of 1 (data.images.max_count)": {"max_count": 1},
    }
    for message, limits in cases.items():
        with pytest.raises(DataError) as error:
            samples_of(path, model, images=DataImages(**limits))
        assert str(error.value) == f"{path}:1: {message}"


PLACES = ("<|image_pad|>", "<video>")
"""Two of the texts that stand for an image in some family."""


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {"messages": conversation({"type": "image"}), "images": [PATH, PATH]},
            "messages have 1 places for images (<image> in a text, or parts of type 'image' without one), and images has 2",
        ),
        (
            {"messages": conversation({"type": "image", "image": "https://example.org/cat.png"})},
            "images are read from files and data: URLs, never from a network: fetch them first",
        ),
        ({"messages": conversation({"type": "image", "image": "data:image/png;base64,@@"})}, "is not valid base64"),
        ({"messages": conversation({"type": "image", "image": "data:image/png;base64,AAA"})}, "is not valid base64"),
        ({"messages": conversation({"type": "image", "base64": "ÄÖ=="})}, "is not valid base64"),
        ({"messages": conversation({"type": "image", "image": "data:image/png;base64,"})}, "is empty: 0 bytes"),
        ({"messages": conversation({"type": "image", "image": "data:image/png,abc"})}, "is a data: URL without base64"),
        *(
            ({"messages": messages} | column, "<image> is in a text without images")
            for messages in (
                [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a cat"}],
                [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a"}],
            )
            for column in ({}, {"images": []})
        ),
        *(
            (
                {"messages": [{"role": "user", "content": f"{marker}?"}, {"role": "assistant", "content": "a"}]},
                "without images: add",
            )
            for marker in PLACES
        ),
        ({"messages": conversation({"type": "video", "video": "cat.mp4"})}, "is a part of type 'video'; only text and"),
        (
            {"messages": conversation({"type": "image", "image": 3})},
            "must be a path, a data: URL with base64, or bytes",
        ),
        (
            {"messages": conversation({"type": "text", "text": "<|image_pad|>"})},
            "the chat template writes 1 tokens of images (id 261) for 0 images",
        ),
    ],
)
def test_records_that_do_not_fit_are_refused(record: Any, problem: str, folder: Path, model: Path) -> None:
    path = write(folder / "data.jsonl", record)
    with pytest.raises(DataError) as error:
        samples_of(path, model)
    assert str(error.value).startswith(f"{path}:1: ")
    assert problem in str(error.value)


def test_model_of_text_takes_no_images(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "qwen3", ModelSize(hidden=32, layers=1))
    path = write(folder / "data.jsonl", {"messages": conversation({"type": "image", "image": PATH})})
    data = Data(path=path)
    with pytest.raises(DataError, match="the conversation has 1 image, and this model takes none"):
        prepare_samples(DataSource(path, data, "data.path"), byte_tokenizer(2048), LIMITS, tmp_path / "qwen3")


def test_model_without_its_processor_is_refused(folder: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "preprocessor_config.json").unlink()
    path = write(folder / "data.jsonl", {"messages": conversation({"type": "image", "image": PATH})})
    with pytest.raises(DataError, match="transformers cannot read its image processor"):
        samples_of(path, tmp_path / "copy")


# --- the cache ---


def test_changed_image_makes_new_samples(folder: Path, model: Path) -> None:
    path = write(folder / "data.jsonl", {"messages": conversation({"type": "image", "image": PATH})})
    before = samples_of(path, model)
    save(folder / PATH, 5, (64, 64))
    with pytest.raises(DataError, match="has changed since its sample was made"):
        before[0].image_fields()
    after = samples_of(path, model)
    assert_same_images(after[0].images, expected_images(model, folder / PATH))
    assert after.fingerprint != before.fingerprint
    assert samples_of(path, model).fingerprint == after.fingerprint


def test_images_are_decoded_when_they_are_used(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"messages": conversation({"type": "image", "image": PATH})}
    store = samples_of(write(folder / "data.jsonl", record, record, record), model)
    decoded: list[str] = []
    original = ImageProcessor.images

    def images(processor: ImageProcessor, contents: Any, names: Any) -> SampleImages:
        decoded.extend(names)
        return original(processor, contents, names)

    monkeypatch.setattr(ImageProcessor, "images", images)
    samples = store[:3]
    assert decoded == []
    decode_together([samples[0].images, samples[2].images, None])
    assert len(decoded) == 2
    expected = expected_images(model, folder / PATH)
    for sample in samples:
        assert_same_images(sample.images, expected)
    assert len(decoded) == 3
    os.remove(folder / PATH)
    sample = store[0]
    decode_together([sample.images, store[1].images])  # another rank must not wait for this one's error
    with pytest.raises(DataError, match="is no file"):
        sample.image_fields()


def test_cut_conversation_keeps_its_image_or_is_left_out(folder: Path, model: Path) -> None:
    early = conversation({"type": "image", "image": PATH}, answer="a cat, " * 10)
    late = [*conversation(answer="no" * 60), {"role": "user", "content": [{"type": "image", "image": PATH}]}]
    late.append({"role": "assistant", "content": "yes"})
    path = write(folder / "data.jsonl", {"messages": early}, {"messages": late})
    store = samples_of(path, model, SampleLimits(70, vocab_size=320), on_too_long="truncate")
    assert len(store) == 1
    assert len(store[0]) == 70
    assert_same_images(store[0].images, expected_images(model, folder / PATH))
    assert any("an image would be cut" in remark for remark in store.remarks)
