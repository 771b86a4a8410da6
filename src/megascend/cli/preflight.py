"""What can be checked about a run in milliseconds, before any process is started or torch is imported."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from megascend.errors import ConfigError

if TYPE_CHECKING:
    from megascend.config import RunConfig, TrainerConfig
    from megascend.config.serve import ServeConfig
    from megascend.topology.topology import Topology

PROCESSES_PER_CORE = 4
"""Above which processes on CPUs are busy with each other."""


def check_processes(platform: str, nproc: int) -> None:
    """Refuse more processes than this host can hold. Of several on a device it imports torch, which starting them needs anyway.

    Raises:
        ConfigError: there are more than devices, or than four a core.
        PlatformError: the platform cannot be used here.
    """
    cores = len(os.sched_getaffinity(0))
    advice = "start fewer, or spread them over hosts with torchrun"
    if nproc > PROCESSES_PER_CORE * cores:
        raise ConfigError(
            f"--nproc {nproc}: this process may use {cores} core{'s' if cores > 1 else ''}, and the limit is "
            f"{PROCESSES_PER_CORE} processes a core, {PROCESSES_PER_CORE * cores} in all: {advice}"
        )
    if nproc == 1 or platform == "cpu":
        return
    from megascend.platforms import choose

    chosen = choose(platform)
    devices = chosen.device_count()
    if devices is not None and nproc > devices:
        raise ConfigError(
            f"--nproc {nproc}: platform {chosen.name} has {devices} device{'s' if devices > 1 else ''} on this host, and every "
            f"process needs one: {advice}"
        )


def check_topology(config: TrainerConfig | ServeConfig, world_size: int) -> Topology:
    """The layout of ``world_size`` ranks for this run's model.

    Raises:
        TopologyError: the layout fits neither the world size nor the model.
        CheckpointError: the model is missing, incomplete or damaged, as far as file headers tell.
    """
    from megascend.huggingface.info import inspect_checkpoint
    from megascend.topology.topology import plan

    return plan(config.parallel, world_size, inspect_checkpoint(config.model).shape)


def check_service(config: ServeConfig, nproc: int) -> None:
    """What of a service's settings needs no torch: layout, checkpoint files, processes to be started on this host.

    Raises:
        MegascendError: whatever the first rank would have raised a few seconds later.
    """
    check_topology(config, nproc)
    check_processes(config.platform, nproc)


def check_run(
    config: RunConfig, world_size: int, overwrite: bool, resume: str | None = None, *, starts: bool = True
) -> None:
    """Everything about a run that needs no torch: plug-ins, layout, checkpoint files, output directory, packages, data files.

    Args:
        starts: the processes are to be started on this host; else they are there, maybe on several hosts.

    Raises:
        MegascendError: whatever the first rank would have raised a few seconds later.
    """
    from megascend.app.resume import check_start
    from megascend.app.run import check_lora, check_packages
    from megascend.app.start_checks import check_settings
    from megascend.config.plugins import check_plugins
    from megascend.distributed.launch import Launch

    check_start(config.output, overwrite, resume, Launch())
    check_plugins(config.plugins)
    check_packages(config, plugins_to_come=True)
    check_topology(config, world_size)
    check_settings(config, config.data_paths(), overwrite)
    check_lora(config)
    if starts:
        check_processes(config.platform, world_size)
    check_data(config, world_size)


def check_data(config: RunConfig, world_size: int) -> None:
    """Read the data of a run; where some of it is wrong, find what else is, as the ranks would.

    Raises:
        DataError: the message lists all problems of training and validation data, those of templates and lengths included.
    """
    from megascend.data.files import check_files
    from megascend.data.findings import joined
    from megascend.errors import CheckpointError, DataError

    findings = []
    for path, data, setting in config.data_sources():
        findings.append(check_files(path, data, setting))
    if not any(each.problems for each in findings):
        return
    from megascend.app.run import load_tokenizer
    from megascend.app.run_samples import RunSamples
    from megascend.app.sample_limits import sample_limits

    with contextlib.suppress(CheckpointError):  # then what reading has found is all that can be said of the data
        RunSamples.prepare(config, load_tokenizer(config.model), sample_limits(config, world_size))
    problems = []
    for each in findings:
        try:
            each.raise_problems()
        except DataError as error:
            problems.append(error)
    raise joined(problems)
