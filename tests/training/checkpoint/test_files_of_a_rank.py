"""Assignment of a checkpoint's files to ranks while rank 0 still writes to its folders."""

import os
from pathlib import Path

import pytest

from megascend.training.checkpoint.saver import _files_of

FILES = (
    "__0_0.distcp",
    "__1_0.distcp",
    "__1_1.distcp",
    "__10_0.distcp",
    ".metadata",
    "adapters/a/adapter.json",
    "hf/x",
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def test_every_file_belongs_to_one_rank(directory: Path) -> None:
    assert _files_of(directory, 0) == [".metadata", "__0_0.distcp", "adapters/a/adapter.json", "hf/x"]
    assert _files_of(directory, 1) == ["__1_0.distcp", "__1_1.distcp"]
    assert _files_of(directory, 10) == ["__10_0.distcp"]


def test_other_ranks_ignore_folders_that_are_renamed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def fail_for_renamed_folders(path):
        if Path(path).name in ("adapters", "a", "hf"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail_for_renamed_folders)
    assert _files_of(directory, 1) == ["__1_0.distcp", "__1_1.distcp"]
