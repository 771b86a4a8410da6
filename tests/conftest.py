"""Fixtures that several test modules share."""

from __future__ import annotations

import pytest

from megascend.bootstrap.runtime import Runtime, bootstrap


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    """This process made ready for Megatron on the CPU, with megatron.core imported: forked ranks find it there.

    A process can be bootstrapped once, so a test of the bootstrap itself needs a process of its own.
    """
    runtime = bootstrap("cpu")
    from megatron.core import parallel_state  # noqa: F401

    return runtime
