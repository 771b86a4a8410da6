"""Tests of the Ascend path. They run in a separate pytest process, on the simulated device:

    bash scripts/test.sh 0.16 npu                                    # with the tests' double of MindSpeed
    MEGASCEND_MINDSPEED=CHECKOUT bash scripts/test.sh 0.16 npu       # with the real one
    bash scripts/test.sh 0.19 npu                                    # with stand-ins for MegatronAdaptor and its engine
    MEGASCEND_MINDSPEED=CHECKOUT bash scripts/test.sh 0.18 npu       # with the real MindSpeed beside them

The process is bootstrapped once for the platform ``npu``; ranks are forked from it. Tests that need a fresh process (for
example of the order of imports) start it with :func:`run_python`.
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
from megascend.runtime.bootstrap.runtime import Runtime, bootstrap
from megascend.testing.reference import IMPORTED, ProgramServer
from simnpu.settings import STRICT_VARIABLE
from support.ascend_packages import ON_ADAPTOR, WITHOUT_EXPERTS, package_folders

MINDSPEED_FILES = (
    "test_attention_calls.py",
    "test_bootstrap.py",
    "test_configurations.py",
    "test_contract.py",
    "test_dropout.py",
    "test_options.py",
    "test_traps.py",
    "test_traps_environment.py",
    "test_traps_models.py",
)
"""Files about provider ``mindspeed``."""
ADAPTOR_FILES = ("test_adaptor_bootstrap.py", "test_adaptor_training.py")
"""Files about provider ``megatron_adaptor``."""
EXPERT_FILES = ("test_cookbook_ascend.py", "test_mtp.py", "test_npu_acceptance.py")
"""Files whose models have experts."""
collect_ignore = [*(MINDSPEED_FILES if ON_ADAPTOR else ADAPTOR_FILES), *(EXPERT_FILES if WITHOUT_EXPERTS else ())]


# For child processes, too: a type that torch_npu does not list for a 910B is an error. Megatron-Core 0.19 sorts booleans to
# permute tokens, which the list lacks; whether Ascend's packages for it replace that is unknown, since they could not be had.
os.environ[STRICT_VARIABLE] = "0" if ON_ADAPTOR else "1"
RACES_ARE_ERRORS = "error:race:RuntimeWarning"


def pytest_configure(config: pytest.Config) -> None:
    """Let a race between streams fail its test, also in forked ranks."""
    config.addinivalue_line("filterwarnings", RACES_ARE_ERRORS)


def npu_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a process on the simulated device, with Ascend's packages on its path."""
    path = [*package_folders(), *(entry for entry in sys.path if entry and "simnpu" not in entry)]
    # Without variables that the bootstrap of this process has set: a fresh process must decide anew.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HCCL_") and name != "PYTEST_CURRENT_TEST"
    }
    base = inherited | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": f"ignore,{RACES_ARE_ERRORS}",
    }
    return simnpu.environment(base) | changes


@pytest.fixture(scope="session")
def run_python() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Return ``run_python(code, *arguments, check=True, **environment)``, which runs code on the simulated device.

    Each program runs in a fork of a process that has imported torch, but not Megatron or MindSpeed; with ``huggingface=True``
    also transformers and peft, whose lazy modules MindSpeed's import scans.
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
        completed = servers[huggingface].run(code, arguments, npu_environment(**environment), timeout_s=timeout)
        assert not check or completed.returncode == 0, completed.stderr[-4000:]
        return completed

    yield run
    for server in servers.values():
        server.close()


@pytest.fixture(scope="session")
def npu() -> Runtime:
    """Bootstrap this process for the platform ``npu`` and import everything that ranks need."""
    simnpu.activate()
    sys.path[:0] = [folder for folder in package_folders() if folder not in sys.path]
    runtime = bootstrap("npu", engine="megatron")
    runtime.load_megatron()
    if ON_ADAPTOR:
        # References inherit the path, and their peft would import the engine's stand-in, which needs the simulated device.
        sys.path.remove(package_folders()[0])
    for module in ("megascend.backend", "megascend.engines.megatron.engine", "megascend.engines.step.step"):
        import_module(module)
    from megascend.testing.self_checks import warm_tiny_models

    warm_tiny_models()
    return runtime
