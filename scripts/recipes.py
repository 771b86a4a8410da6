"""Write the run files in recipes/ and their predicted figures, which docs/recipes.md shows, with ``megascend init``.

    python scripts/recipes.py               # all, a few minutes
    python scripts/recipes.py --only TEXT   # those whose name contains TEXT

The configurations are the published ones in tests/models/published; no weights are needed.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

from megascend.apps.plan.hardware import load
from megascend.apps.train.run_template import RunFileRequest, run_files

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "recipes"
PUBLISHED = ROOT / "tests" / "models" / "published"
FIGURES = ROOT / "benchmarks" / "planning" / "recipes.json"


@dataclass(frozen=True)
class Recipe:
    """A task on a published model, with its cards, length and batch."""

    task: str
    model: str
    cards: int
    device: str
    length: int
    batch: int
    lora: int | None = None
    overrides: tuple[str, ...] = ()
    measured: str = "nothing"  # on which card, with what result

    @property
    def name(self) -> str:
        """Name of the run file."""
        adapter = "" if self.lora is None else "-lora"
        return f"{self.model}-{self.task}{adapter}-{self.cards}x{self.device}"


RECIPES = (
    Recipe(
        "sft",
        "qwen3-8b",
        8,
        "h100",
        8192,
        64,
        measured="near it, two H200s with TP2, 16 samples of 4096 tokens, all recomputed, random weights: 7,950 tokens/s a card "
        "(2026-11-27)",
    ),
    Recipe("dpo", "glm-4-9b-0414", 8, "h200", 4096, 64),
    Recipe("sft", "qwen3-vl-8b", 8, "h100", 8192, 64),
    Recipe(
        "sft",
        "qwen3-30b-a3b",
        1,
        "h100",
        16384,
        16,
        lora=16,
        overrides=("base_weights=fp8",),
        measured="near it, one H100 with bf16 in place of fp8 base weights, 4 samples a step, random weights: 8,850 tokens/s, "
        "76.6 GiB; one H200 with fp8: 8,800 tokens/s (2026-11-27)",
    ),
    Recipe("sft", "qwen3-30b-a3b", 2, "h100", 8192, 32, lora=16),
    Recipe("sft", "glm-4.5-air", 8, "h100", 8192, 64, lora=16),
    Recipe(
        "sft",
        "qwen3.5-35b-a3b",
        8,
        "ascend-910b",
        4096,
        64,
        lora=16,
        measured="no Ascend card; of this model two H200s with EP2, LoRA 32: 8,250 tokens/s a card, 106 GiB (November 2026)",
    ),
    Recipe("sft", "qwen3.8-27b", 8, "h100", 8192, 64, lora=16),
    Recipe("rl", "qwen3.5-4b", 8, "h100", 4096, 128),
    Recipe("pretrain", "deepseek-v3", 1024, "h100", 4096, 8192),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that contain this")
    selection = parser.parse_args().only
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    FOLDER.mkdir(exist_ok=True)
    for recipe in RECIPES:
        if selection not in recipe.name:
            continue
        hardware = load(recipe.device)
        data = Path("data/prompts.jsonl" if recipe.task == "rl" else "data/train.jsonl")
        model = json.loads((PUBLISHED / "index.json").read_text(encoding="utf-8"))[recipe.model]["model"]
        overrides = [f"model=models/{model.rpartition('/')[2]}", *recipe.overrides]
        if recipe.task == "rl":
            overrides.append("rollout.reward=data/reward.py:reward")
        request = RunFileRequest(
            PUBLISHED / f"{recipe.model}.json", data, Path("runs") / recipe.name, recipe.length, recipe.batch, recipe.lora,
            overrides, recipe.cards, hardware,
        )  # fmt: skip
        path = Path("recipes") / f"{recipe.name}.yaml"
        result = run_files(recipe.task, request, path)
        assert result.prediction is not None
        measured = textwrap.fill(f"Measured: {recipe.measured}.", 110, initial_indent="# ", subsequent_indent="# ")
        (ROOT / path).write_text(f"{measured}\n{result.files[path]}", encoding="utf-8")
        figures[recipe.name] = asdict(recipe) | {"hub": model, "title": hardware.title} | asdict(result.prediction)
        print(f"{path}: {result.prediction}", flush=True)
    # A recipe that was removed from the table has no figures either.
    names = [recipe.name for recipe in RECIPES]
    current = {name: figures[name] for name in names if name in figures}
    FIGURES.write_text(json.dumps(current, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
