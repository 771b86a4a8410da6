"""The simulated device, for tests in a pytest process of their own: ``SIMNPU=1 python -m pytest tests/simnpu``.

It changes torch for the whole process, so that tests which use it are skipped in a run of the other tests.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import simnpu
from simnpu.settings import ACTIVE_VARIABLE


@pytest.fixture(scope="session")
def sim_npu() -> None:
    """``torch_npu`` on the simulated device, in this process."""
    if not os.environ.get(ACTIVE_VARIABLE):
        pytest.skip(f"needs a process of its own: {ACTIVE_VARIABLE}=1 python -m pytest tests/simnpu")
    simnpu.activate()


@pytest.fixture
def npu(sim_npu: None) -> Any:
    """``torch_npu``."""
    import torch_npu

    return torch_npu


@pytest.fixture
def registered() -> None:
    """The device and its collectives in torch, without ``torch_npu``."""
    if not os.environ.get(ACTIVE_VARIABLE):
        pytest.skip(f"registers a device for the whole process: {ACTIVE_VARIABLE}=1 python -m pytest tests/simnpu")
    from simnpu import collectives, device
    from simnpu import npu as torch_npu_module

    device.register(torch_npu_module)
    collectives.register()


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist give files to workers in the order below, and not by their number of tests."""
    if getattr(config.option, "loadscopereorder", False):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that fork ranks come first: after a backward pass in this process, a forked one can run none."""
    positions = [index for index, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    helpers = {"run_distributed", "on_ranks", "forked"}
    ordered = sorted(
        (items[i] for i in positions), key=lambda item: not helpers & vars(getattr(item, "module", item)).keys()
    )
    for index, item in zip(positions, ordered, strict=True):
        items[index] = item
