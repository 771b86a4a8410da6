"""Pages that a reader follows from top to bottom: their files and commands work in order, and answer as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.page import DOCS, page_commands

ANSWERS = {
    "environments.md": ["reward 1.2 (right 1, called 1)"],
    "images.md": ["A green disc on the right."],
    "own-data.md": ["On Friday we open at 10:30.\n", "On Friday we open at 10:30. Keep warm!\n"],
    "sessions.md": ['"response": "7."', '"response": "6."', " 5 apples."],
}


@pytest.mark.nightly  # covered: test_snippets.py validates run files and commands
@pytest.mark.parametrize("page", ANSWERS)
def test_page_can_be_followed(page: str, tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```\w+\n((?:#|\{#-) (\S+).*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    files = {name: text for text, name in blocks}
    python_path = os.pathsep.join(entry for entry in sys.path if entry)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = ""
    for command in page_commands(page):
        for name in [name for name in files if (tmp_path / name).parent.is_dir()]:  # a command may make the folder
            (tmp_path / name).write_text(files.pop(name), encoding="utf-8")
        completed = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=os.environ | {"PATH": path, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert completed.returncode == 0, f"{command}\n{completed.stdout}{completed.stderr}"
        printed += completed.stdout
    assert files == {}
    assert [answer for answer in ANSWERS[page] if answer not in printed] == []
