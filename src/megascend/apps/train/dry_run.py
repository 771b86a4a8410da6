"""Dry runs of ``train`` and ``rl``: all of a run that needs no process group, no model and no step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megascend.apps.data.preview import SamplePiece, SampleStatistics, SourceStatistics, pieces
from megascend.apps.plan.hardware import matching
from megascend.apps.plan.search import MEMORY_SHARE
from megascend.apps.rl.servers import placements, share_beside_trainer
from megascend.apps.rl.train import ReinforcementLearning
from megascend.apps.rl.trial import EpisodeTrial, ask_engines, describe_teacher, try_episode
from megascend.apps.train.layout_plan import Suggestion, suggestion
from megascend.apps.train.learner import RunContext, RunData, RunKind
from megascend.apps.train.loop import plan_with_plugins
from megascend.apps.train.objectives import LearningObjective
from megascend.apps.train.preflight import AnyConfig, RunPlan, disk_warning
from megascend.apps.train.results import check_adapter_path
from megascend.apps.train.run_backend import ADAPTER, backend_settings, bootstrap
from megascend.apps.train.run_samples import RunSamples, StreamedSamples
from megascend.apps.train.teacher_model import teacher_sizes
from megascend.apps.train.token_budget import AUTO, largest_fitting, largest_useful
from megascend.apps.train.train import SupervisedRun
from megascend.config import RunConfig, TrainerConfig
from megascend.config.registry import inference_engine
from megascend.config.rl import LOCAL, RlConfig
from megascend.models.checkpoint_files.files import read_config
from megascend.models.checkpoint_files.info import ModelInfo, inspect_checkpoint
from megascend.models.memory.estimate import Estimate, estimate
from megascend.models.memory.sizes import ELEMENT_BYTES, Workload
from megascend.runtime.bootstrap.runtime import Runtime
from megascend.runtime.distributed.launch import Launch
from megascend.runtime.io.paths import free_bytes
from megascend.runtime.topology.topology import Topology
from megascend.training.batch.micro_batch import SequenceLayout
from megascend.training.batch.packing import plan_micro_batches, shard

EXAMPLES = 3
"""Samples that are shown, or pairs of them."""
PLANNED = 50
"""Steps that are planned."""
TORCH_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class ShownSample:
    """A sample of the first step, by its name (``sample 7``); ``tokens``: those that the model reads."""

    name: str
    tokens: int
    pieces: list[SamplePiece]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Plan of a run that has not started: model, layout, memory and disk.

    Attributes:
        config: the run's settings, completed from the data.
        platform: the one that the run would use.
        free_disk: bytes, where the output is to be.
        disk_warning: None if there is room for what the run will write.
        memory: estimate for one rank; None for an engine from another package.
        recomputed: the same with recompute.granularity: full; None where that is set, or cannot be.
        device_memory: bytes of one device; on a CPU, this machine's for each rank.
    """

    config: TrainerConfig
    platform: str
    topology: Topology
    info: ModelInfo
    free_disk: int
    disk_warning: str | None
    memory: Estimate | None
    recomputed: Estimate | None
    device_memory: int


@dataclass(frozen=True, kw_only=True)
class SupervisedDryRun(DryRun):
    """Plan of a run of ``train``, with statistics of its data and its steps.

    Attributes:
        train, held_out: statistics of the samples; the latter None without a validation set.
        sources: figures of each source of training data; none of streams.
        remarks: descriptions of data that was left out, cut or not read.
        epochs: passes over the data in all steps; None of a stream, whose statistics are those of the first batch.
        examples: the first samples of the first step.
        suggestion: a layout that is predicted to be faster; None if there is none, or this device is not described.
    """

    config: RunConfig
    train: SampleStatistics
    held_out: SampleStatistics | None
    sources: list[SourceStatistics]
    remarks: tuple[str, ...]
    epochs: float | None
    steps: StepPlan
    examples: list[ShownSample]
    suggestion: Suggestion | None = None


