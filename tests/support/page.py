"""Pages of the documentation whose files and commands a reader follows in order."""

from __future__ import annotations

import re
from pathlib import Path

from support.forked_programs import run_command, run_forked

DOCS = Path(__file__).parents[2] / "docs"


def page_files(name: str) -> dict[str, str]:
    """Return the files of a page by the names in their first lines."""
    text = (DOCS / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:python|yaml)\n(# (\S+)\n.*?)^```", text, re.DOTALL | re.MULTILINE)
    return {name: text for text, name in blocks}


def page_commands(name: str) -> list[str]:
    """Return the commands of a page, in order."""
    text = re.sub(r"^```.*?^```", "", (DOCS / name).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def run_page_command(command: str, folder: Path, timeout_s: float) -> str:
    """Run a command of a page in ``folder`` and return its standard output."""
    program, *arguments = command.split()
    if program == "python":
        completed = run_forked(folder / arguments[0], *arguments[1:], directory=folder, timeout_s=timeout_s)
    else:
        completed = run_command(*arguments, directory=folder, timeout_s=timeout_s)
    assert completed.returncode == 0, f"{command}\n{completed.stdout}{completed.stderr}"
    return completed.stdout
