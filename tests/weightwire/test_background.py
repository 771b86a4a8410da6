"""Threads that never end silently: how they start, and what becomes of their exceptions."""

from __future__ import annotations

import ast
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from weightwire.background import BackgroundThread, Guard
from weightwire.engine_calls import LoopThread

SOURCE = Path(__file__).resolve().parents[2] / "src"
POOLS = {
    "megascend/apps/serve/service.py",
    "megascend/training/batch/images.py",
    "megascend/apps/cli/checks.py",
    "megascend/apps/cli/launch.py",
    "megascend/models/checkpoint_files/safetensors_writer.py",
    "megascend/integrations/verl_checkpoint_engine.py",
    "megascend/training/kernels/compile_ahead.py",
}
"""Files with executors; each takes the result of every future."""


def called(kinds: set[str]) -> set[str]:
    """Return the files of src that call or subclass a name of ``kinds``."""
    files = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
            names = {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in parts}
            if names & kinds:
                files.add(str(path.relative_to(SOURCE)))
    return files


def test_every_thread_reports_its_exception() -> None:
    assert called({"Thread", "Timer", "start_new_thread"}) == {"weightwire/background.py"}
    assert called({"ThreadPoolExecutor", "ProcessPoolExecutor"}) == POOLS


@pytest.mark.parametrize("error", [TypeError("x"), SystemExit(3), KeyboardInterrupt()])
def test_exception_of_a_thread_is_logged_or_passed_on(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        raise error

    received: list[BaseException] = []
    for on_error in (None, received.append, lambda _: 1 / 0):
        thread = BackgroundThread(work, name="watcher", on_error=on_error)
        thread.start()
        thread.join()
    assert received == [error]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert all("thread watcher has ended" in record.message for record in caplog.records)


def test_guarded_round_is_logged_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    guard, rounds = Guard("the watch", passes=LookupError), 0
    for _ in range(3):
        with guard:
            rounds += 1
            raise TypeError("no line")
    with pytest.raises(KeyError), guard:
        raise KeyError
    assert rounds == 3
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_event_loop_outlives_a_coroutine_that_exits() -> None:
    async def exits() -> None:
        raise SystemExit(1)

    async def answers() -> str:
        return threading.current_thread().name

    with LoopThread("loop") as thread:
        with pytest.raises(SystemExit):
            thread.run(exits())
        assert thread.run(answers()) == "loop"


def interpreter(version: str) -> str | None:
    """Return an interpreter of a version that starts: a name on PATH may be a shim of pyenv's that does not."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    starts = (
        path for path in candidates if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode
    )
    return sys.executable if sys.version.startswith(f"{version}.") else next(starts, None)


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12"])
def test_line_of_a_thread_at_a_backward_jump(version: str) -> None:
    """Read the line of a thread in a loop many times: before Python 3.12 a frame has none at the jump to the head of the loop."""

    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on PATH or among pyenv's versions")
    program = (
        "import threading\nfrom megascend.runtime.diagnostics.watchdog import PhaseStack\n"
        "stack, done, lines = PhaseStack(threading.get_ident()), [], []\n"
        "def watch():\n    while len(lines) < 300: lines.append(stack.line())\n    done.append(1)\n"
        "thread = threading.Thread(target=watch)\nwords = [str(i) for i in range(2000)]\n"
        "def count():\n    total = 0\n    for word in words:\n        if word:\n            total += 1\n"
        "thread.start()\nwhile thread.is_alive(): count()\nassert done and ':None)' not in str(lines), lines[:3]\n"
    )
    subprocess.run([python, "-c", program], env={"PYTHONPATH": str(SOURCE)}, timeout=120, check=True)
