"""What helper processes made is found again by its content, and a damaged entry is made again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megascend.testing import kept as module
from megascend.testing import write_tiny_checkpoint
from megascend.testing.kept import digest, folder, kept
from megascend.testing.parity import hf_reference, reference


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A script whose text is part of the key."""
    (tmp_path / "program.py").write_text("first version")
    return tmp_path / "program.py"


def make(path: Path) -> None:
    path.mkdir()
    (path / "inner").mkdir()
    (path / "inner" / "file").write_text("made")


def never(path: Path, *arguments: object, **settings: object) -> None:
    raise AssertionError(f"{path} should have been found")


def test_found_again_as_a_copy(tmp_path: Path, program: Path) -> None:
    kept("it", {"a": 1}, program, tmp_path / "one", make)
    (tmp_path / "one" / "inner" / "file").write_text("changed by a test")
    kept("it", {"a": 1}, program, tmp_path / "two", never)
    assert (tmp_path / "two" / "inner" / "file").read_text() == "made"
    kept("single", {}, program, tmp_path / "three", lambda path: path.write_text("a file"))
    kept("single", {}, program, tmp_path / "four", never)
    assert (tmp_path / "four").read_text() == "a file"


def test_another_job_program_or_version_is_another_entry(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {module.key({"a": 1}, program), module.key({"a": 2}, program)}
    program.write_text("second version")
    keys.add(module.key({"a": 1}, program))
    monkeypatch.setattr(module, "_surroundings", lambda: ["torch 99"])
    keys.add(module.key({"a": 1}, program))
    assert len(keys) == 4


@pytest.mark.parametrize("damage", ["flip", "lose", "no digest"])
def test_a_damaged_entry_is_made_again(damage: str, tmp_path: Path, program: Path) -> None:
    kept("it", {}, program, tmp_path / "one", make)
    (entry,) = folder().iterdir()
    file = entry / "content" / "inner" / "file"
    if damage == "flip":
        file.write_text("maze")
    else:
        (file if damage == "lose" else entry / "sha256").unlink()
    made: list[Path] = []
    kept("it", {}, program, tmp_path / "two", lambda path: (made.append(path), make(path)))
    assert made == [tmp_path / "two"]
    kept("it", {}, program, tmp_path / "three", never)
    assert digest(tmp_path / "one") == digest(tmp_path / "two") == digest(tmp_path / "three")


def test_what_fails_leaves_no_entry(tmp_path: Path, program: Path) -> None:
    with pytest.raises(AssertionError, match="should have been found"):
        kept("it", {}, program, tmp_path / "one", never)
    assert list(folder().iterdir()) == []


def test_what_was_not_used_for_the_longest_time_goes_first(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        kept(f"it{number}", {}, program, tmp_path / str(number), make)
        (entry,) = folder().glob(f"it{number}-*")
        os.utime(entry, (number, number))
    kept("it0", {}, program, tmp_path / "again", never)
    size = sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
    monkeypatch.setattr(module, "LIMIT_BYTES", 3 * size - 1)
    kept("it3", {}, program, tmp_path / "3", lambda path: path.write_text(""))
    assert {entry.name[:3] for entry in folder().iterdir()} == {"it0", "it2", "it3"}


def test_a_cache_that_cannot_be_written_is_warned_of(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be written"):
        kept("it", {}, program, tmp_path / "one", make)
    assert (tmp_path / "one" / "inner" / "file").read_text() == "made"


def test_a_reference_is_run_once_wherever_its_checkpoint_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "a", "qwen3", num_hidden_layers=1, vocab_size=64)
    tokens = [[1, 2, 3, 4, 5]]
    (tmp_path / "first").mkdir()
    first = hf_reference(tmp_path / "first", checkpoint, tokens, steps=1)
    shutil.move(checkpoint, tmp_path / "b")

    monkeypatch.setattr("megascend.testing.parity.run_reference", never)
    monkeypatch.setattr("megascend.testing.tiny_models.run_reference", never)
    assert digest(write_tiny_checkpoint(tmp_path / "c", "qwen3", num_hidden_layers=1, vocab_size=64)) == digest(
        tmp_path / "b"
    )
    (tmp_path / "second").mkdir()
    second = hf_reference(tmp_path / "second", tmp_path / "b", tokens, steps=1)
    assert (first.losses, first.grad_norms) == (second.losses, second.grad_norms)

    weights = tmp_path / "b" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(AssertionError, match="should have been found"):  # another model
        reference(tmp_path / "second", "hf_reference.py", {"checkpoint": str(tmp_path / "b")})
