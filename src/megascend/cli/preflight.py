"""What can be checked about a run in milliseconds, before any process is started or torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascend.config import RunConfig, TrainerConfig
    from megascend.topology.topology import Topology


def check_topology(config: TrainerConfig, world_size: int) -> Topology:
    """The layout of ``world_size`` ranks for this run's model.

    Raises:
        TopologyError: the layout fits neither the world size nor the model.
        CheckpointError: the model is missing, incomplete or damaged, as far as file headers tell.
    """
    from megascend.huggingface.info import inspect_checkpoint
    from megascend.topology.topology import plan

    return plan(config.parallel, world_size, inspect_checkpoint(config.model).shape)


def check_run(config: RunConfig, world_size: int, overwrite: bool, resume: str | None = None) -> None:
    """Everything about a run that needs no torch: plug-ins, layout, checkpoint files, output directory, packages, data files.

    Raises:
        MegascendError: whatever the first rank would have raised a few seconds later.
    """
    from megascend.app.resume import check_start
    from megascend.app.run import check_lora, check_packages
    from megascend.config.plugins import check_plugins
    from megascend.data.check import check_files
    from megascend.distributed.launch import Launch

    check_start(config.output, overwrite, resume, Launch())
    check_plugins(config.plugins)
    check_packages(config, plugins_to_come=True)
    check_topology(config, world_size)
    check_lora(config)
    check_files(config.data.path, config.data)
    if config.validation is not None and config.validation.path is not None:
        check_files(config.validation.path, config.data)
