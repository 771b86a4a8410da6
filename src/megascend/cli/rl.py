"""``megascend rl``: reinforcement learning as a YAML file says, on one process, on N started here, or under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megascend.cli.train import EXIT_STOPPED

if TYPE_CHECKING:
    from megascend.config.rl import RlConfig


def rl_command(
    config: Annotated[Path, typer.Argument(help="YAML file with the run's settings (docs/rl.md).")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Start this many trainer processes here (not under torchrun).")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run's files in the output directory.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="auto|PATH",
            help="Resume from a checkpoint: the newest complete one in the output directory, or that at PATH.",
        ),
    ] = None,
) -> None:
    """Train a Hugging Face checkpoint on responses that inference engines sample, graded by a reward function.

    Rank 0 talks to the engines that CONFIG names; they sample while the trainer learns. An error exits with 2; a run that
    a signal has stopped, after saving a checkpoint, with 75.
    """
    from megascend.app.lasting_output import LastingOutput
    from megascend.cli.launch import launch, under_torchrun
    from megascend.config.rl import load_rl_config
    from megascend.errors import ConfigError

    settings = load_rl_config(config, overrides)
    LastingOutput().install()  # until the process ends
    if under_torchrun():
        if nproc is not None:
            raise ConfigError(
                f"--nproc {nproc} under torchrun: torchrun has started the processes already; leave it out"
            )
        stopped = rl_rank(config, overrides, overwrite, resume)
    else:
        check_rl_run(settings, nproc or 1, overwrite, resume)
        try:
            if (nproc or 1) == 1:
                stopped = rl_rank(config, overrides, overwrite, resume)
            else:
                stopped = launch(rl_rank, config, overrides, overwrite, resume, nproc=nproc or 1)
        except KeyboardInterrupt:
            typer.secho("interrupted", fg=typer.colors.RED, err=True)
            raise typer.Exit(130) from None
    if stopped:
        raise typer.Exit(EXIT_STOPPED)


def check_rl_run(config: RlConfig, world_size: int, overwrite: bool, resume: str | None) -> None:
    """Everything about a run that needs no torch: layout, checkpoint files, output directory, packages, prompts, the reward.

    Raises:
        MegascendError: whatever the first rank would have raised a few seconds later.
    """
    from megascend.app.resume import check_start
    from megascend.app.rl.engines import check_engines
    from megascend.app.run import check_lora, check_packages
    from megascend.app.start_checks import check_settings
    from megascend.cli.preflight import check_processes, check_topology
    from megascend.config.plugins import check_plugins
    from megascend.distributed.launch import Launch
    from megascend.rollout.prompts import read_prompts
    from megascend.rollout.rewards import check_name

    check_start(config.output, overwrite, resume, Launch())
    check_plugins(config.plugins)
    check_packages(config, plugins_to_come=True)
    check_topology(config, world_size)
    check_settings(config, config.data_paths(), overwrite)
    check_lora(config)
    check_processes(config.platform, world_size)
    read_prompts(config.rollout.prompts)
    if config.evaluation is not None:
        read_prompts(config.evaluation.prompts)
    check_name(config.rollout.reward)
    check_engines(config.engines, config.rollout.controller)


def rl_rank(config: Path, overrides: list[str] | None, overwrite: bool, resume: str | None = None) -> str | None:
    """One rank of the run; returns the signal that stopped it, if one did."""
    import warnings

    from megascend.app.lasting_output import LastingOutput
    from megascend.app.rl.loop import train_rl
    from megascend.cli.messages import ask_nothing, ignore_renamed, show_messages
    from megascend.config.rl import load_rl_config

    LastingOutput().install()
    show_messages()
    ignore_renamed()
    # Deprecations inside these packages are nothing that a user of this command could act on.
    warnings.filterwarnings("ignore", module=r"(megatron|mcore_bridge|torch\.distributed)\.")
    settings = load_rl_config(config, overrides)
    if settings.trackers:
        ask_nothing()
    return train_rl(settings, overwrite=overwrite, resume=resume).stopped
