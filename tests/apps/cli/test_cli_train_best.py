"""Best checkpoint, early stopping, and validation before the first step, compared with transformers on the exported model."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import checkpoints, metrics, reference, sets, write_lines, write_run

PATIENCE = 3

# Mean cross entropy of all tokens but the first, the end of the sequence included.
SCORE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).float()
total = count = 0
for line in open(sys.argv[2]):
    ids = torch.tensor([tokenizer(json.loads(line)["text"])["input_ids"] + [tokenizer.eos_token_id]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].double().log_softmax(-1)
    total, count = total - logprobs.gather(-1, ids[0, 1:, None]).sum().item(), count + ids.shape[1] - 1
print(total / count)
"""


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create data that is learned at the expense of what is held out."""
    tmp_path = tmp_path_factory.mktemp("best")
    for name, texts in {"data": ["aaaa bbbb aaaa bbbb", "abab abab"], "held_out": ["abcd cdcd bcbc", "bcda"]}.items():
        write_lines(tmp_path / f"{name}.jsonl", ({"text": text} for text in texts))
    write_run(
        tmp_path,
        model=str(small_model),
        data={"path": "data.jsonl", "global_batch_size": 2},
        validation={"path": "held_out.jsonl", "every": 1, "at_start": True, "keep_best": True, "patience": PATIENCE},
        checkpoint={"every": 1, "keep_last": 1},
        steps=60,
        engine="single",
        optimizer={"lr": 0.01},
    )
    return tmp_path


@pytest.fixture(scope="module")
def ended_early(megascend, folder: Path, small_model: Path) -> tuple[Path, int]:
    """Run until the held-out loss has stopped to improve; return the run and its best step."""
    completed = megascend("train", "run.yaml", "--set", "output=whole", cwd=folder)
    losses = [row["validation_loss"] for row in metrics(folder / "whole")]
    best = losses.index(min(losses)) + 1
    assert f"exporting step {best}, the best one" in completed.stdout
    assert (
        f"{best + PATIENCE} steps (of 60: the last {PATIENCE} validation losses were no improvement" in completed.stdout
    )
    (line,) = [
        line for line in completed.stdout.splitlines() if line.startswith("validation loss before the first step")
    ]
    initial = reference(SCORE, small_model, folder / "held_out.jsonl")
    assert float(line.split()[-1]) == pytest.approx(initial, abs=1e-3)
    return folder / "whole", best


def test_run_ends_after_its_patience_and_exports_the_best_step(ended_early: tuple[Path, int], folder: Path) -> None:
    run, best = ended_early
    rows = metrics(run)
    assert len(rows) == best + PATIENCE < 60
    # The last one, and the best beside it.
    assert checkpoints(run) == [best, best + PATIENCE]
    assert reference(SCORE, run / "hf", folder / "held_out.jsonl") == pytest.approx(
        rows[best - 1]["validation_loss"], abs=2e-5
    )
    assert rows[-1]["validation_loss"] > rows[best - 1]["validation_loss"] + 1e-3


def test_resumed_run_counts_on_and_ends_at_the_same_step(
    megascend, ended_early: tuple[Path, int], folder: Path
) -> None:
    run, best = ended_early
    part = ("train", "run.yaml", *sets("output=parts"))
    megascend(*part, *sets(f"steps={best + 1}"), cwd=folder)
    assert checkpoints(folder / "parts") == [best, best + 1]
    second = megascend(*part, "--resume", "auto", cwd=folder)
    figures = [
        [(row["step"], row["loss"], row["validation_loss"]) for row in metrics(path)]
        for path in (run, folder / "parts")
    ]
    assert figures[0] == figures[1]
    assert checkpoints(folder / "parts") == [best, best + PATIENCE]
    assert "before the first step" not in second.stdout
    # Resumed once more it is at its end, and only exports.
    megascend(*part, "--resume", "auto", cwd=folder)
    assert len(metrics(folder / "parts")) == best + PATIENCE
    assert reference(SCORE, folder / "parts" / "hf", folder / "held_out.jsonl") == pytest.approx(
        min(f[2] for f in figures[0]), abs=2e-5
    )


def test_smaller_improvements_than_min_delta_do_not_count(megascend, folder: Path) -> None:
    settings = ["validation.min_delta=100", "validation.patience=2", "checkpoint.every=0", "output=delta"]
    megascend("train", "run.yaml", *sets(*settings), cwd=folder)
    assert len(metrics(folder / "delta")) == 3
    # Without checkpoint.every, only the best step is saved.
    assert checkpoints(folder / "delta") == [1]
