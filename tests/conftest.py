"""Fixtures that several test modules share."""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megascend.runtime.bootstrap.runtime import Runtime, bootstrap
from megascend.runtime.platforms.cpu_products import avoid_broken_amx

ASCEND = ["npu", "simnpu"]
REAL_VLLM = ["real_vllm"]
ACROSS_STACKS = ["training/checkpoint/test_across_stacks.py"]
collect_ignore = (
    ([] if os.environ.get("SIMNPU") else ASCEND)
    + ([] if os.environ.get("MEGASCEND_VLLM_PYTHON") else REAL_VLLM)
    + ([] if os.environ.get("MEGASCEND_OTHER_STACK_PYTHON") else ACROSS_STACKS)
)


# Verdicts of the self-check, for every process that a test starts and for the next session: their key holds all that matters.
os.environ.setdefault("MEGASCEND_CACHE", str(Path(tempfile.gettempdir()) / f"megascend-test-cache-{os.getuid()}"))

# torch's stores ask the name server for the name of every address; one that does not answer costs 5 s each time otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Tests give the processes that they start this process's search path, by the variable or from sys.path.
QUICK_START = str(Path(__file__).with_name("quick_start"))
if QUICK_START not in sys.path:
    sys.path.insert(0, QUICK_START)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [QUICK_START, os.environ.get("PYTHONPATH")]))
runpy.run_path(str(Path(QUICK_START) / "sitecustomize.py"))

sys.path.append(str(Path(__file__).with_name("weightwire")))  # members of groups, for tests in other folders too
sys.path += [str(Path(__file__).parents[1] / "scripts" / folder) for folder in ("", "npu")]  # bench; npu_acceptance


# Hypothesis times every example, and how fast it draws them; another process may need the processor meanwhile.
with contextlib.suppress(ModuleNotFoundError):  # in an environment of tests/integrations
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


# Before any product of bf16 matrices in this process, or in those that it starts; not all of them call the bootstrap.
AMX = avoid_broken_amx(os.environ)


def pytest_report_header() -> list[str]:
    """Say what is left out, and how to run it."""
    notes = list(AMX)
    if "real_vllm" in collect_ignore:
        notes += ["tests/real_vllm: not collected; they need an environment with vLLM (bash scripts/test_vllm.sh)"]
    if ACROSS_STACKS[0] in collect_ignore:
        notes += [f"tests/{ACROSS_STACKS[0]}: not collected; it needs MEGASCEND_OTHER_STACK_PYTHON"]
    if "npu" in collect_ignore:
        return [
            *notes,
            "tests/npu, tests/simnpu: not collected; they need a process on the simulated device "
            "(bash scripts/test.sh STACK npu)",
        ]
    packages = ["stand-ins in tests/doubles", *filter(None, [os.environ.get("MEGASCEND_MINDSPEED")])]
    return [*notes, f"on the simulated Ascend device, with Ascend's packages from {', '.join(packages)}"]


@pytest.fixture(autouse=True)
def own_messages_as_before() -> Iterator[None]:
    """Restore megascend's log handlers: a command run in this process would enable its messages for later tests."""
    logger = logging.getLogger("megascend")
    handlers, propagate = list(logger.handlers), logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    """Bootstrap this process for Megatron on the CPU and import megatron.core, which forked ranks inherit.

    A process can be bootstrapped only once, so a test of the bootstrap itself needs a new process.
    """
    runtime = bootstrap("cpu", engine="megatron")
    from megatron.core import parallel_state  # noqa: F401

    return runtime


@pytest.fixture(scope="session")
def parity_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of tiny checkpoints and Hugging Face references, shared by all workers of the session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "parity"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def megatron_imported() -> Runtime:
    """Import Megatron once, in this process; ranks are forked from it."""
    loaded = bootstrap("cpu", engine="megatron")
    loaded.load_megatron()
    for module in ("megascend.backend", "megascend.engines.megatron.engine", "megascend.engines.step.step"):
        import_module(module)
    from megascend.testing.self_checks import warm_tiny_models

    warm_tiny_models()
    return loaded


