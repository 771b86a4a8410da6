"""``megascend plan``: layouts of a run on a cluster, their time and memory, before anybody rents it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megascend.apps.cli import options
from megascend.errors import ConfigError


def plan_command(
    model: Annotated[Path | None, options.ModelOrConfig] = None,
    cards: Annotated[int, typer.Option(min=1, help="Number of devices.")] = 8,
    device: Annotated[str, typer.Option(help="Kind of device: h100, h200, b200, gb200, gb300, ascend-910b.")] = "h100",
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sample; default: 4096, or the model's context.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step, over all devices.")] = 256,
    lora: options.LoraRank = None,
    overrides: options.Overrides = None,
    rl: Annotated[
        bool, typer.Option("--rl", help="Divide the devices between inference engines and the trainer.")
    ] = False,
    best: Annotated[int, typer.Option(min=1, max=50, help="Layouts to show.")] = 5,
    explain: Annotated[bool, typer.Option("--explain", help="Draw the pipeline of one step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    data: Annotated[Path | None, typer.Option(help="Training data, for the run file.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the run file of the best layout here.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Measurements of --calibrate, in place of those that come with megascend.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure this machine's device for a minute, and write FILE.")
    ] = None,
) -> None:
    """Rank all legal layouts of a run by predicted time, with memory and time by part, and print the run file of the best one.

    Nothing is built or trained: predictions are by formula (docs/planning.md has their errors).
    """
    if calibrate is not None:
        measure_device(calibrate)
        return
    if model is None:
        raise ConfigError("plan needs MODEL, a checkpoint directory or a config.json (or --calibrate FILE)")
    options.require_no_file("--write", write)
    if rl and (as_json or explain or write):
        raise ConfigError("--rl prints a table: it cannot be combined with --json, --explain or --write")
    import json

    from megascend.apps.cli import plan_text
    from megascend.apps.plan.hardware import load
    from megascend.apps.train import layout_plan

    hardware = load(device, calibration)
    chosen = [*(overrides or []), *([] if lora is None else [f"lora.rank={lora}"])]
    # A run file names a directory: that of a config.json.
    directory = model.parent if model.name == "config.json" else model
    with layout_plan.model_checkpoint(model) as checkpoint:
        length = length or layout_plan.default_length(checkpoint)
        config = layout_plan.settings(directory, length, batch, data, chosen)
        if rl:
            splits = layout_plan.plan_split(checkpoint, config, cards, length, hardware)
            for line in plan_text.report_split(splits, config, hardware, length):
                typer.echo(line)
            return
        plan = layout_plan.plan_layouts(checkpoint, config, cards, length, hardware, best)
    if as_json:
        typer.echo(json.dumps(plan_text.as_json(plan), indent=1))
    else:
        for line in plan_text.report(plan, explain=explain):
            typer.echo(line)
    if not plan.layouts:
        raise typer.Exit(1)
    if write is not None:
        write.write_text(layout_plan.run_file(plan.layouts[0]), encoding="utf-8")
        typer.echo(f"{write}: the run file of layout 1", err=as_json)


def measure_device(path: Path) -> None:
    """Measure this machine's device, write the file of ``--calibration``, and exit with 1 if it lacks something."""
    from megascend.apps.plan.calibrate import measure

    content = measure(path)
    if content["missing"]:
        missing = ", ".join(content["missing"])
        typer.echo(f"{path}: {missing} could not be measured (reasons above); --calibration needs all", err=True)
        raise typer.Exit(1)
    typer.echo(f"{path}: {content['device']}; use it with --calibration {path}")
