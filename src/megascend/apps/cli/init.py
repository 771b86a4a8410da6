"""``megascend init``: a commented run file for a task and a model, to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from megascend.apps.cli import options


def init_command(
    task: Annotated[str, typer.Argument(help="sft, dpo, reward, classification, pretrain or rl.")],
    model: Annotated[Path, options.ModelOrConfig],
    out: Annotated[Path, typer.Argument(help="Run file to write.")] = Path("run.yaml"),
    data: Annotated[
        Path | None,
        typer.Option(help="Training data, or prompts of rl; default: examples, written beside the run file."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Run directory; default: runs/TASK.")] = None,
    cards: Annotated[
        int | None, typer.Option(min=1, help="Plan the layout for this many devices, as `megascend plan`.")
    ] = None,
    device: Annotated[str, typer.Option(help="Kind of device, as of `megascend plan`.")] = "h100",
    length: Annotated[
        int | None, typer.Option(min=1, help="Longest sample in tokens; default: 4096, or the model's context.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=2, help="Samples of a step; default: 8, with --cards at least two for each.")
    ] = None,
    lora: options.LoraRank = None,
    overrides: options.Overrides = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Also write a JSON Schema, which the run file names for editors.")
    ] = False,
) -> None:
    """Write a commented run file that trains as it stands; without --data also a few lines of example data.

    Nothing is overwritten.
    """
    import json

    from megascend.apps.plan.hardware import load
    from megascend.apps.train.run_template import TASKS, RunFileRequest, run_files
    from megascend.config.commented import json_schema
    from megascend.config.run_file import check_file_name
    from megascend.errors import ConfigError
    from megascend.runtime.io.paths import make_directory

    check_file_name(out)
    hardware = None if cards is None else load(device)
    request = RunFileRequest(model, data, output, length, batch, lora, overrides or (), cards or 0, hardware)
    files = run_files(task, request, out)
    command = TASKS[task].command
    if schema:
        # In the run file's directory: editors resolve the path relative to it.
        name = f"{command}.schema.json"
        content = json_schema(TASKS[task].kind, f"Settings of megascend {command}")
        files[out] = f"# yaml-language-server: $schema={name}\n{files[out]}"
        files[out.parent / name] = json.dumps(content, indent=1) + "\n"
    if existing := [str(path) for path in files if path.exists()]:
        remedy = "name another OUT" if existing == [str(out)] else "name another OUT, or data with --data"
        raise ConfigError(f"{', '.join(existing)}: would be overwritten; {remedy}")
    for path, text in files.items():
        make_directory(path.parent)
        path.write_text(text, encoding="utf-8")
    if data is not None and not data.exists():
        typer.echo(f"{data}: no data is there yet", err=True)
    companions = ", ".join(str(path) for path in files if path != out)
    typer.echo(f"{out}: {TASKS[task].title}{f'; beside it {companions}' if companions else ''}")
    typer.echo(f"next: megascend {command} {shlex.quote(str(out))} --dry-run")
