"""Run files that fork their members first: a process that has used a GPU cannot pass it on to forks."""

from __future__ import annotations

import pytest

FORKS = (
    "test_mtp_on_device.py",
    "test_weight_transports.py",
    "test_features_on_device.py",
    "test_failed_rank_on_device.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run :data:`FORKS` before all tests that use the GPU in this process."""
    items.sort(key=lambda item: item.path.name not in FORKS)
