"""``megascend job``: a commented file with which Slurm, Kubernetes, SkyPilot or Ray Train starts a run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megascend.apps.cli import options


def job_command(
    kind: Annotated[str, typer.Argument(help="slurm, kubernetes, skypilot or ray.")],
    config: Annotated[Path, typer.Argument(help="YAML file with the run's settings, for `megascend train` or `rl`.")],
    out: Annotated[
        Path | None, typer.Argument(help="Job file to write; default: beside the run file, run.slurm.sh for example.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    cards: Annotated[
        int | None,
        typer.Option("--cards-per-node", min=1, help="Devices of a node; default: those of the kind of device."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Kind of device, as of `megascend plan`; default: h100, on platform npu ascend-910b."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job; default: the run file's.")] = None,
    directory: Annotated[
        Path | None,
        typer.Option(help="Working directory on the nodes, on a file system that they share; default: this one."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Container image of kubernetes and skypilot; default: megascend:cuda, npu or cpu."),
    ] = None,
    overrides: options.Overrides = None,
) -> None:
    """Write a commented job file that starts CONFIG on a cluster, resumes it, and has it save before its time is over.

    The layout is checked for the number of cards, with the model where it is on this machine. Nothing is overwritten or started.
    """
    from megascend.apps.plan.hardware import load
    from megascend.apps.train.job_file import KINDS, ClusterRequest, check_kind, job_file
    from megascend.config import check_file_name
    from megascend.errors import ConfigError

    check_kind(kind)
    check_file_name(out or Path())
    settings = options.read_any_run_file(config, overrides)
    if settings.platform == "cpu":
        hardware = None
    else:
        hardware = load(device or ("ascend-910b" if settings.platform == "npu" else "h100"))
    platform = "cpu" if hardware is None else hardware.platform
    if (hardware is None and device is not None) or settings.platform not in ("auto", platform):
        raise ConfigError(f"--device {device}: {config} has platform: {settings.platform}; leave one out, or change it")
    path = out or config.with_name(config.stem + KINDS[kind].suffix)
    if path.exists():
        raise ConfigError(f"{path}: would be overwritten; choose another OUT, or remove it")
    request = ClusterRequest(
        run_file=config,
        nodes=nodes,
        cards=cards or (1 if hardware is None else hardware.cards_per_node),
        hardware=hardware,
        directory=(directory or Path.cwd()).absolute(),
        name=name,
        image=image,
        overrides=tuple(overrides or ()),
    )
    path.write_text(job_file(kind, settings, request, path), encoding="utf-8")
    typer.echo(f"{path}: {nodes} x {request.cards} {platform if hardware is None else hardware.title}")
    typer.echo(f"next: read it, set what your cluster calls otherwise, then {KINDS[kind].start} {path}")
