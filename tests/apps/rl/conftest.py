"""Fixtures of tests of ``megascend rl``."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascend.testing import write_tiny_checkpoint
from support.rl_runs import folder

__all__ = ["folder"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Qwen3, the policy of recorded rollouts."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("policy") / "qwen3", "qwen3")
