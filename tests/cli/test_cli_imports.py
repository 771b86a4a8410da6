"""``import megascend`` and ``megascend --help`` are quick, because neither imports torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

HEAVY = ("torch", "megatron", "mcore_bridge", "transformers", "peft", "numpy", "datasets")


AT_EXIT = f"""
import atexit, json, sys, time
def tell():
    print(json.dumps([time.process_time(), [name for name in {HEAVY} if name in sys.modules]]))
atexit.register(tell)
"""


def run(code: str) -> tuple[str, float, list[str]]:
    """What a fresh interpreter prints, the seconds of a processor that it takes, and which heavy packages it imports."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT + code], capture_output=True, text=True, env=environment, check=True
    )
    text, _, last = done.stdout.rstrip("\n").rpartition("\n")
    return text, *json.loads(last)


def least_seconds(*codes: str) -> list[float]:
    """Of each program, its least of five, by turns: other processes share the machine."""
    return [min(seconds) for seconds in zip(*([run(code)[1] for code in codes] for _ in range(5)), strict=True)]


def test_importing_megascend_is_quick_and_imports_nothing_heavy() -> None:
    assert run("import megascend")[2] == []
    ours, dataclasses = least_seconds("import megascend", "import dataclasses, typing, importlib.metadata")
    assert ours < 2 * dataclasses


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    arguments = "sys.argv = ['program', '--help']\n"
    ours = arguments + "from megascend.cli.main import main; main()"
    smallest = arguments + "import typer; app = typer.Typer(); app.command()(lambda: None); app()"
    text, _, heavy = run(ours)
    for command in ("train", "doctor", "show-config", "new-model", "export"):
        assert command in text
    assert heavy == []
    seconds, of_the_smallest = least_seconds(ours, smallest)
    assert seconds < 2 * of_the_smallest


def test_reading_a_config_needs_no_torch() -> None:
    code = "from megascend.config import load_config; import megascend.app.loop, megascend.data.check"
    assert run(code)[2] == []


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "megascend", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("megascend ")
