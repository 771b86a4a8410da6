"""Any change to a manifest, or to a file that it lists, is detected."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from megascend import CheckpointError
from megascend.testing import faults
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.manifest import CheckpointManifest, parse, problems, read

MANIFEST = CheckpointManifest(
    step=1200,
    precision="bf16",
    model={"layers": 2, "hidden": 64, "vocabulary": 320},
    layout={"tensor": 1, "data": 2},
    optimizer={"updates": 1199, "skipped_in_a_row": 0, "scaler": None},
    adapters=[],
    versions={"megascend": "0.1.0", "torch": "2.13.0+cpu"},
    progress={"data": {"epoch": 3, "position": 17, "order": [3, 1, 2]}, "counts": {"loss": 1.25, "tokens": 4096}},
    config={"data": {"path": "données/ä.jsonl"}, "seed": 1234},
    files={"__0_0.distcp": {"bytes": 4096, "xxh3": "00112233445566778899aabbccddeeff"}},
)


@pytest.fixture
def directory(tmp_path):
    """Write some files without a manifest."""
    contents = {"__0_0.distcp": bytes(range(256)) * 17, "adapters/a/weights": b"some weights", "empty": b""}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def digests(directory):
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    return {name: manifest.digest(directory / name) for name in names}


def refused(data, tmp_path):
    """Check that ``data`` as a manifest raises CheckpointError; any other exception fails the test."""
    (tmp_path / manifest.NAME).write_bytes(data)
    try:
        read(tmp_path)
    except CheckpointError as error:
        return manifest.NAME in str(error)
    return False


def test_manifest_survives_writing_and_parsing(tmp_path):
    assert parse(MANIFEST.to_text(), tmp_path) == MANIFEST


@pytest.mark.parametrize(
    "value", [math.inf, 1e-300, 0.1, -0.0, 2**70, "\u2028 \U0001f600 \ud800", True, None, [[]], {}]
)
def test_progress_values_survive_writing_and_reading(tmp_path, value):
    (tmp_path / manifest.NAME).write_text(
        CheckpointManifest(1, "fp32", {}, {}, None, [], {}, {"value": value}).to_text()
    )
    assert read(tmp_path).progress == {"value": value}


def test_nan_survives_writing_and_reading(tmp_path):
    (tmp_path / manifest.NAME).write_text(
        CheckpointManifest(1, "fp32", {}, {}, None, [], {}, {"loss": math.nan}).to_text()
    )
    assert math.isnan(read(tmp_path).progress["loss"])


def test_every_flipped_bit_is_refused(tmp_path):
    data = MANIFEST.to_text().encode()
    for offset in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[offset] ^= 1 << bit
            try:
                text = damaged.decode()
            except UnicodeDecodeError:
                assert refused(bytes(damaged), tmp_path)
                continue
            with pytest.raises(CheckpointError, match=manifest.NAME):
                parse(text, tmp_path / manifest.NAME)


def test_every_truncation_is_refused(tmp_path):
    data = MANIFEST.to_text().encode()
    assert all(refused(data[:length], tmp_path) for length in range(len(data)))


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "[1]", "3", '"text"', "{}", "[" * 100_000, '{"format": 2}', "\ufeff{}", "\x00" * 64, "1" * 5000],
    ids=lambda text: repr(text[:20]),
)
def test_invalid_manifest_text_is_refused(tmp_path, text):
    assert refused(text.encode(), tmp_path)


@pytest.mark.parametrize("form", [1, 3, "2", None, 2.5])
def test_another_format_is_named(tmp_path, form):
    values = json.loads(MANIFEST.to_text()) | {"format": form}
    (tmp_path / manifest.NAME).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=rf"has format {form!r}; this version of megascend reads 2"):
        read(tmp_path)


def test_missing_manifest_raises_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"megascend\.json is missing; the directory is not a complete"):
        read(tmp_path)
    with pytest.raises(CheckpointError, match=r"megascend\.json is missing"):
        read(tmp_path / "nowhere")
    (tmp_path / manifest.NAME).mkdir()
    with pytest.raises(CheckpointError, match=r"megascend\.json cannot be read"):
        read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"megascend\.json cannot be read"):
        read(tmp_path / "file")


def test_every_flipped_byte_of_a_file_is_detected(directory):
    files = digests(directory)
    for offset in range(0, files["__0_0.distcp"]["bytes"], 7):
        faults.flip_byte(directory / "__0_0.distcp", offset)
        assert problems(directory, files, files) == ["__0_0.distcp is damaged: its content is not what was written"]
        faults.flip_byte(directory / "__0_0.distcp", offset)
    assert problems(directory, files, files) == []


def test_files_that_are_missing_short_long_altered_or_unreadable_are_named(directory):
    files = digests(directory)
    name, nested = "__0_0.distcp", "adapters/a/weights"
    faults.truncate(directory / name, 4000)
    assert problems(directory, files, files) == [f"{name} has 4000 bytes instead of 4352"]
    faults.truncate(directory / name, 0)
    assert problems(directory, files, files) == [f"{name} has 0 bytes instead of 4352"]
    (directory / name).write_bytes(bytes(range(256)) * 17 + b"\0")
    assert problems(directory, files, files) == [f"{name} has 4353 bytes instead of 4352"]
    (directory / name).unlink()
    assert problems(directory, files, files) == [f"{name} is missing"]
    (directory / nested).write_bytes(b"some Weights")
    assert problems(directory, files, files)[1:] == [f"{nested} is damaged: its content is not what was written"]
    assert problems(directory, files, [nested]) == [f"{nested} is damaged: its content is not what was written"]


def test_checkpoint_of_another_kind_of_training_names_the_setting(tmp_path):
    adapters = dataclasses.replace(MANIFEST, optimizer=None)
    for saved, current, message in (
        (
            MANIFEST,
            adapters,
            "holds all parameters of a model, and this run trains LoRA adapters .*; set or leave out lora",
        ),
        (
            adapters,
            MANIFEST,
            "holds LoRA adapters on a frozen model, and this run trains all parameters of a model; set or leave",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            manifest.check_fits(saved, current, tmp_path)
