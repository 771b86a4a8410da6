"""Names of commands, arguments and options, with their defaults, which users' scripts rely on."""

from __future__ import annotations

from pathlib import Path

import typer

from megascend.apps.cli.main import app

GOLDEN = Path(__file__).with_name("commands.txt")


def declared() -> str:
    """Return a line for each command and each of its parameters."""
    lines = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        lines.append(f"megascend {name}")
        for parameter in command.params:
            names = "/".join([*parameter.opts, *parameter.secondary_opts])
            repeated = "..." if parameter.multiple or parameter.nargs == -1 else ""
            lines.append(f"    {names}{repeated} {'required' if parameter.required else parameter.default}")
    return "\n".join(lines) + "\n"


def test_commands_and_options_are_those_of_the_list() -> None:
    assert declared() == GOLDEN.read_text(encoding="utf-8")
