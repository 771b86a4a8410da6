"""``batching.micro_batch_tokens: auto``: measure the token budget of micro batches when a run starts, and keep it for the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megascend.apps.data.store import Samples
from megascend.apps.plan.search import MEMORY_SHARE
from megascend.config import RunConfig
from megascend.engines.common.checkpoints import engine_state, random_state, set_random_state
from megascend.errors import ConfigError
from megascend.training.batch.micro_batch import SequenceLayout
from megascend.training.batch.sample import Sample

if TYPE_CHECKING:
    from megascend.apps.train.event_log import EventLog
    from megascend.apps.train.objectives import LearningObjective
    from megascend.apps.train.run_samples import RunSamples
    from megascend.backend import Backend
    from megascend.runtime.platforms.base import Platform
    from megascend.runtime.topology.topology import Topology

AUTO = "auto"
FIRST_BUDGET = 4096
"""Tokens of the first trial, and of micro batches before the budget is known."""
BUDGET_MULTIPLE = 256
"""Budgets are multiples of this, except for the smallest."""
MIN_GAIN = 1.1
"""Smallest factor by which a further trial must be expected to increase the tokens."""
MAX_TRIALS = 6
PIPELINE_FILL = 4
"""Micro batches for each pipeline stage that a step should have; fewer leave stages idle."""


def with_first_budget(config: RunConfig, longest_unit: int) -> RunConfig:
    """Replace ``auto`` by the budget of the first trial, or by the tokens of the longest sample or pair if these are more."""
    if config.batching.micro_batch_tokens != AUTO:
        return config
    tokens = max(FIRST_BUDGET, longest_unit)
    return config.model_copy(update={"batching": config.batching.with_budget(tokens)})


def apply_budget(
    config: RunConfig,
    backend: Backend,
    samples: RunSamples,
    objective: LearningObjective,
    adapter: str | None,
    saved: dict[str, Any] | None,
    event_log: EventLog,
) -> dict[str, Any]:
    """Set the backend's budget: the checkpoint's if it was measured on this layout, else one that is measured now.

    Collective; without effect if the run file has a number.

    Args:
        saved: what this returned in the run whose checkpoint is resumed, or None.

    Returns:
        What a checkpoint stores of the budget; JSON.
    """
    if config.batching.micro_batch_tokens != AUTO:
        return {}
    layout = _describe_layout(config, backend)
    # The same micro batches as before: with another budget sums would have another order.
    if saved and saved["layout"] == layout:
        tokens, origin = int(saved["micro_batch_tokens"]), "kept from the checkpoint"
    else:
        tokens, origin = measure_budget(config, backend, samples, objective, adapter)
    backend.set_micro_batch_tokens(tokens)
    event_log.event("micro_batch_tokens", found=tokens)
    if backend.rank == 0:
        print(f"batching.micro_batch_tokens: auto is {tokens}, {origin}", flush=True)
    return {"micro_batch_tokens": tokens, "layout": layout}


def _describe_layout(config: RunConfig, backend: Backend) -> str:
    """Describe the settings, other than the model, that a step's memory depends on."""
    recompute, distillation = config.recompute.model_dump_json(), config.distillation
    teacher = "" if distillation is None else f"; {distillation.model_dump_json()}"
    return f"{backend.topology.describe()}; {config.engine} on {backend.platform.name}, {config.precision}; {recompute}{teacher}"


def check_platform(config: RunConfig, platform: Platform) -> None:
    """Raise ConfigError for ``auto`` on a platform that does not report peaks."""
    if config.batching.micro_batch_tokens == AUTO and not platform.reports_peak_memory:
        raise ConfigError(
            f"batching.micro_batch_tokens: auto measures peaks of device memory, which platform {platform.name} does not report: "
            "set a number, for example 4096"
        )


