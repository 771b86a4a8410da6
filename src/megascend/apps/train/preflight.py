"""Checks before a run: settings, packages, the model's files, the layout, paths, LoRA, data, processes and disk.

``train``, ``rl``, ``serve`` and the dry run share them. They take milliseconds: torch is imported only to report wrong data.
What they compute is passed on in a :class:`RunPlan`, also to ranks in other processes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from megascend.apps.tracking.tracker import check_trackers
from megascend.apps.train.object_storage import ObjectStorage
from megascend.apps.train.plot import require_extra
from megascend.apps.train.resume import check_start
from megascend.apps.train.run_directory import CHECKPOINTS, RUN_FILES
from megascend.config import RunConfig, TrainerConfig
from megascend.config.plugins import check_class, check_name, check_names, check_plugins
from megascend.config.registry import ENGINES, EngineEntry
from megascend.config.rl import RlConfig
from megascend.errors import CheckpointError, ConfigError, DataError, MissingDependencyError
from megascend.models.checkpoint_files import hub
from megascend.models.checkpoint_files.files import read_config
from megascend.models.checkpoint_files.info import ModelInfo, inspect_checkpoint, linear_layers
from megascend.models.checkpoint_files.scalar_head import padding_id
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.io.paths import format_bytes, free_bytes, real
from megascend.runtime.topology.topology import Topology, plan
from megascend.surroundings import is_installed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.data.samples import SampleLimits
    from megascend.config.serve import ServeConfig
    from megascend.training.batch.micro_batch import SequenceLayout

AnyConfig = TypeVar("AnyConfig", bound=TrainerConfig)

PROCESSES_PER_CORE = 4
"""Largest number of processes per core: with more, processes on CPUs mostly wait for each other."""
CHECKPOINT_BYTES = 14
"""Size of a parameter in a checkpoint: the weight in bf16, the fp32 original and two moments."""


@dataclass(frozen=True)
class RunPlan(Generic[AnyConfig]):
    """Plan of a run, as computed by its checks. Pickles without torch.

    Attributes:
        info: description of the checkpoint, from its configuration and headers.
    """

    config: AnyConfig
    world_size: int
    info: ModelInfo
    topology: Topology

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer; imports transformers."""
        from megascend.models.checkpoint_files.tokenizer import load_tokenizer

        return load_tokenizer(self.config.model)

    @cached_property
    def layout(self) -> SequenceLayout:
        """Return the layout of sequences on a rank (the first of context parallel ones). Imports torch."""
        from megascend.training.batch.micro_batch import SequenceLayout

        config, topology = self.config, self.topology
        # Where plug-ins have not been imported yet, their engine is taken to register nothing special.
        engine = ENGINES.get(config.engine, EngineEntry(""))
        return SequenceLayout(
            packing=config.batching.packing and not engine.always_pads,
            context_size=topology.context,
            token_multiple=topology.sequence_shards,
            contiguous=engine.contiguous,
        )

    @cached_property
    def limits(self) -> SampleLimits:
        """Return the tightest limit on a sample among settings and model, and the name of its source."""
        from megascend.apps.data.labels import LabelSet
        from megascend.apps.data.samples import SampleLimits

        shape, layout, batching = self.info.shape, self.layout, self.config.batching
        multiple = layout.padded_length(1)
        budget = None if batching.micro_batch_tokens == "auto" else batching.budget
        sources = [
            (
                None if budget is None else budget // multiple * multiple,
                f"batching.micro_batch_tokens: {budget}, padding included",
            ),
            (batching.max_length, f"batching.max_length: {batching.max_length}"),
            (shape.max_position, f"the model's context; max_position_embeddings: {shape.max_position}"),
        ]
        limits = [(length, setting) for length, setting in sources if length is not None]
        if not limits:
            raise ConfigError(
                "batching.micro_batch_tokens: auto, and the model does not say how long samples may be: set batching.max_length"
            )
        length, setting = min(limits, key=lambda limit: limit[0])
        head = self.info.scalar_head
        padding = None if head is None else padding_id(read_config(self.config.model), self.config.model)
        labels = None if head is None or head.problem_type is None else LabelSet(head.labels, head.problem_type)
        return SampleLimits(
            length, setting, shape.vocab_size, budget, multiple, layout.packing, head is not None, padding, labels
        )


