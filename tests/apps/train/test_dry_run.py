"""Plan of a run's first micro batches, from the lengths of its samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascend import Parallel, Sample
from megascend.apps.data.findings import Findings
from megascend.apps.data.store import Samples, write_store
from megascend.apps.train.dry_run import StepPlan, plan_steps
from megascend.apps.train.objectives import PreferenceObjective, TokenObjective
from megascend.apps.train.run_samples import RunSamples
from megascend.config import RunConfig
from megascend.runtime.topology.topology import plan
from megascend.training.batch.losses import resolve
from megascend.training.batch.micro_batch import SequenceLayout

LENGTHS = (40, 10, 30, 20)


def samples_of(folder: Path, *, pairs: bool = False) -> RunSamples:
    samples = [Sample.causal(range(length + 1)) for length in LENGTHS]
    if pairs:
        for number, sample in enumerate(samples):
            sample.pair, sample.chosen = number // 2, number % 2 == 0
        documents = [(0, samples[:2]), (1, samples[2:])]
    else:
        documents = [(number, [sample]) for number, sample in enumerate(samples)]
    write_store(folder / "store", iter(documents), Findings())
    return RunSamples(Samples.open(folder / "store"), None, max(LENGTHS), ())


def make_plan(samples: RunSamples, budget: int, batch: int = 4, world: int = 2, **layout) -> StepPlan:
    config = RunConfig(model="m", output="o", data={"path": "d", "global_batch_size": batch, "shuffle": False}, steps=3)
    objective = (
        PreferenceObjective(resolve("dpo")) if samples.train.has_pairs else TokenObjective(resolve("cross_entropy"))
    )
    return plan_steps(config, samples, objective, SequenceLayout(**layout), plan(Parallel(), world), budget)


def test_ranks_share_samples_and_fill_the_budget(tmp_path: Path):
    samples = samples_of(tmp_path)
    # 40 and 10 tokens on one rank, 30 and 20 on the other.
    assert make_plan(samples, 64) == StepPlan(3, 64, 1, 50, 50, 0.0, packed=True, idle=False)
    assert make_plan(samples, 40) == StepPlan(3, 40, 2, 40, 50, 0.0, packed=False, idle=False)


def test_padding_fraction_is_reported(tmp_path: Path):
    samples = samples_of(tmp_path)
    step_plan = make_plan(samples, 80, packing=False)
    assert (step_plan.tokens, step_plan.packed) == (80, False)
    assert step_plan.padding == pytest.approx(1 - 100 / (80 + 60))
    multiple = make_plan(samples, 64, context_size=2, world=1)  # every sample is a multiple of four
    assert multiple.tokens == 60  # 40 with 20, 32 with 12
    assert multiple.padding == pytest.approx(1 - 100 / (40 + 12 + 32 + 20))


def test_repeated_pair_counts_twice(tmp_path: Path):
    step_plan = make_plan(samples_of(tmp_path, pairs=True), 64, batch=4)
    assert (step_plan.micro_batches, step_plan.tokens) == (2, 50)