def measure_budget(
    config: RunConfig, backend: Backend, samples: RunSamples, objective: LearningObjective, adapter: str | None
) -> tuple[int, str]:
    """Return the largest budget that fits, and a note on its measurement. Collective; does not change training state."""
    platform, engine = backend.platform, backend.engine
    # A run that measures must draw the same dropout as one with the budget in its file.
    random_streams = random_state(engine)
    engine_state(engine, loading=False)  # makes the optimizer's moments, which are there from the first step on
    available = platform.usable_memory()
    layout = engine.layout
    smallest = samples.longest_unit(layout)
    search = BudgetSearch(
        smallest,
        largest_useful(config, samples, layout, backend.topology),
        limit=MEMORY_SHARE * available,
        before=platform.memory().allocated,
    )
    proposal: int | None = search.first(FIRST_BUDGET)
    while proposal is not None:
        # All ranks try the same budget, and agree on whether it fits.
        peak = trial_peak(backend, samples.train, objective, proposal, adapter)
        fits = not backend.any_rank(peak > search.limit)[0]
        search.add(proposal, peak, fits)
        tokens = search.next()
        # The smallest of all proposals: ranks need different amounts of memory, in particular as pipeline stages.
        agreed = int(backend.smallest(0 if tokens is None else tokens)[0])
        proposal = agreed or None  # 0: some rank needs no further trial
    set_random_state(engine, random_streams)
    platform.free_cached_memory()
    if search.best is None:
        raise ConfigError(
            f"batching.micro_batch_tokens: auto: the longest sample, {smallest} tokens, does not fit into memory on some rank "
            f"({search.limit / 2**30:.1f} GiB here): set batching.max_length lower"
        )
    peak = dict(search.fitted)[search.best]
    trials = len(search.fitted) + len(search.failed)
    memory = f"peak {peak / 2**30:.2f} of {available / 2**30:.2f} GiB on rank 0"
    origin = f"measured in {trials} trial{'s' if trials > 1 else ''}: {memory}"
    return search.best, origin


