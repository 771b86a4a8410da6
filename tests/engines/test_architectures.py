"""Architectures of transformers on the transformers-based engines: correct, or rejected before any training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from architecture_runs import causal_models, recurrent_models

from support.forked_programs import run_forked
from support.stacks import first_stack_required

PROGRAM = Path(__file__).with_name("architecture_runs.py")
HYBRID = "set batching.packing: false"
Outcomes = dict[str, tuple[str, str]]
"""Outcomes of the packed and of the padded layout: ``right``, or words of the error."""
FSDP: Outcomes = {
    "llama, longrope": ("right", "right"),
    "falcon": ("its own attention classes", "its own attention classes"),
    "falcon_h1": (HYBRID, "changes its logits"),
    "lfm2": (HYBRID, "right"),
    "phimoe": ("has a sliding window of", "has a sliding window of"),
    "inkling_text": (HYBRID, "position_bias"),
    "zamba2": ("shares model.layers.", "shares model.layers."),
    "deepseek_v32": ("right", "right"),
    "deepseek_v4": ("eager attention only", "eager attention only"),
}
"""One of each kind of layer, and of each refusal."""
SINGLE = {
    "beam": "right",
    "deepseek_v4": "right",
    "dory": "more than the product",
    "falcon": "right",
    "inkling2_text": "changes its logits",
    "llama, longrope": "right",
    "phimoe, longrope": "right",
    "zamba2": "right",
}
"""Among them a soft cap on the logits, attention classes of its own and layers that share parameters."""
SINGLE_IN_CI = ("dory", "falcon", "zamba2")
"""A refusal, attention classes of its own and shared layers; the others are covered by engine fsdp, by the same code."""
RECURRENT_COUNT = 30
"""Architectures with recurrent layers in transformers 5.24, about."""
MULTIMODAL = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
ON_MEGATRON = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""The language models among them that engine megatron trains."""
NOTHING_BUILT = 0.3
"""Largest share of architectures that may not be buildable with a tiny configuration."""


def run(folder: Path, engine: str, *names: str) -> dict[str, dict[str, str]]:
    completed = run_forked(PROGRAM, engine, folder / "result.json", *names, timeout_s=3000 if len(names) > 20 else 240)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads((folder / "result.json").read_text())


def is_as_expected(outcome: str, expected: str) -> bool:
    return outcome == "right" if expected == "right" else outcome.startswith("refused: ") and expected in outcome


def test_engine_fsdp_is_right_or_refuses_before_training(tmp_path: Path) -> None:
    outcomes = run(tmp_path, "fsdp", *FSDP)
    for name, (packed, padded) in FSDP.items():
        assert is_as_expected(outcomes[name]["packed"], packed), (name, outcomes[name])
        assert is_as_expected(outcomes[name]["padded"], padded), (name, outcomes[name])


@pytest.mark.parametrize(
    "names",
    [SINGLE_IN_CI, pytest.param(sorted(SINGLE.keys() - {*SINGLE_IN_CI}), marks=pytest.mark.nightly)],
    ids=["in CI", "others"],
)
def test_engine_single_is_right_or_refuses_before_training(names: Sequence[str], tmp_path: Path) -> None:
    outcomes = run(tmp_path, "single", *names)
    for name in names:
        assert is_as_expected(outcomes[name]["padded"], SINGLE[name]), (name, outcomes[name])


@pytest.mark.nightly
@first_stack_required
def test_megatron_trains_the_recurrent_architectures_that_it_knows_and_refuses_others(tmp_path: Path) -> None:
    names = recurrent_models()
    assert len(names) >= RECURRENT_COUNT
    # Their language models, which are in the list too, have the same layers.
    assert set(MULTIMODAL) <= set(names)
    for name, layouts in run(tmp_path, "megatron", *(name for name in names if name not in MULTIMODAL)).items():
        assert layouts.keys() == {"packed", "padded"}, (name, layouts)
        for outcome in layouts.values():
            assert outcome == "right" or outcome.startswith("refused: "), (name, layouts)
            assert (outcome == "right") == (name in ON_MEGATRON), (name, layouts)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["fsdp", "single"])
def test_every_architecture_is_right_or_refused(engine: str, tmp_path: Path) -> None:
    names = causal_models()
    outcomes = run(tmp_path, engine, *names)
    built = {name: layouts for name, layouts in outcomes.items() if "model" not in layouts}
    bad = {
        name: layouts
        for name, layouts in built.items()
        if not all(outcome == "right" or outcome.startswith("refused: ") for outcome in layouts.values())
    }
    assert not bad, json.dumps(bad, indent=1)
    assert len(built) >= (1 - NOTHING_BUILT) * len(names)
    print(json.dumps(outcomes, indent=1))
