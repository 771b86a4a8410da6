"""Models of adapter tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascend.testing.parity import case_checkpoint


@pytest.fixture(scope="module")
def dense(parity_folder: Path, megatron_imported: Any) -> Path:
    return case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def moe(parity_folder: Path, megatron_imported: Any) -> Path:
    return case_checkpoint(parity_folder, "qwen3_moe", num_hidden_layers=2)
