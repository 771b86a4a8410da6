"""A plugin for pytest that lets Megatron-Core's own unit tests start without a GPU, and writes down how each one ended.

Their set-up takes the rank modulo the number of GPUs. On the CPU platform the number is 0, which is the truth; here, and only
here, it is the number of processes. A collective that a rank has left alone ends after a minute instead of half an hour.

``destroy_model_parallel`` forgets its groups without destroying them, and a group of Gloo has threads of its own: they are
destroyed here. A process that nevertheless has ``MAX_THREADS`` ends its run of the file.
"""

from __future__ import annotations

import datetime
import functools
import gc
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from packaging.version import Version

import megascend

MAX_THREADS = 300
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)
SKIPPED_FOR = "Skipped: "

if os.environ["MEGASCEND_RUN_PLATFORM"] == "cpu":
    megascend.bootstrap("cpu", engine="megatron-core")  # before the wrapping below
    torch.cuda.device_count = lambda: int(os.environ.get("WORLD_SIZE", "1"))


def _with_timeout(original: Any) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        kwargs["timeout"] = COLLECTIVE_TIMEOUT
        return original(*args, **kwargs)

    return function


torch.distributed.init_process_group = _with_timeout(torch.distributed.init_process_group)
torch.distributed.new_group = _with_timeout(torch.distributed.new_group)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Patch Megatron-Core for this machine."""
    # Not at the top: the tests' own conftest must be the first to import Megatron-Core.
    import megatron.core.utils
    from megatron.core import parallel_state

    if importlib.util.find_spec("flash_attn") is None:
        # Modules that read the version at import fail without one.
        megatron.core.utils._fa_version = Version("0")

    original = parallel_state.destroy_model_parallel

    @functools.wraps(original)
    def destroy_model_parallel() -> None:
        groups = [group for group in parallel_state._global_process_group_list or [] if group is not None]
        original()
        registered = torch.distributed.distributed_c10d._world.pg_map
        for group in groups:
            if group in registered:
                torch.distributed.destroy_process_group(group)
        del groups, registered
        gc.collect()

    parallel_state.destroy_model_parallel = destroy_model_parallel


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Free the test's models, which hold groups; end before the machine is drowned in threads."""
    instance = getattr(item, "instance", None)
    if instance is not None and not isinstance(instance, type):
        vars(instance).clear()
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    if threads > MAX_THREADS:
        _note(test=item.nodeid, when="teardown", outcome="failed", reason=f"{threads} threads")
        os._exit(3)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record all collected tests, so that those a process did not reach are counted."""
    for item in session.items:
        _note(test=item.nodeid, when="collect", outcome="not run", reason="the process ended before")


def _note(**line: object) -> None:
    folder = os.environ.get("MEGASCEND_UNIT_RESULTS")
    if folder:
        with (Path(folder) / f"rank{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _reason(report: Any) -> str:
    if isinstance(report.longrepr, tuple):  # of a test that was skipped: file, line, reason
        return str(report.longrepr[2]).removeprefix(SKIPPED_FOR)
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print one line for a test's call, and for a set-up or teardown that did not pass."""
    if report.when == "call" or not report.passed:
        reason = "" if report.passed else _reason(report)
        _note(test=report.nodeid, when=report.when, outcome=report.outcome, reason=reason)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Print one line for a file that could not be imported."""
    if report.failed:
        _note(test=report.nodeid, when="collect", outcome="failed", reason=_reason(report))