def preflight(
    config: AnyConfig, world_size: int, overwrite: bool, resume: str | None = None, *, starts_ranks: bool = True
) -> RunPlan[AnyConfig]:
    """Check everything about a run that needs no torch, before any process is started. For commands.

    Args:
        starts_ranks: the caller starts the ranks on this host; False: they are running already, perhaps on several hosts.
    """
    check_start(config.output, overwrite, resume, Launch())
    run_plan = check_run(config, world_size, overwrite)
    if starts_ranks:
        check_processes(config.platform, world_size)
    if isinstance(config, RlConfig):
        check_rollouts(config)
    elif isinstance(config, RunConfig):
        check_data(config, run_plan)
    if config.push is not None:
        hub.check_access(config.push.repository)
    return run_plan


def check_run(
    config: AnyConfig, world_size: int, overwrite: bool, *, plugins_pending: bool = True
) -> RunPlan[AnyConfig]:
    """Check settings, packages and the model's files, without torch.

    Args:
        plugins_pending: modules that the run names, and may register engines or trackers, have not been imported yet.
    """
    check_plugins(config.plugins)
    for name in config.callbacks:
        check_class(name, "callbacks")
    if not (plugins_pending and config.plugins):
        check_names(config)
    check_packages(config, plugins_pending=plugins_pending)
    info = inspect_checkpoint(config.model, config.head, config.mtp)
    topology = plan(config.parallel, world_size, info.shape)
    check_paths(config, overwrite)
    context, longest = info.shape.max_position, config.batching.max_length
    if longest is not None and context is not None and longest > context:
        raise ConfigError(
            f"batching.max_length: {longest} is above the model's context of {context} tokens (max_position_embeddings in "
            f"{config.model / 'config.json'}): set {context} or less, or leave it out"
        )
    check_lora(config, info)
    return RunPlan(config, world_size, info, topology)


def check_service(config: ServeConfig, nproc: int) -> None:
    plan(config.parallel, nproc, inspect_checkpoint(config.model).shape)
    check_processes(config.platform, nproc)


def check_packages(config: TrainerConfig, *, plugins_pending: bool = False) -> None:
    if config.plot and "plot" in config.model_fields_set:  # by default a run without the package has no plot
        require_extra("matplotlib", "plot")
    if isinstance(config, RunConfig) and config.validation is not None and config.validation.tasks is not None:
        require_harness("validation.tasks")
    check_trackers(config.tracker_options, plugins=plugins_pending and bool(config.plugins))
    if config.checkpoint.remote is not None:
        ObjectStorage(config.checkpoint.remote)


def require_harness(setting: str) -> None:
    if not is_installed("lm_eval"):
        raise MissingDependencyError(
            f"{setting} needs lm_eval (lm-eval-harness), which is not installed: pip install 'megascend[eval]'"
        )


def check_paths(config: TrainerConfig, overwrite: bool) -> None:
    """Refuse an output directory whose files would be read as data, or a run that would overwrite what it reads."""
    output = real(config.output)
    data_paths = {name: path for name, path in config.data_paths().items() if path is not None}
    for setting, path in data_paths.items():
        if path.is_dir() and output.is_relative_to(real(path)):
            raise ConfigError(
                f"output: {config.output} lies in {setting}: {path}, so the run's files would be read as data: choose another"
            )
    for setting, path in {"model": config.model, **data_paths}.items():
        # --overwrite removes links and empties the directories behind them, so a path counts in both forms.
        locations = {real(path), path.absolute()}
        for name in RUN_FILES if overwrite else ():
            cleared = (output / name, config.output.absolute() / name, real(output / name))
            if any(location.is_relative_to(above) for location in locations for above in cleared):
                raise ConfigError(
                    f"{setting}: {path} is one of the files of an earlier run in output: {config.output}, which --overwrite "
                    "removes: choose another output, or copy it first"
                )


def check_lora(config: TrainerConfig, info: ModelInfo) -> None:
    """Check that the model, by its weights' names, has every layer that the adapter targets."""
    if config.lora is None or config.lora.targets == "all-linear":
        return
    layers = linear_layers(info, config.vision_tower)
    in_tower = set(linear_layers(info, "train")) - set(layers)
    for target in config.lora.targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            tower = next((name for name in sorted(in_tower) if f".{name}".endswith(f".{target}")), None)
            if tower is not None:
                raise ConfigError(
                    f"lora.targets: {target!r}, which is {tower}, in the vision tower: set vision_tower: train"
                )
            ends = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in layers}))
            raise ConfigError(f"lora.targets: {target!r} is not a linear layer of {config.model}; it has {ends}")


