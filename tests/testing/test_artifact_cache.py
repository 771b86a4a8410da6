"""A cache entry is used only for equal keys, and a damaged entry is rebuilt."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascend.testing import artifact_cache
from megascend.testing.artifact_cache import copy_or_make, folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Write a script whose text is part of the key."""
    (tmp_path / "program.py").write_text("first version")
    return tmp_path / "program.py"


def make(path: Path) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "file").write_text("made")


def never(path: Path) -> None:
    raise AssertionError(f"{path} should have been found")


def test_key_depends_on_job_program_and_versions(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {artifact_cache.key({"a": 1}, program), artifact_cache.key({"a": 2}, program)}
    program.write_text("second version")
    keys.add(artifact_cache.key({"a": 1}, program))
    monkeypatch.setattr(artifact_cache, "_environment", lambda: ["torch 99"])
    keys.add(artifact_cache.key({"a": 1}, program))
    assert len(keys) == 4


@pytest.mark.parametrize("damage", ["flip", "lose", "no digest"])
def test_damaged_entry_is_rebuilt(damage: str, tmp_path: Path, program: Path) -> None:
    copy_or_make("it", {}, program, tmp_path / "one", make)
    (entry,) = folder().iterdir()
    file = entry / "content" / "inner" / "file"
    if damage == "flip":
        file.write_text("maze")
    else:
        (file if damage == "lose" else entry / "sha256").unlink()
    created: list[Path] = []
    copy_or_make("it", {}, program, tmp_path / "two", lambda path: (created.append(path), make(path)))
    assert created == [tmp_path / "two"]
    copy_or_make("it", {}, program, tmp_path / "three", never)
    assert (tmp_path / "three" / "inner" / "file").read_text() == "made"


def test_changed_copy_does_not_change_the_entry(tmp_path: Path, program: Path) -> None:
    copy_or_make("it", {"a": 1}, program, tmp_path / "one", make)
    (tmp_path / "one" / "inner" / "file").write_text("changed by a test")
    copy_or_make("it", {"a": 1}, program, tmp_path / "two", never)
    assert (tmp_path / "two" / "inner" / "file").read_text() == "made"
