"""Section ``speed``: how long a step takes, and how much memory; recorded, since no card has been measured yet.

``torchrun -m npu_acceptance.speed JOB`` is one rank, which trains a few steps and takes the time.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megascend
from megascend.apps.cli.random_checkpoint import ModelSize, write_checkpoint
from npu_acceptance.plan import Settings, largest_power_of_two
from npu_acceptance.processes import read_job, run_ranks
from npu_acceptance.records import Measurement, Results, at_most, failed, noted

LIMIT_S = 400.0
MIB, TERA = 2**20, 1e12


@dataclass(frozen=True)
class Load:
    """Model and batch of a step.

    Attributes:
        model: size of the random model.
        samples, length: of one data parallel rank in one step, in tokens.
        warm_up, steps: number of untimed and timed steps.
    """

    model: ModelSize
    samples: int
    length: int
    warm_up: int
    steps: int


ON_CARDS = Load(
    ModelSize(arch="qwen3", hidden=1024, layers=8, heads=16, kv_heads=8, ffn=3072, context=2048, vocab=32_000),
    samples=4,
    length=2048,
    warm_up=3,
    steps=10,
)
SIMULATED = Load(ModelSize(arch="qwen3", hidden=64, layers=2, heads=4, kv_heads=2, context=128), 2, 128, 1, 3)


def layouts(cards: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return ranks and layout by name."""
    ranks = largest_power_of_two(cards)
    options: dict[str, tuple[int, dict[str, Any]]] = {"one card": (1, {})}
    if ranks > 1:
        options[f"DP{ranks}"] = (ranks, {})
        options[f"TP2 + SP x DP{ranks // 2}"] = (ranks, {"tensor": 2, "sequence": True})
    return options


def run(settings: Settings, results: Results) -> None:
    """Train a few steps in each layout."""
    load = SIMULATED if settings.simulated else ON_CARDS
    folder = settings.folder / "speed"
    model = folder / "model"
    if not (model / "config.json").is_file():
        write_checkpoint(model, load.model, seed=1234)
    chosen = layouts(settings.cards)
    for name, (ranks, parallel) in list(chosen.items())[: 1 if settings.quick else None]:
        answer = folder / f"{name.replace(' ', '_')}.json"
        job = {"name": name, "model": str(model), "parallel": parallel, "answer": str(answer)}
        job |= {"samples": load.samples, "length": load.length, "steps": load.warm_up + load.steps}
        limit = LIMIT_S * (2 if settings.simulated else 1)
        outcome = run_ranks(settings, ranks, "speed", job, limit)
        if outcome.code != 0 or not answer.is_file():
            results.add(failed(name, f"{outcome.problem(limit)}: {outcome.last_error}"))
            continue
        results.extend(figures(name, ranks, json.loads(answer.read_text(encoding="utf-8")), load.warm_up))


def figures(name: str, ranks: int, seen: dict[str, Any], warm_up: int) -> list[Measurement]:
    """Return a layout's step time, memory and throughput."""
    milliseconds = 1e3 * statistics.median(seen["seconds"][warm_up:])
    a_second = seen["tokens"] / ranks / (milliseconds / 1e3)
    peak, total = max(seen["peaks"]) / MIB, seen["memory"] / MIB
    return [
        at_most(f"{name}, the loss falls", seen["losses"][-1], seen["losses"][0], note="last loss, under the first"),
        at_most(f"{name}, peak memory of a card", peak, total, "MiB", "the bound is the card's memory"),
        noted(
            f"{name}, median step", milliseconds, "ms", f"{seen['parameters']:,} parameters, {seen['tokens']:,} tokens"
        ),
        noted(f"{name}, speed of a card", a_second, "tokens/s"),
        noted(f"{name}, model FLOPs of a card", a_second * seen["flops_per_token"] / TERA, "TFLOP/s"),
    ]


def run_rank() -> None:
    """Train on one batch repeatedly; rank 0 writes the figures of all ranks."""
    job = read_job()
    parallel = megascend.Parallel(**job["parallel"])
    megascend.bootstrap("npu", parallel)
    import torch

    from megascend.runtime.distributed.objects import gather_objects

    backend = megascend.MegatronBackend(
        model=job["model"],
        parallel=parallel,
        precision="bf16",
        optimizer=megascend.Adam(lr=1e-3),
        batching=megascend.Batching(packing=True, micro_batch_tokens=job["length"]),
        platform="npu",
        timeout_s=120,
    )
    count = job["samples"] * backend.topology.data
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, backend.vocab_size, (count, job["length"]), generator=generator).tolist()
    share = backend.shard([megascend.Sample.causal(sequence) for sequence in ids])
    seconds, losses = [], []
    for _ in range(job["steps"]):
        start = time.perf_counter()
        result = backend.forward_backward(share)
        backend.optimizer_step()
        backend.platform.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(result.loss)
    memory = backend.platform.memory()
    peaks = gather_objects(memory.peak, "world", backend.groups, "peak memory")
    if backend.rank == 0:
        answer = {
            "seconds": seconds,
            "losses": losses,
            "tokens": count * job["length"],
            "peaks": peaks,
            "memory": memory.total,
            "parameters": backend.parameter_count,
            "flops_per_token": backend.flops_per_token(job["length"]),
        }
        Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    backend.close()


if __name__ == "__main__":
    run_rank()