def largest_useful(config: RunConfig, samples: RunSamples, layout: SequenceLayout, topology: Topology) -> int:
    """Return the tokens of a data parallel rank's largest useful micro batch: a whole step's, or fewer to keep stages busy."""
    lengths = np.sort(samples.train.lengths)[::-1]
    sides = 2 if samples.train.has_pairs else 1
    # More would change nothing: a micro batch never holds more than a data parallel rank has in a step.
    samples_of_step = -(-config.data.global_batch_size * sides // topology.data)
    tokens = sum(layout.padded_length(int(length)) for length in lengths[:samples_of_step])
    if topology.pipeline > 1:
        # Fewer, larger micro batches leave stages idle at the start and the end of a step.
        tokens //= PIPELINE_FILL * topology.pipeline
    return max(tokens, samples.longest_unit(layout))


def largest_fitting(smallest: int, largest: int, fits: Callable[[int], bool]) -> int:
    """Search for the largest budget that ``fits``, which must be monotonic; ``smallest`` if none does. Pure."""
    while largest > smallest:
        middle = max(smallest + 1, (smallest + largest + 1) // 2 // BUDGET_MULTIPLE * BUDGET_MULTIPLE)
        if fits(middle):
            smallest = middle
        else:
            largest = middle - 1
        if largest - smallest < BUDGET_MULTIPLE:
            break
    return smallest


def trial_peak(
    backend: Backend, samples: Samples, objective: LearningObjective, tokens: int, adapter: str | None
) -> float:
    """Measure the peak memory of this rank, in bytes, of a forward and a backward pass of full micro batches."""
    backend.set_micro_batch_tokens(tokens)
    # Two, so that one's gradients are in memory while the next is computed; a pipeline holds as many as it has stages.
    count = 2 * backend.topology.pipeline
    batch = [sample for _ in range(count) for sample in longest_samples(samples, tokens, backend)]
    backend.platform.free_cached_memory()
    backend.platform.reset_peak_memory()
    try:
        completed, loss = objective.trial(backend, batch)
        backend.try_step(completed, adapter, loss)
    except torch.OutOfMemoryError:
        if backend.world_size > 1:
            raise  # the others are in a collective
        backend.engine.trainable.abandon()
        return math.inf
    # The call returns when kernels are queued, and the peak covers only those that have run.
    backend.platform.synchronize()
    return float(backend.platform.memory().peak)


def longest_samples(samples: Samples, tokens: int, backend: Backend) -> list[Sample]:
    """Fill a micro batch of ``tokens`` with the longest of ``samples``, repeated if there are too few; cut the last one."""
    layout, batch, remaining = backend.engine.layout, [], tokens
    # The longest first: attention and the output head take most memory for them.
    longest_first = np.argsort(-samples.lengths, kind="stable")
    if not layout.packing:  # all are padded to the longest
        padded = layout.padded_length(int(samples.lengths.max()))
        longest_first, remaining = longest_first[:1], remaining // padded * padded
    while remaining >= layout.padded_length(1):
        sample = samples[int(longest_first[len(batch) % len(longest_first)])]
        length = min(len(sample), remaining // layout.padded_length(1) * layout.padded_length(1))
        batch.append(
            Sample(sample.input_ids[:length], sample.target_ids[:length], torch.ones(length, dtype=torch.float32))
        )
        remaining -= layout.padded_length(length)
    return batch


@dataclass
class BudgetSearch:
    """One rank's view of the search; ranks agree on each trial and on whether it fitted.

    Peaks grow linearly with the tokens of a micro batch, from a constant that is at least the memory in use before. A line from
    that memory through the first trial therefore never promises too many tokens. Later trials are extrapolated from the last two
    that fitted.

    Attributes:
        smallest: lower bound: tokens of the longest sample (or pair) with its padding.
        largest: upper bound: tokens that a step can use.
        before: bytes in use without a step.
    """

    smallest: int
    largest: int
    limit: float
    before: float
    fitted: list[tuple[int, float]] = field(default_factory=list)
    failed: list[tuple[int, float]] = field(default_factory=list)

    def first(self, usual: int) -> int:
        """Return the first budget to try: ``usual`` tokens, unless samples are longer or steps smaller."""
        return max(self.smallest, min(usual, self.largest))

    def add(self, tokens: int, peak: float, fits: bool) -> None:
        """Record the peak of a trial (infinite if memory ran out), and whether it fitted on all ranks."""
        (self.fitted if fits else self.failed).append((tokens, peak))

    def next(self) -> int | None:
        """Return the next budget that this rank would try; None if it needs no further trial."""
        if len(self.fitted) + len(self.failed) >= MAX_TRIALS:
            return None
        # Nothing has fitted: interpolate between no step and the smallest that failed.
        if not self.fitted:
            smallest_failed, peak = min(self.failed)
            share = (self.limit - self.before) / (peak - self.before)
            return (
                None if smallest_failed <= self.smallest else self._rounded(smallest_failed * max(0.0, min(share, 0.9)))
            )
        (before, peak_before), (tokens, peak) = ((0, self.before), *self.fitted)[-2:]
        slope = (peak - peak_before) / (tokens - before)
        reach = self.largest
        # A peak may not grow at all while a fixed buffer is larger than the activations.
        if slope > 0:
            reach = min(reach, self._rounded(tokens + (self.limit - peak) / slope))
        if self.failed:
            reach = min(reach, self._rounded((tokens + min(self.failed)[0]) / 2))
        return reach if reach >= MIN_GAIN * tokens or (reach == self.largest > tokens) else None

    @property
    def best(self) -> int | None:
        """The largest that fitted; None: nothing did."""
        return max((tokens for tokens, _ in self.fitted), default=None)

    def _rounded(self, tokens: float) -> int:
        return max(self.smallest, int(tokens) // BUDGET_MULTIPLE * BUDGET_MULTIPLE)
