"""The simulated device, for tests in a pytest process of their own: ``MEGASCEND_SIMNPU=1 python -m pytest tests/simnpu``.

It changes torch for the whole process, so that tests which use it are skipped in a run of the other tests.
"""

from __future__ import annotations

import os

import pytest

from megascend import simnpu
from megascend.simnpu.environment import ACTIVE_VARIABLE


@pytest.fixture(scope="session")
def sim_npu() -> None:
    """``torch_npu`` on the simulated device, in this process."""
    if not os.environ.get(ACTIVE_VARIABLE):
        pytest.skip(f"needs a process of its own: {ACTIVE_VARIABLE}=1 python -m pytest tests/simnpu")
    simnpu.activate()
