"""megascend's log messages: one handler, a rank prefix, and no setup at import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megascend.apps.cli.messages import close_stdin

PROGRAM = """
import logging, os, sys
import megascend, megascend.config
assert logging.getLogger("megascend").handlers == [] and logging.getLogger().handlers == []
from megascend.apps.cli.messages import show_messages
show_messages()
show_messages()
logger = logging.getLogger("megascend.training.checkpoint.saver")
logger.info("not shown")
logger.warning("the disk is full")
logger.warning("rank 2: forward has taken 9 s")
assert logging.getLogger().handlers == []
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "the disk is full\n"),
        ({"WORLD_SIZE": "1", "RANK": "0"}, "the disk is full\n"),
        ({"WORLD_SIZE": "4", "RANK": "2"}, "[rank 2] the disk is full\n"),
    ],
)
def test_message_is_shown_once_with_its_rank(environment: dict[str, str], expected: str) -> None:
    path = {"PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, env=path | environment, check=False
    )
    named_already = "rank 2: forward has taken 9 s\n"
    assert (completed.returncode, completed.stderr) == (0, expected + named_already)


def test_prompts_of_packages_get_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", sys.stdin)  # restored afterwards
    close_stdin()
    assert not sys.stdin.isatty()
    with sys.stdin, pytest.raises(EOFError):
        input("Enter your choice: ")