@dataclass(frozen=True, kw_only=True)
class RlDryRun(DryRun):
    """Plan of a run of ``rl``; its memory is that of trajectories as long as they may become.

    Attributes:
        prompts, held_out: number of prompts for training and for evaluation.
        prompt_lengths: tokens of the shortest, median and longest prompt for training; zeros if an environment makes them.
        engines: a line for each engine: its version, or why there is none.
        teacher: description of the teacher, and whether it answers; None without one.
        engines_share: share of a trainer's device that engines take during its steps.
        processes: bytes of models in processes beside rank 0, by name.
    """

    config: RlConfig
    prompts: int
    held_out: int
    prompt_lengths: tuple[int, int, int]
    trial: EpisodeTrial
    engines: list[str]
    teacher: str | None
    engines_share: float
    processes: dict[str, int]


def start(
    kind: RunKind[AnyConfig], plan: RunPlan[AnyConfig], overwrite: bool, resume: str | Path | None
) -> RunContext[AnyConfig]:
    """Begin a run as its first rank would, and prepare this process for the run's engine.

    Args:
        resume: checkpoint that the run would resume from; it has the date for the chat template.
    """
    config, launch = plan.config, Launch.from_environment()
    plan = plan_with_plugins(kind, config, launch, overwrite, plan)
    return RunContext(plan, launch, bootstrap(config), resume)


def check_model(context: RunContext[AnyConfig], data: RunData[AnyConfig], overwrite: bool) -> None:
    """Check what can be checked up to the point where ranks communicate and the model is built. Writes nothing."""
    from megascend.backends import check_backend
    from megascend.training.lora.registry import check_targets
    from megascend.training.lora.target_modules import matches

    plan, config = context.plan, data.config
    # The constructor's checks, without process groups and weights.
    settings = backend_settings(data.model_config)
    targets = check_backend(config.engine, context.runtime, plan.topology, plan.info, config.model, **settings)
    # An external engine does not name its layers: it checks targets itself when the run starts.
    if config.lora is not None and targets:
        check_targets(ADAPTER, config.lora, [name for name in targets if matches(name, config.lora.targets)])
    if config.lora is None and (config.export or config.checkpoint.hf):
        from megascend.engines.common.export import check_export_files

        check_export_files(
            config.model, config.output / "hf", TORCH_NAMES[config.precision], plan.info, replaces=overwrite
        )
    elif config.lora is not None and config.export:
        check_adapter_path(config.output / "adapter", overwrite)


def resources(context: RunContext[AnyConfig], config: AnyConfig, workload: Workload) -> dict[str, Any]:
    """Return the attributes of :class:`DryRun`."""
    plan, runtime = context.plan, context.runtime
    full = config.model_copy(update={"recompute": config.recompute.model_copy(update={"granularity": "full"})})
    return {
        "config": config,
        "platform": runtime.platform.name,
        "topology": plan.topology,
        "info": plan.info,
        "free_disk": free_bytes(config.output),
        "disk_warning": disk_warning(config, plan.info),
        "memory": memory_of(context, config, workload),
        "recomputed": None if config.recompute.granularity == "full" else memory_of(context, full, workload),
        "device_memory": memory_per_rank(runtime, plan.world_size),
    }


def memory_of(context: RunContext[AnyConfig], config: AnyConfig, workload: Workload) -> Estimate | None:
    plan, kernels = context.plan, "plain" if context.runtime.platform.name == "cpu" else "fused"
    return estimate(config, plan.info, read_config(config.model), plan.topology, workload, kernels)


