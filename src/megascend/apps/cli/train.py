"""``megascend train``, ``rl`` and ``show-config``: run a YAML configuration on one process, on N processes started here, or under
torchrun; or print it with every default filled in.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from megascend.apps.cli.launch import EXIT_INTERRUPTED, EXIT_STOPPED, start_ranks, under_torchrun
from megascend.errors import redacted

if TYPE_CHECKING:
    from megascend.apps.train.preflight import RunPlan
    from megascend.config import RunConfig, Section, TrainerConfig
    from megascend.config.rl import RlConfig

Settings = TypeVar("Settings", bound="TrainerConfig")
SettingsCommand = Literal["train", "rl", "serve"]
"""Commands that read a settings file."""
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
]
Processes = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Start this many processes here (not under torchrun).")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run's files in the output directory.")]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|PATH",
        help="Resume from a checkpoint: the newest complete one in the output directory, or that at PATH.",
    ),
]
ProfileOption = Annotated[
    bool, typer.Option("--profile", help="Record three steps: a trace for Perfetto, and what took the time in them.")
]


def train_command(
    config: Annotated[Path, typer.Argument(help="YAML file with the run's settings (see `megascend show-config`).")],
    overrides: Overrides = None,
    nproc: Processes = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check all that can be known before training, show samples and figures; no training."
        ),
    ] = False,
    profile: ProfileOption = False,
) -> None:
    """Train a Hugging Face checkpoint as CONFIG says.

    Runs one process, or --nproc processes, or as one rank of torchrun. An error exits with 2; a run that a signal has stopped,
    after saving a checkpoint, with 75.
    """
    from megascend.apps.cli.messages import show_messages
    from megascend.config import load_config
    from megascend.models.checkpoint_files.hub import with_snapshots
    from megascend.runtime.io.lasting_output import LastingOutput

    show_messages()
    settings = with_snapshots(load_config(config, overrides))
    if dry_run:
        print_dry_run(settings, nproc, overwrite, resume)
        return
    LastingOutput().install()  # until the process ends
    start_training(train_rank, profiled(settings) if profile else settings, nproc, overwrite, resume)


def rl_command(
    config: Annotated[Path, typer.Argument(help="YAML file with the run's settings (docs/rl.md).")],
    overrides: Overrides = None,
    nproc: Processes = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check all that can be known before training, with one episode of a canned response; no training.",
        ),
    ] = False,
    profile: ProfileOption = False,
) -> None:
    """Train a Hugging Face checkpoint on responses that inference engines sample, graded by a reward function.

    Rank 0 talks to the engines that CONFIG names; they sample while the trainer learns. An error exits with 2; a run that
    a signal has stopped, after saving a checkpoint, with 75.
    """
    from megascend.apps.cli.messages import show_messages
    from megascend.config.rl import load_rl_config
    from megascend.models.checkpoint_files.hub import with_snapshots
    from megascend.runtime.io.lasting_output import LastingOutput

    show_messages()
    settings = with_snapshots(load_rl_config(config, overrides))
    if dry_run:
        print_dry_run(settings, nproc, overwrite, resume)
        return
    LastingOutput().install()  # until the process ends
    start_training(rl_rank, profiled(settings) if profile else settings, nproc, overwrite, resume)


def profiled(settings: Settings) -> Settings:
    """Return settings that record a profile; a section of the file takes precedence."""
    from megascend.config import Profile

    return settings if settings.profile is not None else settings.model_copy(update={"profile": Profile()})


def show_config_command(
    config: Annotated[Path | None, typer.Argument(help="YAML file with the run's settings.")] = None,
    overrides: Overrides = None,
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

    from megascend.apps.cli.messages import show_messages
    from megascend.config import RunConfig, parsed, read_settings
    from megascend.config.commented import default_settings, json_schema
    from megascend.config.rl import RlConfig
    from megascend.errors import ConfigError
    from megascend.models.checkpoint_files.info import inspect_checkpoint
    from megascend.runtime.topology.topology import plan

    if (config is not None) + (defaults is not None) + (schema is not None) != 1:
        raise ConfigError("show-config takes one of CONFIG, --defaults COMMAND and --schema COMMAND")
    command = defaults or schema
    if command is not None:
        kind, title = settings_class(command), f"Settings of megascend {command}"
        if overrides or nproc:
            raise ConfigError(f"--set and --nproc need CONFIG: --{'defaults' if defaults else 'schema'} reads no file")
        if defaults is not None:
            typer.echo(
                default_settings(kind, f"{title}, with their defaults. Paths are relative to the working directory."),
                nl=False,
            )
        else:
            typer.echo(json.dumps(json_schema(kind, title), indent=1))
        return
    assert config is not None
    show_messages()
    for_rl = "rollout" in read_settings(config) or any(name.startswith("rollout.") for name in overrides or [])
    kind = RlConfig if for_rl else RunConfig
    settings: TrainerConfig = parsed(kind, read_settings(config, overrides, kind), config)
    if nproc is None:
        layout = ""
    elif not settings.model.exists():
        layout = f"layout not checked: {settings.model} does not exist yet"
    else:
        layout = plan(settings.parallel, nproc, inspect_checkpoint(settings.model, mtp=settings.mtp).shape).describe()
    typer.echo(
        yaml.safe_dump(redacted(settings.model_dump(mode="json")), sort_keys=False), nl=False
    )  # as they are declared
    for line in layout.splitlines():
        # As comments: the output is a valid run file again.
        typer.echo(f"# {line}")


def settings_class(command: SettingsCommand) -> type[Section]:
    """Return the class of a command's settings."""
    if command == "rl":
        from megascend.config.rl import RlConfig

        return RlConfig
    if command == "serve":
        from megascend.config.serve import ServeConfig

        return ServeConfig
    from megascend.config import RunConfig

    return RunConfig


