#!/usr/bin/env python
"""Write the screenshots of a terminal (dry-run.svg, rl.svg) and the plots (rl.png, quickstart.png) of docs/assets.

    bash scripts/quickstart.sh                                 # its plot, and the model that the dry run reads
    .venv-quickstart/bin/python scripts/screenshots.py         # all of them
    .venv-quickstart/bin/python scripts/screenshots.py rl      # one command's

The commands run in the checkout, for about five minutes on two cores. serve.png is a browser's screenshot of the page of
`megascend serve --demo` after its client program, 1000 pixels wide.
"""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
WIDTH = 118
"""Columns of the terminal: wider text would be too small to read on a page."""


@dataclass(frozen=True)
class Screenshot:
    """Commands whose output is shown in a terminal.

    Attributes:
        commands: shell commands, in order.
        colours: give the commands a terminal. Without one, a run prints its progress as lines instead of a bar that is redrawn.
        plots: plots of the run to copy into docs/assets, by their name there.
    """

    commands: tuple[str, ...]
    colours: bool
    plots: Mapping[str, str] = field(default_factory=dict)


SCREENSHOTS = {
    "dry-run": Screenshot(
        ("megascend train examples/quickstart/quickstart.yaml --nproc 2 --overwrite --dry-run",),
        colours=True,
        plots={"quickstart.png": "runs/quickstart/run/metrics.png"},
    ),
    "rl": Screenshot(
        (
            "megascend new-model runs/rl/model --layers 3",
            "megascend rl examples/rl/sort_digits.yaml --overwrite --set steps=120",
        ),
        colours=False,
        plots={"rl.png": "runs/rl/run/metrics.png"},
    ),
}


def terminal_output(command: str, *, colours: bool) -> str:
    """Run a command, in a pseudo-terminal of :data:`WIDTH` columns or a pipe, and return what it printed, escapes included.

    Raises:
        SystemExit: the command failed; its output is shown.
    """
    reader, writer = pty.openpty() if colours else os.pipe()
    environment = {**os.environ, "COLUMNS": str(WIDTH), "LINES": "60", "TERM": "xterm-256color"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    # No terminal for the input: a command that asks a question must fail instead of waiting.
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer
    )
    os.close(writer)
    chunks: list[bytes] = []
    while True:
        try:
            chunk = os.read(reader, 65536)
        except OSError:  # Linux reports a closed terminal as EIO
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(reader)
    text = b"".join(chunks).decode("utf-8", "replace")
    if process.wait() != 0:
        raise SystemExit(f"{command} failed with exit code {process.returncode}:\n{text}")
    return text


def write_screenshot(name: str, screenshot: Screenshot) -> None:
    """Run the commands, write ``docs/assets/NAME.svg`` and copy the plots."""
    assets = ROOT / "docs" / "assets"
    # As quickstart.sh does with its own: new-model replaces nothing.
    shutil.rmtree(ROOT / "runs" / "rl" / "model", ignore_errors=True)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        for command in screenshot.commands:
            console.print(Text(f"$ {command}", style="bold"))
            output = terminal_output(command, colours=screenshot.colours)
            # Paths of this machine say nothing to a reader.
            console.print(Text.from_ansi(output.replace("\r\n", "\n").replace(f"{ROOT}/", "").rstrip()))
        # A fixed id: rich's own depends on the content, so every line of the file would change with it.
        console.save_svg(str(assets / f"{name}.svg"), title="", unique_id=f"terminal-{name}")
    for plot, path in screenshot.plots.items():
        shutil.copyfile(ROOT / path, assets / plot)


def main(names: list[str]) -> None:
    """Write the named screenshots; by default all."""
    for name in names or list(SCREENSHOTS):
        write_screenshot(name, SCREENSHOTS[name])


if __name__ == "__main__":
    main(sys.argv[1:])
