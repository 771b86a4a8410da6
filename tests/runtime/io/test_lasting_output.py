"""Streams with a closed reader, a full disk or a closed descriptor: no exception, and the correct exit code."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from megascend.runtime.io.lasting_output import LastingOutput

PROGRAM = """
import contextlib, json, os, sys, warnings
from megascend.runtime.io.lasting_output import LastingOutput
output = LastingOutput()
output.install()
with open(sys.argv[1], "w") as report:
    taken = report.fileno()
    for stream in (sys.stdout, sys.stderr):
        for line in range(3):
            print("x" * 100_000, file=stream)
            stream.flush()
    print("left in the buffer")
    sys.stdout.write("\\u4f60\\ud800")
    warnings.warn("a warning")
    with contextlib.suppress(OSError):
        os.write(1, b"from a library")
    losses = [*output.losses(), *output.losses()]
    json.dump([taken, losses], report)
    LastingOutput().install()
sys.exit(75)
"""
BROKEN_PIPE, FULL, CLOSED = "Broken pipe", "No space left on device", "it was closed before the start"


def run(tmp_path: Path, shell: str, **options: object) -> tuple[int, int, list[list[str]]]:
    """Return the program's exit code, the descriptor of the first file that it opened, and the lost streams."""
    (tmp_path / "program.py").write_text(PROGRAM)
    program = f"{sys.executable} {tmp_path}/program.py {tmp_path}/report"
    completed = subprocess.run(["bash", "-c", shell.replace("PROGRAM", program)], timeout=60, check=False, **options)  # type: ignore[call-overload]
    number, losses = json.loads((tmp_path / "report").read_text())
    return completed.returncode, number, losses


@pytest.mark.parametrize(
    ("shell", "stdout", "stderr"),
    [
        ("PROGRAM > /dev/null 2>&1", None, None),
        ("PROGRAM > /dev/full", FULL, None),
        ("PROGRAM > /dev/full 2>&1", FULL, FULL),
        ("PROGRAM 2> /dev/full", None, FULL),
        ("set -o pipefail; PROGRAM 2>/dev/null | true", BROKEN_PIPE, None),
        ("set -o pipefail; PROGRAM 2>&1 | true", BROKEN_PIPE, BROKEN_PIPE),
        ("PROGRAM >&- 2>&-", CLOSED, CLOSED),
        ("PROGRAM <&- >&- 2>&-", CLOSED, CLOSED),
        ("PROGRAM >&-", CLOSED, None),
        ("PYTHONUNBUFFERED=1 PROGRAM > /dev/full 2>&1", FULL, FULL),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PROGRAM > /dev/null", None, None),
        ("PYTHONIOENCODING=latin-1 PROGRAM > /dev/null", None, None),
    ],
)
def test_lost_output_does_not_change_the_exit_code(
    tmp_path: Path, shell: str, stdout: str | None, stderr: str | None
) -> None:
    code, number, losses = run(tmp_path, shell, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert code == 75
    assert number > 2  # so output of libraries goes to no file of the run
    assert losses == [[name, reason] for name, reason in (("stdout", stdout), ("stderr", stderr)) if reason is not None]


def test_closed_terminal(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    os.close(controller)
    code, _, losses = run(tmp_path, "PROGRAM", stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    assert code == 75
    assert losses == [["stdout", "Input/output error"], ["stderr", "Input/output error"]]


def test_writable_output_keeps_its_order(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom megascend.runtime.io.lasting_output import LastingOutput\nprint('one')\n"
        "output = LastingOutput()\noutput.install()\nprint('two')\nLastingOutput().install()\nprint('three', flush=True)\n"
        "os.set_blocking(1, False)\nprint('x' * 300_000)\noutput.restore()\nprint('four')\n"
    )
    reading = "import sys, time\ntime.sleep(0.5)\nprint(sys.stdin.read().replace('x' * 300_000, 'many'))"
    completed = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" | "$0" -c "$2"', sys.executable, program, reading],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert completed.stdout.split() == ["one", "two", "three", "many", "four"]
    assert completed.stderr == ""


def test_streams_without_descriptor_are_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    output = LastingOutput()
    output.install()
    assert (sys.stdout, sys.stderr) == before
    assert list(output.losses()) == []
    output.restore()