SPREAD = (
    "tests/runtime/bootstrap/test_import_order.py",
    "tests/runtime/bootstrap/test_runtime.py",
    "tests/training/checkpoint/test_save_and_load.py",
    "tests/training/lora/test_parity_with_peft.py",
    "tests/npu/test_parity.py",
    "tests/parity/test_matrix.py",
    "tests/test_cookbook.py",
    "tests/test_upstream_faults.py",
)
"""Files whose tests share only files on disk: each test goes to any idle worker."""


FIRST = (
    "tests/test_cookbook.py",
    "tests/reliability/test_hang_and_death.py",
    "tests/engines/fsdp/test_fsdp.py",
    "tests/reliability/test_resume.py",
    "tests/engines/fsdp/test_single.py",
    "tests/engines/megatron/test_export.py",
    "tests/training/checkpoint/test_resharding.py",
    "tests/models/selfcheck/test_findings.py",
    "tests/apps/cli/test_cli_resume.py",
    "tests/test_bad_input.py",
    "tests/npu/test_cookbook_ascend.py",
)
"""Files that take longest; started first, so that no worker starts one when the others are idle."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--concerned",
        default="",
        metavar="PATHS",
        help="run only the tests of these folders and files, and those marked core (scripts/changed_rooms.py prints the paths)",
    )


def concerned_paths(config: pytest.Config) -> tuple[str, ...]:
    """Return how the paths of concerned tests begin, relative to the root; none if every test is concerned."""
    return tuple(path if path.endswith(".py") else f"{path}/" for path in config.getoption("concerned").split())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of tests that a change does not concern: all of them take ten seconds in each worker."""
    concerned = concerned_paths(config)
    if not concerned or collection_path.suffix != ".py":
        return None
    if f"{collection_path.relative_to(config.rootpath)}".startswith(concerned):
        return None
    return True if "pytest.mark.core" not in collection_path.read_text(encoding="utf-8") else None


def mark_cases(items: list[pytest.Item], whole_files: bool) -> None:
    """Give the cases that ``nightly_cases``, ``difference_cases`` and ``core_cases`` name the marker without ``_cases``.

    Args:
        whole_files: no single test was selected, so that a name without a case is an error.
    """
    names: dict[tuple[str, str], bool] = {}
    for item in items:
        for marker in [mark for mark in item.iter_markers() if mark.name.endswith("_cases")]:
            for pattern in marker.args:
                matches = fnmatchcase(item.callspec.id, pattern)  # type: ignore[attr-defined]
                test = item.nodeid.partition("[")[0]
                names[test, pattern] = names.get((test, pattern), False) or matches
                if matches:
                    item.add_marker(marker.name.removesuffix("_cases"))
    dead = [f"{test}: {pattern}" for (test, pattern), matched in names.items() if not matched]
    if whole_files and dead:
        raise pytest.UsageError(f"cases named by a marker do not exist: {', '.join(dead)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases and select what a change concerns. Put :data:`FIRST` first, and :data:`SPREAD` last: its tests fill the gaps."""
    whole_files = not config.getoption("lf", False) and not any("::" in argument for argument in config.args)
    mark_cases(items, whole_files)
    if concerned := concerned_paths(config):
        left_out = {
            item for item in items if not (item.nodeid.startswith(concerned) or item.get_closest_marker("core"))
        }
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]

    position = {file: number for number, file in enumerate(FIRST)}
    last = dict.fromkeys(SPREAD, len(position) + 1)

    def order(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        return position.get(file, last.get(file, len(position)))

    items.sort(key=order)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests on one worker, which sets up shared fixtures once, except for :data:`SPREAD`.

    Of pytest-xdist's built-in schedulers, ``loadfile`` spreads no file, and ``loadgroup`` finds no group with pytest 9.2, where
    it can no longer change the names of tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # else files with most tests come first

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file in SPREAD else file

    return ByFile(config, log)
