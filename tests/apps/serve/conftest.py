"""A service on a recording backend, for tests of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from recording_backend import Served, served


@pytest.fixture
def system(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "storage") as server:
        yield server
