"""``megascend show-config``: print a run file with every default filled in, all defaults of a command, or their schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megascend.apps.cli import options
from megascend.errors import ConfigError, redacted

if TYPE_CHECKING:
    from megascend.config import Section

SettingsCommand = Literal["train", "rl", "serve"]
"""Commands that read a settings file."""


def show_config_command(
    config: Annotated[Path | None, typer.Argument(help="YAML file with the run's settings.")] = None,
    overrides: options.Overrides = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Also check the parallel layout for this many processes.")
    ] = None,
    defaults: Annotated[
        SettingsCommand | None,
        typer.Option("--defaults", help="Print all settings of this command with comments instead."),
    ] = None,
    schema: Annotated[
        SettingsCommand | None,
        typer.Option("--schema", help="Print the JSON Schema of this command's settings instead."),
    ] = None,
) -> None:
    """Print the resolved configuration as YAML; with --nproc also the ranks' layout, as YAML comments.

    A file with a section `rollout` is read as `megascend rl` reads it, any other as `megascend train` does; the output can be
    fed to the same command again. A layout that cannot work exits with 2.
    """
    import yaml

    from megascend.config.commented import default_settings, json_schema

    if (config is not None) + (defaults is not None) + (schema is not None) != 1:
        raise ConfigError("show-config takes one of CONFIG, --defaults COMMAND and --schema COMMAND")
    if config is None:
        if overrides or nproc:
            raise ConfigError(f"--set and --nproc need CONFIG: --{'defaults' if defaults else 'schema'} reads no file")
        if defaults is not None:
            title = (
                f"Settings of megascend {defaults}, with their defaults. Paths are relative to the working directory."
            )
            typer.echo(default_settings(settings_class(defaults), title), nl=False)
        elif schema is not None:
            typer.echo(json.dumps(json_schema(settings_class(schema), f"Settings of megascend {schema}"), indent=1))
        return
    settings = options.read_any_run_file(config, overrides)
    layout = ""
    if nproc is not None and not settings.model.exists():
        layout = f"layout not checked: {settings.model} does not exist yet"
    elif nproc is not None:
        from megascend.models.checkpoint_files.info import inspect_checkpoint
        from megascend.runtime.topology.topology import plan

        layout = plan(settings.parallel, nproc, inspect_checkpoint(settings.model, mtp=settings.mtp).shape).describe()
    # In the order in which they are declared.
    typer.echo(yaml.safe_dump(redacted(settings.model_dump(mode="json")), sort_keys=False), nl=False)
    for line in layout.splitlines():
        # As comments: the output is a valid run file again.
        typer.echo(f"# {line}")


def settings_class(command: SettingsCommand) -> type[Section]:
    from megascend.config import RunConfig
    from megascend.config.rl import RlConfig
    from megascend.config.serve import ServeConfig

    return {"train": RunConfig, "rl": RlConfig, "serve": ServeConfig}[command]
