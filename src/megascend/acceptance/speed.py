"""Section ``speed``: how long a step takes, and how much memory; recorded, since no card has been measured yet."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any

from megascend.acceptance.layouts import largest_power_of_two
from megascend.acceptance.ranks import last_error, run_ranks
from megascend.acceptance.records import Measurement, Results, at_most, failed, noted
from megascend.acceptance.settings import Settings
from megascend.cli.random_checkpoint import ModelSize, write_checkpoint

LIMIT_S = 400.0
MIB, TERA = 2**20, 1e12


@dataclass(frozen=True)
class Load:
    """What a step has to do.

    Attributes:
        model: size of the random model.
        samples, length: of one data parallel rank in one step, in tokens.
        warm_up, steps: steps that are not counted, and that are.
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
    """Ranks and layout by name."""
    all_of_them = largest_power_of_two(cards)
    found: dict[str, tuple[int, dict[str, Any]]] = {"one card": (1, {})}
    if all_of_them > 1:
        found[f"DP{all_of_them}"] = (all_of_them, {})
        found[f"TP2 + SP x DP{all_of_them // 2}"] = (all_of_them, {"tensor": 2, "sequence": True})
    return found


def run(settings: Settings, results: Results) -> None:
    """A few steps in each layout."""
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
        ended = run_ranks(settings, ranks, "megascend.acceptance.speed_ranks", job, limit)
        if ended.code != 0 or not answer.is_file():
            results.add(failed(name, f"{ended.problem(limit)}: {last_error(ended)}"))
            continue
        results.extend(figures(name, ranks, json.loads(answer.read_text(encoding="utf-8")), load.warm_up))


def figures(name: str, ranks: int, seen: dict[str, Any], warm_up: int) -> list[Measurement]:
    """What a layout took."""
    milliseconds = 1e3 * statistics.median(seen["seconds"][warm_up:])
    a_second = seen["tokens"] / ranks / (milliseconds / 1e3)
    peak, total = max(seen["peaks"]) / MIB, seen["memory"] / MIB
    return [
        at_most(f"{name}, the loss falls", seen["losses"][-1], seen["losses"][0], note="last loss, under the first"),
        at_most(f"{name}, peak memory of a card", peak, total, "MiB", "the bound is all that there is"),
        noted(
            f"{name}, median step", milliseconds, "ms", f"{seen['parameters']:,} parameters, {seen['tokens']:,} tokens"
        ),
        noted(f"{name}, speed of a card", a_second, "tokens/s"),
        noted(f"{name}, model FLOPs of a card", a_second * seen["flops_per_token"] / TERA, "TFLOP/s"),
    ]
