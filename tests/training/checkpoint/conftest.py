"""The model of checkpoint tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import small_model


@pytest.fixture(scope="module")
def checkpoint(parity_folder: Path, megatron_imported: Any) -> Path:
    return small_model(parity_folder)
