"""``megascend rl``: reinforcement learning, started as ``megascend train`` is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascend.apps.cli import options
from megascend.apps.cli.train import prepare_rank, print_dry_run, start_training

if TYPE_CHECKING:
    from megascend.apps.train.preflight import RunPlan
    from megascend.config.rl import RlConfig


def rl_command(
    config: options.RunFile,
    overrides: options.Overrides = None,
    nproc: options.Processes = None,
    overwrite: options.Overwrite = False,
    resume: options.Resume = None,
    dry_run: options.DryRun = False,
    profile: options.Profiled = False,
) -> None:
    """Train a Hugging Face checkpoint on responses that inference engines sample, graded by a reward function.

    Rank 0 talks to the engines that CONFIG names; they sample while the trainer learns. --dry-run grades a canned response. An
    error exits with 2; a run that a signal has stopped, after saving a checkpoint, with 75.
    """
    from megascend.config.rl import load_rl_config

    settings = options.read_run_file(load_rl_config, config, overrides)
    if dry_run:
        from megascend.apps.cli.dry_run_text import report_rl
        from megascend.apps.train.dry_run import dry_run_rl

        print_dry_run(
            lambda plan, style: report_rl(dry_run_rl(plan, overwrite, resume), style),
            settings,
            nproc,
            overwrite,
            resume,
        )
    else:
        start_training(rl_rank, settings, nproc, overwrite, resume, profile)


def rl_rank(config: RlConfig, overwrite: bool, resume: str | None, plan: RunPlan[RlConfig] | None) -> str | None:
    """Run one rank, as :func:`megascend.apps.cli.train.train_rank`."""
    from megascend.apps.rl.train import train_rl

    prepare_rank(config)
    return train_rl(config, overwrite=overwrite, resume=resume, plan=plan).stopped