def print_dry_run(settings: TrainerConfig, nproc: int | None, overwrite: bool, resume: str | None) -> None:
    """Check a run without starting it, and print the result; under torchrun on rank 0 only."""
    import sys

    from megascend.apps.cli.dry_run_text import Style, report, report_rl
    from megascend.apps.train.dry_run import dry_run, dry_run_rl
    from megascend.apps.train.preflight import preflight
    from megascend.config.rl import RlConfig
    from megascend.runtime.distributed.launch import Launch

    launch = Launch.from_environment()
    # All ranks would read the same data and report the same problems.
    if launch.rank > 0:
        return
    plan: Any = preflight(settings, nproc or launch.world_size, overwrite, resume, starts_ranks=not under_torchrun())
    style = Style.of(sys.stdout)
    if isinstance(settings, RlConfig):
        lines = report_rl(dry_run_rl(plan, overwrite, resume), style)
    else:
        lines = report(dry_run(plan, overwrite, resume), style)
    for line in lines:
        print(line)
    print("\ndry run: no problem found before training; nothing was trained or written", flush=True)


def start_training(
    function: Callable[..., str | None],
    settings: TrainerConfig,
    nproc: int | None,
    overwrite: bool,
    resume: str | None,
) -> None:
    """Check a run, start its ranks unless torchrun has, and exit with 75 if a signal has stopped it.

    Args:
        function: called on every rank, with the arguments of :func:`train_rank`.
    """
    if under_torchrun(nproc):
        stopped = function(settings, overwrite, resume, None)
    else:
        from megascend.apps.train.preflight import preflight

        # Once, in the parent: an error is one line, not one for each rank.
        plan = preflight(settings, nproc or 1, overwrite, resume)
        try:
            stopped = start_ranks(function, settings, overwrite, resume, plan, nproc=nproc or 1)
        except KeyboardInterrupt:
            typer.secho("interrupted", fg=typer.colors.RED, err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if stopped:
        raise typer.Exit(EXIT_STOPPED)


def train_rank(config: RunConfig, overwrite: bool, resume: str | None, plan: RunPlan[RunConfig] | None) -> str | None:
    """Run one rank; return the signal that stopped the run, if one did.

    Args:
        plan: results of the checks on this host; None under torchrun. It pickles without torch, as the settings do.
    """
    from megascend.apps.train.train import train

    prepare_rank(config)
    return train(config, overwrite=overwrite, resume=resume, plan=plan).stopped


def rl_rank(config: RlConfig, overwrite: bool, resume: str | None, plan: RunPlan[RlConfig] | None) -> str | None:
    """Run one rank, as :func:`train_rank`."""
    from megascend.apps.rl.train import train_rl

    prepare_rank(config)
    return train_rl(config, overwrite=overwrite, resume=resume, plan=plan).stopped


def prepare_rank(config: TrainerConfig) -> None:
    """Set up a rank's output, which must survive a closed terminal, its log messages, and a closed stdin."""
    import warnings

    from megascend.apps.cli.messages import close_stdin, show_messages
    from megascend.runtime.io.lasting_output import LastingOutput

    LastingOutput().install()
    show_messages()
    # Users of this command cannot act on deprecations inside these packages.
    warnings.filterwarnings("ignore", module=r"(megatron|mcore_bridge|torch\.distributed)\.")
    if config.trackers:
        close_stdin()