def check_processes(platform: str, nproc: int) -> None:
    """Refuse more processes than this host can hold. Imports torch to count devices, as starting the processes does."""
    cores = len(os.sched_getaffinity(0))
    advice = "start fewer, or spread them over hosts with torchrun"
    if nproc > PROCESSES_PER_CORE * cores:
        raise ConfigError(
            f"--nproc {nproc}: this process may use {cores} core{'s' if cores > 1 else ''}, and the limit is "
            f"{PROCESSES_PER_CORE} processes a core, {PROCESSES_PER_CORE * cores} in all: {advice}"
        )
    # One process always has a device, and CPUs are counted above; neither needs torch.
    if nproc == 1 or platform == "cpu":
        return
    from megascend.runtime.platforms import choose

    chosen = choose(platform)
    devices = chosen.device_count()
    if devices is not None and nproc > devices:
        raise ConfigError(
            f"--nproc {nproc}: platform {chosen.name} has {devices} device{'s' if devices > 1 else ''} on this host, and every "
            f"process needs one: {advice}"
        )


def check_data(config: RunConfig, run_plan: RunPlan[Any]) -> None:
    """Read the data of a run; on a problem, encode it too, to report all problems that the ranks would find."""
    from megascend.apps.data.files import check_files
    from megascend.apps.data.findings import joined

    findings = [check_files(source.path, source.data, source.setting) for source in config.data_sources()]
    if not any(finding.problems for finding in findings):
        return
    from megascend.apps.train.run_samples import RunSamples

    # Reading has found problems. Encoding finds the others, so that all are reported at once; without a tokenizer it fails, and
    # only the problems of reading are reported.
    with contextlib.suppress(CheckpointError):
        RunSamples.prepare(config, run_plan.tokenizer, run_plan.limits)
    problems = []
    for finding in findings:
        try:
            finding.raise_problems()
        except DataError as error:
            problems.append(error)
    raise joined(problems)


def check_rollouts(config: RlConfig) -> None:
    """Check that prompts can be read, that the reward function or environment exists, and that engines have addresses."""
    from megascend.apps.rl.engines import check_engines
    from megascend.apps.rl.rollout.prompts import read_prompts
    from megascend.apps.rl.servers import check_servers

    free = config.rollout.environment is not None
    if config.rollout.prompts is not None:
        read_prompts(config.rollout.prompts, free=free)
    if config.evaluation is not None:
        read_prompts(config.evaluation.prompts, free=free)
    if config.rollout.reward is not None:
        check_name(config.rollout.reward, "reward")
    if config.rollout.environment is not None:
        check_name(config.rollout.environment.name, "rollout.environment")
    check_engines(config.engines, config.rollout.controller, config.teacher_engine)
    check_servers(config)


# --- disk space ---


def disk_warning(config: TrainerConfig, info: ModelInfo) -> str | None:
    earlier = [path for name in (CHECKPOINTS, "hf") for path in (config.output / name).rglob("*") if path.is_file()]
    required = required_disk_bytes(config, info.parameter_count)
    # Files of an earlier run, which --overwrite will remove, count as free space.
    free = free_bytes(config.output) + sum(path.stat().st_size for path in earlier)
    if required <= free:
        return None
    return (
        f"output: {config.output} has {format_bytes(free)} free, and checkpoints and export will take about "
        f"{format_bytes(required)}: make room, choose another output, or lower checkpoint.keep_last"
    )


def required_disk_bytes(config: TrainerConfig, parameters: int) -> int:
    """Return the bytes of the kept checkpoints, the one being written, and the export; 0 for an adapter, which is small.

    A run without ``checkpoint.every`` writes one when a signal stops it.
    """
    if config.lora is not None:
        return 0
    weight_bytes = 4 if config.precision == "fp32" else 2
    checkpoints = config.checkpoint.keep_last + 1 if config.checkpoint.every else 1
    if config.checkpoint.every and config.checkpoint.keep_every:
        checkpoints += config.steps // config.checkpoint.keep_every
    exports = config.export + (checkpoints if config.checkpoint.hf else 0)
    return parameters * (checkpoints * CHECKPOINT_BYTES + exports * weight_bytes)
