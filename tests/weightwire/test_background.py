"""Threads that never end silently: how they start, and what becomes of their exceptions."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

from weightwire.background import BackgroundThread, Guard

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
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if any(kind in text for kind in kinds) else ():
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
