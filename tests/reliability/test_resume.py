"""A run that is killed at a random point and resumed ends with equal losses and weights, bit for bit.

MEGASCEND_RESUME_SEEDS: number of kills per layout (default 3; 20 before a release).
"""

import functools
import gc
import json
import os
import random
from typing import Any

import pytest

from megascend import Adam, Adapters, Batching, Lora, Sample, Schedule
from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint
from megascend.apps.train import loop
from megascend.apps.train.resume import checkpoints_at
from megascend.config import RunConfig
from megascend.errors import DistributedTestError
from megascend.testing import faults, run_distributed
from megascend.testing.parity import case_checkpoint, token_lists

pytestmark = pytest.mark.usefixtures("megatron_imported")

SEEDS = range(int(os.environ.get("MEGASCEND_RESUME_SEEDS", "3")))
STEPS, EVERY = 8, 2
PHASES = ("forward and backward", "forward", "object gather", "grad reduce", "update", "save", "write")
LAYOUTS = {
    "single": (1, {}, "qwen3"),
    "TP2": (2, {"tensor": 2}, "qwen3"),
    "PP2": (2, {"pipeline": 2}, "qwen3"),
    "DP2": (2, {}, "qwen3"),
    "MoE EP2": (2, {"expert": 2}, "qwen3_moe"),
}
IN_CI = {"single": 8, "tenants": 2}
"""Seeds that die after a checkpoint, so that a run resumes. Others are covered by them and, for their layouts, by
training/checkpoint/test_save_and_load.py."""


def seeds(layout: str) -> list[Any]:
    chosen = IN_CI.get(layout)
    return [
        pytest.param(seed, marks=[] if seed == chosen else [pytest.mark.nightly])
        for seed in sorted({*SEEDS, *([] if chosen is None else [chosen])})
    ]


KILLS = [pytest.param(layout, *seed.values, marks=seed.marks) for layout in LAYOUTS for seed in seeds(layout)]
TEXTS = ["one two three", "red and blue", "up", "left or right, as ever", "a b c d e f", "to be continued", "seven"]


def random_fault(seed: int, layout: str, world_size: int) -> faults.Fault:
    """Draw a kill at a random phase and step. Saving begins after the step is counted, so it belongs to the next step."""
    draw = random.Random(f"{seed}/{layout}")
    phase = draw.choice(PHASES)
    steps = range(EVERY + 1, STEPS, EVERY) if phase in ("save", "write") else range(1, STEPS + 1)
    return faults.Fault("die", rank=draw.randrange(world_size), phase=phase, step=draw.choice(steps))


def killed(function, world_size: int, fault: faults.Fault) -> None:
    with faults.inject(fault), pytest.raises(DistributedTestError, match="signal 9"):
        run_distributed(function, world_size, init=False, timeout_s=180)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for arch in ("qwen3", "qwen3_moe"):
        write_checkpoint(folder / arch, ModelSize(arch, hidden=32, layers=2, context=64))
    return folder


def config(models, layout: str, output) -> RunConfig:
    _, parallel, arch = LAYOUTS[layout]
    return RunConfig(
        model=models / arch,
        output=output,
        data={"path": models / "texts.jsonl", "global_batch_size": 4},
        steps=STEPS,
        platform="cpu",
        precision="fp32",
        parallel=parallel,
        optimizer={"lr": 1e-2},
        schedule={"kind": "cosine", "warmup_steps": 2, "total_steps": STEPS},
        checkpoint={"every": EVERY},
        plot=False,
        self_check=False,
        timeout_s=20,
    )


def outcome(result, output):
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    weights = {file.name: file.read_bytes() for file in sorted((output / "hf").glob("*.safetensors"))}
    return (
        result.totals.loss,
        [(row["step"], row["loss"], row["grad_norm"], row["lr"], row["epoch"]) for row in rows],
        weights,
    )


@pytest.fixture(scope="module")
def uninterrupted(models):
    """Return a function that gives the outcome of a layout's uninterrupted run."""
    from megascend.apps.train.train import train

    @functools.cache
    def run(layout):
        output = models / f"whole-{layout}"
        settings = config(models, layout, output)
        result = run_distributed(lambda: train(settings), LAYOUTS[layout][0], init=False, timeout_s=90)[0]
        expected = outcome(result, output)
        assert len(expected[1]) == STEPS
        return expected

    return run


