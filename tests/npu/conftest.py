"""Tests of the Ascend path. They run in a pytest process of their own, on the simulated device:

    bash scripts/test.sh 0.16 npu                                    # with the tests' double of MindSpeed
    MEGASCEND_MINDSPEED=CHECKOUT bash scripts/test.sh 0.16 npu       # with the real one

The process is bootstrapped once for the platform ``npu``; ranks are forked from it. What needs a fresh process (the order
of imports, for one) starts it with :func:`run_python`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import simnpu
from megascend.bootstrap.runtime import Runtime, bootstrap
from megascend.testing.reference import IMPORTED, ProgramServer
from support.covering import FIRST_STACK

SECOND_STACK = ("test_contract.py",)
"""What CI runs on the second stack too: what another MindSpeed has otherwise. Another Megatron is in its parity on the CPU."""
DOUBLES = Path(__file__).resolve().parents[1] / "doubles"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the second stack the other files are nightly."""
    for item in items:
        if not FIRST_STACK and item.path.parent == Path(__file__).parent and item.path.name not in SECOND_STACK:
            item.add_marker(pytest.mark.nightly)


def mindspeed_folder() -> Path:
    """The real MindSpeed if MEGASCEND_MINDSPEED names a checkout, else the double."""
    named = os.environ.get("MEGASCEND_MINDSPEED")
    return Path(named) if named else DOUBLES


def npu_environment(**changes: str) -> dict[str, str]:
    """The environment of a process on the simulated device, with MindSpeed on its path."""
    path = [str(mindspeed_folder()), *(entry for entry in sys.path if entry and "simnpu" not in entry)]
    # Without what the bootstrap of this process has set: a fresh one shall find nothing decided.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HCCL_") and name != "PYTEST_CURRENT_TEST"
    }
    base = inherited | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return simnpu.environment(base) | changes


@pytest.fixture(scope="session")
def run_python() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run code on the simulated device: ``run_python(code, *arguments, check=True, **environment)``.

    Each in a fork of a process that has imported torch and nothing of Megatron or MindSpeed; with ``huggingface=True``
    transformers and peft as well, whose lazy modules MindSpeed's own import asks for what they cannot import.
    """
    device = ("torch", "torch_npu")
    servers = {False: ProgramServer(device), True: ProgramServer((*device, *IMPORTED["transformers"], "peft"))}

    def run(
        code: str | Path,
        *arguments: object,
        check: bool = True,
        huggingface: bool = False,
        timeout: float = 300,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        done = servers[huggingface].run(code, arguments, npu_environment(**environment), timeout_s=timeout)
        assert not check or done.returncode == 0, done.stderr[-4000:]
        return done

    yield run
    for server in servers.values():
        server.close()


@pytest.fixture(scope="session")
def npu() -> Runtime:
    """This process bootstrapped for the platform ``npu``, with everything imported that ranks need."""
    simnpu.activate()
    if str(mindspeed_folder()) not in sys.path:
        sys.path.insert(0, str(mindspeed_folder()))
    runtime = bootstrap("npu")
    runtime.load_megatron()
    for module in ("megascend.backend", "megascend.engines.megatron.engine", "megascend.step.step"):
        import_module(module)
    from megascend.testing.self_checks import warm_tiny_models

    warm_tiny_models()
    return runtime
