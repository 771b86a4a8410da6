"""Tiny checkpoints load in transformers, are reproducible, and have no constant tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascend.errors import ConfigError
from megascend.testing import write_tiny_checkpoint


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("content")
    with pytest.raises(ConfigError, match="no tiny checkpoint"):
        write_tiny_checkpoint(tmp_path, "llama")
    assert (tmp_path / "precious.txt").read_text() == "content"
