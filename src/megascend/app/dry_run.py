"""What ``megascend train --dry-run`` finds out: a run as far as it goes without a process group, a model or a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megascend.app.disk_room import disk_warning, free_bytes
from megascend.app.generation import Answering
from megascend.app.objectives import make_objective
from megascend.app.run import backend_settings, bootstrap, load_tokenizer, with_template_date
from megascend.app.run_samples import RunSamples
from megascend.app.sample_limits import sample_limits, sequence_layout
from megascend.app.step_plan import StepPlan, plan_steps
from megascend.app.token_budget import AUTO, SHARE, check_platform, largest_useful, predicted
from megascend.batch.sample import Sample
from megascend.config import RunConfig
from megascend.config.plugins import import_plugins
from megascend.data.prepare import set_template
from megascend.data.preview import SamplePiece, SampleStatistics, pieces
from megascend.distributed.launch import Launch
from megascend.huggingface.files import read_config
from megascend.huggingface.info import ModelInfo, inspect_checkpoint
from megascend.memory.estimate import Estimate, estimate
from megascend.memory.sizes import Kernels, Workload
from megascend.platforms.base import Platform
from megascend.topology.topology import Topology, plan

SHOWN = 3
"""Samples that are shown, or pairs of them."""


@dataclass(frozen=True)
class ShownSample:
    """A sample of the first step.

    Attributes:
        name: what it is called, ``sample 7``.
    """

    name: str
    pieces: list[SamplePiece]


@dataclass(frozen=True)
class DryRun:
    """What is known of a run that has not begun.

    Attributes:
        config: with the steps that ``epochs`` comes to.
        platform: the one that the run would use.
        learned, held_out: statistics of the samples; the latter None without a validation set.
        remarks: what was left out of the data, cut or not read.
        epochs: how often the steps go through the data.
        shown: the first samples of the first step.
        free_disk: bytes, where the output is to be.
        disk_warning: None if there is room for what the run will write.
        memory: what a rank will need; None for an engine from outside.
        recomputed: the same with recompute.granularity: full; None where that is set, or cannot be.
        device_memory: bytes of one device; on a CPU, this machine's for each rank.
    """

    config: RunConfig
    platform: str
    topology: Topology
    info: ModelInfo
    learned: SampleStatistics
    held_out: SampleStatistics | None
    remarks: tuple[str, ...]
    epochs: float
    steps: StepPlan
    shown: list[ShownSample]
    free_disk: int
    disk_warning: str | None
    memory: Estimate | None
    recomputed: Estimate | None
    device_memory: int


def dry_run(config: RunConfig, world_size: int, resume: str | Path | None = None) -> DryRun:
    """Check what can be known of a run in one process, as the first of ``world_size`` ranks would begin it.

    Prepares this process for the run's engine. Writes nothing but the samples in the cache folder, where the run finds them.

    Args:
        resume: what the run would resume from, which says the date that its chat template is given.

    Raises:
        MegascendError: what the ranks would raise before they meet.
    """
    from megascend.backends import check_backend

    import_plugins(config.plugins)
    runtime = bootstrap(config)
    info = inspect_checkpoint(config.model)
    topology = plan(config.parallel, world_size, info.shape)
    check_platform(config, runtime.platform)
    check_backend(config.engine, runtime, topology, config.model, **backend_settings(config))

    tokenizer = load_tokenizer(config.model)
    limits = sample_limits(config, world_size)
    set_template(config.data, tokenizer)
    config = with_template_date(config, tokenizer, resume, Launch.from_environment())
    samples = RunSamples.prepare(config, tokenizer, limits)
    if config.generation is not None:
        Answering.prepare(config.generation, config.data, tokenizer, limits, config.model, config.template_date)
    objective = make_objective(config, samples.learned)
    units = objective.units(samples.learned)
    config = config.of_length(units)
    first = objective.members(next(samples.batches(config, objective)))
    layout, hf_config, kernels = (
        sequence_layout(config, topology),
        read_config(config.model),
        kernels_of(runtime.platform),
    )
    device_memory = runtime.platform.memory().total // (world_size if runtime.platform.name == "cpu" else 1)

    longest = samples.longest_unit(layout)

    def fits(tokens: int) -> bool:
        workload = Workload(tokens, micro_batches=2, longest=longest)
        found = estimate(config, info, hf_config, topology, workload, kernels)
        return found is None or found.tensors <= SHARE * device_memory

    budget = config.batching.micro_batch_tokens
    if budget == AUTO:
        largest = largest_useful(config, samples, layout, topology)
        budget = predicted(longest, largest, fits)
    steps = plan_steps(config, samples, objective, layout, topology, budget)

    def memory(of: RunConfig) -> Estimate | None:
        workload = Workload(steps.tokens, steps.micro_batches, steps.packed, longest)
        return estimate(of, info, hf_config, topology, workload, kernels)

    recompute = config.recompute.model_copy(update={"granularity": "full"})
    recomputed = config.model_copy(update={"recompute": recompute})

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def shown(index: int, pair: int | None) -> ShownSample:
        sample: Sample = samples.learned[index]
        side = "chosen" if sample.chosen else "rejected"
        name = f"sample {index + 1}" if pair is None else f"pair {pair + 1}, {side}"
        return ShownSample(name, pieces(sample, decode))

    return DryRun(
        config=config,
        platform=runtime.platform.name,
        topology=topology,
        info=info,
        learned=SampleStatistics.of(samples.learned),
        held_out=None if samples.held_out is None else SampleStatistics.of(samples.held_out),
        remarks=samples.remarks,
        epochs=config.steps * config.data.global_batch_size / units,
        steps=steps,
        shown=[shown(index, pair) for index, pair in first[: SHOWN * (2 if samples.learned.has_pairs else 1)]],
        free_disk=free_bytes(config.output),
        disk_warning=disk_warning(config),
        memory=memory(config),
        recomputed=None if config.recompute.granularity == "full" else memory(recomputed),
        device_memory=device_memory,
    )


def kernels_of(platform: Platform) -> Kernels:
    """What computes on a platform. Of NPUs' own kernels nothing was measured; they are taken to keep what CUDA's do."""
    return "plain" if platform.name == "cpu" else "fused"
