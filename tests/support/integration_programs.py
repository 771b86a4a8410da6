"""Programs of third-party frameworks, which tests of integrations run with this interpreter, and commands of pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "integrations"
DEADLINE_S = 900


def environment(**more: str) -> dict[str, str]:
    """Return a program's environment: our source, and this interpreter's scripts first in PATH."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PYTHONPATH": path, "PATH": programs, "OMP_NUM_THREADS": "1", **more}


def run(command: list[str], folder: Path, errors: bool = False, **more: str) -> str:
    """Run a program that must succeed, with more variables; return its output, with ``errors`` what it logged too."""
    completed = subprocess.run(
        command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]
    return completed.stdout + (completed.stderr if errors else "")


def page_blocks(page: str, start: str, end: str) -> list[str]:
    """Return the shell blocks of a page of docs/integrations from one text to another."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    text = text[text.index(start) :]
    return re.findall(r"^```bash\n(.*?)^```", text[: text.index(end)], re.DOTALL | re.MULTILINE)