@pytest.mark.parametrize(("layout", "seed"), KILLS)
def test_killed_run_resumes_bit_for_bit(models, uninterrupted, tmp_path, layout, seed):
    from megascend.apps.train.train import train

    world_size, output = LAYOUTS[layout][0], tmp_path / "run"
    settings = config(models, layout, output)
    killed(lambda: train(settings), world_size, random_fault(seed, layout, world_size))
    assert checkpoints_at(output) or seed != IN_CI.get(layout)
    options: dict[str, Any] = {"resume": "auto"} if checkpoints_at(output) else {"overwrite": True}
    (result, *_) = run_distributed(lambda: train(settings, **options), world_size, init=False, timeout_s=90)
    assert outcome(result, output) == uninterrupted(layout)


def test_modules_are_frozen_for_garbage_collection_during_the_run(models, tmp_path):
    from megascend.apps.train.train import train

    def work():
        gc.unfreeze()  # what the parent's process holds
        make_backend, counts = loop.make_backend, [gc.get_freeze_count()]
        loop.make_backend = lambda config: counts.append(gc.get_freeze_count()) or make_backend(config)
        train(config(models, "single", tmp_path / "run").model_copy(update={"steps": 2}))
        return [*counts, gc.get_freeze_count()]

    ((before, during, afterwards),) = run_distributed(work, 1, init=False, timeout_s=180)
    assert during > 100_000
    assert before < loop.FROZEN_BY_PYTHON
    assert afterwards == 0


def test_objects_that_the_caller_has_frozen_stay_frozen(models, tmp_path):
    from megascend.apps.train.train import train

    def work():
        before = gc.get_freeze_count()
        train(config(models, "single", tmp_path / "run").model_copy(update={"steps": 2}))
        return before, gc.get_freeze_count()

    ((before, afterwards),) = run_distributed(work, 1, init=False, timeout_s=180)
    assert afterwards > before > 100_000


# --- two tenants, with the Python API ---


def tenants(checkpoint, folder, results):
    """Train two adapters on mixed batches from the newest checkpoint in ``folder``, and save them in ``results``."""
    from megascend.backends import MegatronBackend
    from megascend.training.checkpoint.retention import Retention

    retention = Retention(folder)
    with MegatronBackend(
        model=checkpoint,
        precision="fp32",
        optimizer=Adam(lr=1e-2),
        batching=Batching(micro_batch_tokens=64),
        adapters=Adapters(),
        timeout_s=20,
    ) as backend:
        candidates = backend.from_rank_0(retention.candidates)
        if candidates:
            backend.load(candidates[0])
        else:
            backend.add_adapter("a", Lora(rank=4, dropout=0.1, seed=1))
            schedule = Schedule(kind="linear", total_steps=STEPS)
            backend.add_adapter("b", Lora(rank=8, targets=("q_proj", "down_proj"), seed=2, schedule=schedule))
        figures = []
        while backend.step_count < STEPS:
            draw = random.Random(backend.step_count)
            chosen = draw.sample(token_lists(), 6)
            samples = [causal(ids, name) for ids, name in zip(chosen, "ababab", strict=True)]
            result = backend.forward_backward(backend.shard(samples))
            step = backend.optimizer_step()
            figures.append({name: (result.adapters[name].loss, step.adapters[name].grad_norm) for name in "ab"})
            if backend.step_count % EVERY == 0:
                backend.save(retention.path(backend.step_count), after=retention.committed)
        for name in "ab":
            backend.save_adapter(name, results / name)
    return figures


def causal(ids, adapter):
    sample = Sample.causal(ids, prompt_length=3)
    sample.adapter = adapter
    return sample


@pytest.fixture(scope="module")
def uninterrupted_tenants(parity_folder, tmp_path_factory):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    folder = tmp_path_factory.mktemp("tenants")
    figures = run_distributed(tenants, 2, checkpoint, folder / "checkpoints", folder, init=False, timeout_s=180)[0]
    assert len(figures) == STEPS
    return checkpoint, figures, adapter_files(folder)


def adapter_files(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes() for name in "ab" for file in sorted((folder / name).iterdir())
    }


@pytest.mark.parametrize("seed", seeds("tenants"))
def test_two_tenants_resume_bit_for_bit(uninterrupted_tenants, tmp_path, seed):
    checkpoint, figures, files = uninterrupted_tenants
    checkpoints = tmp_path / "checkpoints"
    killed(lambda: tenants(checkpoint, checkpoints, tmp_path), 2, random_fault(seed, "tenants", 2))
    rest = run_distributed(tenants, 2, checkpoint, checkpoints, tmp_path, init=False, timeout_s=180)[0]
    assert rest == figures[STEPS - len(rest) :]
    assert len(rest) < STEPS or seed != IN_CI["tenants"]
    assert adapter_files(tmp_path) == files
