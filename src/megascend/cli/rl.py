"""``megascend rl``: reinforcement learning from a YAML file, on one process, on N started here, or under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megascend.cli.train import Overrides, Overwrite, Processes, Resume, prepare_rank, print_dry_run, start_training

if TYPE_CHECKING:
    from megascend.app.preflight import RunPlan
    from megascend.config.rl import RlConfig


def rl_command(
    config: Annotated[Path, typer.Argument(help="YAML file with the run's settings (docs/rl.md).")],
    overrides: Overrides = None,
    nproc: Processes = None,
    overwrite: Overwrite = False,
    resume: Resume = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all that can be known before training; no request to an engine.")
    ] = False,
) -> None:
    """Train a Hugging Face checkpoint on responses that inference engines sample, graded by a reward function.

    Rank 0 talks to the engines that CONFIG names; they sample while the trainer learns. An error exits with 2; a run that
    a signal has stopped, after saving a checkpoint, with 75.
    """
    from megascend.config.rl import load_rl_config
    from megascend.io.lasting_output import LastingOutput

    settings = load_rl_config(config, overrides)
    if dry_run:
        from megascend.app.dry_run import dry_run_rl
        from megascend.cli.dry_run_text import report_rl

        print_dry_run(settings, nproc, overwrite, resume, dry_run_rl, report_rl)
        return
    LastingOutput().install()  # until the process ends
    start_training(rl_rank, settings, nproc, overwrite, resume)


def rl_rank(config: RlConfig, overwrite: bool, resume: str | None, plan: RunPlan[RlConfig] | None) -> str | None:
    """Run one rank, as :func:`megascend.cli.train.train_rank`."""
    from megascend.app.rl.train import train_rl

    prepare_rank(config)
    return train_rl(config, overwrite=overwrite, resume=resume, plan=plan).stopped