def dry_run_rl(plan: RunPlan[RlConfig], overwrite: bool = False, resume: str | Path | None = None) -> RlDryRun:
    """Check what can be known of a run of ``rl`` in one process. Writes nothing.

    One episode runs with a canned response, and engines are asked for their versions; nothing about them changes.
    """
    kind = ReinforcementLearning()
    context = start(kind, plan, overwrite, resume)
    data = kind.read(context)
    check_model(context, data, overwrite)
    plan, config, prompts, rollout = context.plan, data.config, data.prompts, data.config.rollout
    lengths, budget = sorted(prompts.lengths), config.batching.budget
    # An environment may fill the whole length with further turns; a plain response is at most max_tokens.
    longest = min(budget, plan.limits.length)
    if rollout.environment is None:
        longest = min(longest, lengths[-1] + rollout.max_tokens)
    share = -(-rollout.prompts_per_step * rollout.group_size // plan.topology.data)
    teacher = teacher_sizes(config, plan.info)
    workload = Workload(budget, 2, config.batching.packing, longest, share * longest, teacher)
    return RlDryRun(
        **resources(context, config, workload),
        prompts=len(prompts.train),
        held_out=len(prompts.held_out),
        prompt_lengths=(lengths[0], lengths[len(lengths) // 2], lengths[-1]),
        trial=try_episode(config, data.episodes(), data.tokenizer, *prompts.train[0]),
        engines=ask_engines(config),
        teacher=describe_teacher(config),
        engines_share=share_beside_trainer(placements(config, context.launch), sleep=config.placement.sleep),
        processes=local_processes(config, plan.info),
    )


def local_processes(config: RlConfig, info: ModelInfo) -> dict[str, int]:
    """Return the bytes of weights in other processes on rank 0's host: of engines, and of a teacher."""
    width, processes = ELEMENT_BYTES[config.precision], {}
    for name, count in Counter(config.engines).items() if config.rollout.controller is None else ():
        if copies := inference_engine(name).copies:
            engines = f"{name} engine" if count == 1 else f"{count} {name} engines"
            processes[engines] = copies * count * width * info.parameter_count
    if config.teacher is not None and config.teacher.engine == LOCAL and config.teacher.model is not None:
        processes["the teacher"] = width * inspect_checkpoint(config.teacher.model).parameter_count
    return processes


def memory_per_rank(runtime: Runtime, world_size: int) -> int:
    """Return the bytes of a device. On a CPU all ranks share this machine's memory."""
    return runtime.platform.memory().total // (world_size if runtime.platform.name == "cpu" else 1)


def dry_run(plan: RunPlan[RunConfig], overwrite: bool = False, resume: str | Path | None = None) -> SupervisedDryRun:
    """Check what can be known of a run of ``train`` in one process.

    Writes nothing but the samples in the cache folder, where the run finds them.
    """
    kind = SupervisedRun()
    context = start(kind, plan, overwrite, resume)
    data = kind.read(context)
    check_model(context, data, overwrite)
    plan, runtime, config = context.plan, context.runtime, data.config
    topology, layout = plan.topology, plan.layout
    samples, objective = data.samples, data.objective
    mixture = samples.mixture(config, samples.batches(config, objective))
    if isinstance(samples, StreamedSamples):
        samples = RunSamples(samples.train, samples.held_out, samples.longest, samples.remarks)  # as if they were all
    first = objective.members(next(samples.unit_batches(config, objective)))
    longest, teacher = samples.longest_unit(layout), teacher_sizes(config, plan.info)

    def fits(tokens: int) -> bool:
        need = memory_of(context, config, Workload(tokens, micro_batches=2, longest=longest, teacher=teacher))
        # None: an engine from another package, of whose memory nothing is known.
        return need is None or need.tensors <= MEMORY_SHARE * memory_per_rank(runtime, plan.world_size)

    budget = config.batching.micro_batch_tokens
    # A dry run measures nothing: the estimate takes the place of trials.
    if budget == AUTO:
        budget = largest_fitting(longest, largest_useful(config, samples, layout, topology), fits)
    steps = plan_steps(config, samples, objective, layout, topology, budget)
    workload = Workload(steps.tokens, steps.micro_batches, steps.packed, longest, steps.most_tokens, teacher)

    def decode(ids: Sequence[int]) -> str:
        return str(plan.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def example(index: int, pair: int | None) -> ShownSample:
        sample = samples.train[index]
        name = f"sample {index // samples.train.members + 1}"
        if plan.limits.labels is not None:
            name = f"{name}, {plan.limits.labels.describe(sample.label)}"
        elif sample.label is not None:
            name = f"{name}, {'desirable' if sample.label else 'undesirable'}"
        if pair is not None:
            name = f"pair {pair + 1}, {'chosen' if sample.chosen else 'rejected'}"
        return ShownSample(name, len(sample), pieces(sample, decode, scored=samples.train.scored))

    return SupervisedDryRun(
        **resources(context, config, workload),
        train=SampleStatistics.of(samples.train),
        held_out=None if samples.held_out is None else SampleStatistics.of(samples.held_out),
        sources=samples.source_statistics(config),
        remarks=(*samples.remarks, *mixture),
        epochs=None
        if config.data.streaming
        else config.steps * config.data.global_batch_size / objective.units(samples.train),
        steps=steps,
        examples=[example(index, pair) for index, pair in first[: EXAMPLES * (2 if samples.train.has_pairs else 1)]],
        suggestion=suggested(
            config.model_copy(update={"batching": config.batching.with_budget(budget)}), runtime, plan, longest
        ),
    )


def suggested(config: RunConfig, runtime: Runtime, plan: RunPlan[RunConfig], longest: int) -> Suggestion | None:
    """Return a layout that is predicted to be faster on this machine's devices, if these are described.

    Args:
        longest: tokens of the longest sample, which all are taken to have.
    """
    kind = runtime.platform.device_type
    if kind == "cpu":
        return None
    import torch

    hardware = matching(getattr(torch, kind).get_device_name(0))
    return None if hardware is None else suggestion(config, plan.info, plan.topology, longest, hardware)


@dataclass(frozen=True)
class StepPlan:
    """Micro batches of a run's first steps.

    Attributes:
        budget: most tokens of a micro batch.
        micro_batches: most that a data parallel rank has in a step.
        tokens: tokens in the largest micro batch, padding included, over all context parallel ranks.
        most_tokens: most tokens that a data parallel rank has in a step, without padding.
        padding: share of tokens that are padding.
        packed: some micro batch has samples of different length one after the other.
        idle: True if some rank has no sample in some step.
    """

    steps: int
    budget: int
    micro_batches: int
    tokens: int
    most_tokens: int
    padding: float
    packed: bool
    idle: bool


def plan_steps(
    config: RunConfig,
    samples: RunSamples,
    objective: LearningObjective,
    layout: SequenceLayout,
    topology: Topology,
    budget: int,
) -> StepPlan:
    """Plan the first :data:`PLANNED` steps, from the lengths of samples alone.

    Args:
        budget: most tokens of a micro batch.
    """
    lengths = samples.train.lengths.tolist()
    steps = min(config.steps, PLANNED)
    micro_batches = largest = peak_tokens = total = padded = 0
    idle = packed = False
    # The run's own stream: these are its very batches.
    for batch in islice(samples.unit_batches(config, objective), steps):
        members = objective.members(batch)
        batch_lengths = [lengths[index] for index, _ in members]
        pairs = [pair for _, pair in members]
        for share in shard(batch_lengths, pairs, topology.data):
            planned = _micro_batches([batch_lengths[i] for i in share], [pairs[i] for i in share], layout, budget)
            micro_batches, idle = max(micro_batches, len(planned)), idle or not planned
            for tokens, uneven in planned:
                packed |= layout.packing and uneven
                largest, padded = max(largest, tokens), padded + tokens
            tokens_of_rank = sum(batch_lengths[i] for i in share)
            peak_tokens, total = max(peak_tokens, tokens_of_rank), total + tokens_of_rank
    return StepPlan(steps, budget, micro_batches, largest, peak_tokens, 1 - total / padded, packed, idle)


def _micro_batches(
    lengths: Sequence[int], pairs: Sequence[int | None], layout: SequenceLayout, budget: int
) -> list[tuple[int, bool]]:
    """Return the tokens of each micro batch of one rank, and whether its samples differ in length."""
    padded = [layout.padded_length(length) for length in lengths]
    planned = []
    for members in plan_micro_batches(padded, pairs, budget, layout.packing):
        tokens, rows = sum(padded[i] for i in members), max(padded[i] for i in members) * len(members)
        planned.append((tokens if layout.packing else rows, tokens < rows))
    return planned
