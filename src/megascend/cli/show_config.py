"""``megascend show-config``: the settings of a run with every default filled in, and what they mean for N processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megascend.cli.train import Overrides


def show_config_command(
    config: Annotated[Path, typer.Argument(help="YAML file with the run's settings.")],
    overrides: Overrides = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Also check the parallel layout for this many processes.")
    ] = None,
) -> None:
    """Print the resolved configuration as YAML; with --nproc also the ranks' layout, as YAML comments.

    A file with a section `rollout` is read as `megascend rl` reads it, any other as `megascend train` does; the output can be
    fed to the same command again. A layout that cannot work exits with 2.
    """
    import yaml

    from megascend.config import RunConfig, TrainerConfig, parsed, read_settings
    from megascend.config.rl import RlConfig
    from megascend.huggingface.info import inspect_checkpoint
    from megascend.topology.topology import plan

    values = read_settings(config, overrides)
    settings: TrainerConfig = parsed(RlConfig if "rollout" in values else RunConfig, values, config)
    if nproc is None:
        layout = ""
    elif not settings.model.exists():
        layout = f"layout not checked: {settings.model} does not exist yet"
    else:
        layout = plan(settings.parallel, nproc, inspect_checkpoint(settings.model).shape).describe()
    typer.echo(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False), nl=False)  # as they are declared
    for line in layout.splitlines():
        # As comments: the output is a valid run file again.
        typer.echo(f"# {line}")
