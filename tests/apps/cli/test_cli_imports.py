"""``import megascend`` and ``megascend --help`` import nothing that takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "megatron", "mcore_bridge", "transformers", "peft", "numpy", "datasets")


AT_EXIT = f"""
import atexit, json, sys
def print_heavy():
    print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
atexit.register(print_heavy)
"""


def run(code: str, check: bool = True) -> tuple[str, list[str]]:
    """Return what a fresh interpreter prints, and which heavy packages it imports."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "NO_COLOR": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", AT_EXIT + code], capture_output=True, text=True, env=environment, check=check
    )
    text, _, last = completed.stdout.rstrip("\n").rpartition("\n")
    return text, json.loads(last)


def test_importing_megascend_imports_nothing_heavy() -> None:
    assert run("import megascend")[1] == []


def test_help_imports_nothing_heavy() -> None:
    arguments = "sys.argv = ['program', '--help']\n"
    text, heavy = run(arguments + "from megascend.apps.cli.main import main; main()")
    for command in ("train", "doctor", "show-config", "new-model", "export"):
        assert command in text
    assert heavy == []


def test_reading_a_config_needs_no_torch() -> None:
    code = "from megascend.config import load_config; import megascend.apps.train.train, megascend.apps.data.files"
    assert run(code)[1] == []


def test_report_of_a_run_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "start", "time": 100, "world_size": 1}) + "\n")
    arguments = f"sys.argv = ['megascend', 'doctor', '--run', {str(tmp_path)!r}, '--json']\n"
    text, heavy = run(arguments + "from megascend.apps.cli.main import main; main()", check=False)
    assert json.loads(text)["ok"] is False
    assert heavy == []
