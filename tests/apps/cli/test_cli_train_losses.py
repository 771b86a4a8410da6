"""``megascend train`` with ORPO, SimPO, KTO and losses of the user, compared with formulas on log-probabilities of transformers.

The model after three steps is exported; validation losses, and the loss of a fourth step on all data, are computed again from the
log-probabilities of that export and of the initial model, in float64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.runs import metrics, reference, sets, write_lines, write_run

PAIRS = [
    ("one?", " two", " three, or so"),
    ("red?", " blue and green", " no"),
    ("up?", " down", " up"),
    ("left?", " right", " l"),
]
LABELLED = [
    ("one?", " two", True),
    ("one?", " three, or so", False),
    ("red?", " blue", True),
    ("up?", " down", True),
    ("up?", " up again", False),
]
MISMATCHES = [("one?", " blue"), ("one?", " blue"), ("red?", " three, or so"), ("up?", " blue"), ("up?", " blue")]
"""Each prompt with the nearest completion before it to another prompt, or the first one after it."""

# Log-probabilities of the completions' tokens, the end of the sequence included, under two models.
SCORE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
models = [AutoModelForCausalLM.from_pretrained(path).float() for path in sys.argv[1:3]]
rows = []
for prompt, completion in json.loads(sys.argv[3]):
    head = tokenizer(prompt)["input_ids"]
    ids = tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]
    assert ids[: len(head)] == head
    row = []
    for model in models:
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        row.append(logprobs.gather(-1, torch.tensor(ids)[1:, None])[len(head) - 1 :, 0].tolist())
    rows.append(row)
print(json.dumps(rows))
"""

LOSSES = '''
"""Losses of a user."""
from megascend import Loss


def focal(logprobs, inputs, power=2.0):
    return -((1 - logprobs.exp()) ** power) * logprobs


def squares(logprobs, inputs):
    margins = inputs.sum_per_sample(logprobs - inputs.ref_logprobs)
    return (margins[inputs.pairs[:, 0]] - margins[inputs.pairs[:, 1]] - 1) ** 2


ipo = Loss("ipo", squares, per="pair", requires=("ref_logprobs",))
'''


def scores(initial: Path, trained: Path, sequences: Sequence[tuple[str, str]]) -> list[tuple[list[float], list[float]]]:
    """Return the log-probabilities of each completion's tokens, under the initial and the trained model."""
    return reference(SCORE, initial, trained, json.dumps(sequences))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def pair_losses(rows: list[tuple[list[float], list[float]]], kind: str) -> float:
    """Return the mean loss over pairs, whose sides are neighbours."""
    losses = []
    for (chosen_ref, chosen), (rejected_ref, rejected) in zip(rows[::2], rows[1::2], strict=True):
        difference = mean(chosen) - mean(rejected)
        if kind == "simpo":
            losses.append(-log_sigmoid(1.5 * difference - 0.25))
        elif kind == "orpo":
            odds = [mean(side) - math.log(1 - math.exp(mean(side))) for side in (chosen, rejected)]
            losses.append(-mean(chosen) - 0.5 * log_sigmoid(odds[0] - odds[1]))
        else:
            margins = sum(chosen) - sum(chosen_ref) - sum(rejected) + sum(rejected_ref)
            losses.append((margins - 1) ** 2)
    return mean(losses)


def kto(initial: Path, trained: Path) -> tuple[float, float]:
    """Return KTO's loss of LABELLED and its reference point."""
    rows = scores(initial, trained, [*((prompt, answer) for prompt, answer, _ in LABELLED), *MISMATCHES])
    rewards = [sum(after) - sum(before) for before, after in rows]
    point = max(0.0, mean(rewards[len(LABELLED) :]))
    losses = [
        1.25 * (1 - math.exp(log_sigmoid(0.5 * (reward - point))))
        if label
        else 0.75 * (1 - math.exp(log_sigmoid(0.5 * (point - reward))))
        for reward, (*_, label) in zip(rewards, LABELLED, strict=False)
    ]
    return mean(losses), point


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with data, losses and a run file."""
    tmp_path = tmp_path_factory.mktemp("losses")
    records = {
        "pairs": [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in PAIRS],
        "labels": [{"prompt": prompt, "completion": text, "label": label} for prompt, text, label in LABELLED],
        "texts": [{"prompt": prompt, "completion": text} for prompt, text, _ in LABELLED],
    }
    for name, lines in records.items():
        write_lines(tmp_path / f"{name}.jsonl", lines)
        write_lines(tmp_path / f"{name}_again.jsonl", lines)
    (tmp_path / "losses.py").write_text(LOSSES)
    write_run(tmp_path, model=str(small_model), steps=3, engine="single", optimizer={"lr": 0.003})
    return tmp_path


def overrides(data: str, size: int, *settings: str) -> list[str]:
    """Return arguments of a run on a file, all of which is in every batch."""
    files = (f"data.path={data}.jsonl", f"data.global_batch_size={size}", f"validation.path={data}_again.jsonl")
    return sets(*files, *settings)


def train(megascend, folder: Path, name: str, arguments: Sequence[str], *, nproc: int = 1) -> list[dict]:
    """Return the metrics of a run of three steps, with an export, and of the fourth step of one that resumes it."""
    launcher = ["--nproc", str(nproc)] if nproc > 1 else []
    megascend("train", "run.yaml", *launcher, *arguments, *sets(f"output={name}", "checkpoint.every=3"), cwd=folder)
    resumed = [*sets(f"output={name}-more", "steps=4", "export=false"), "--resume", name]
    megascend("train", "run.yaml", *launcher, *arguments, *resumed, cwd=folder)
    return [*metrics(folder / name), *metrics(folder / f"{name}-more")]


ENGINES = {
    "TP2": (2, ["engine=megatron", "parallel.tensor=2"]),
    "fsdp": (2, ["engine=fsdp"]),
    "single": (1, ["engine=single"]),
}


@pytest.mark.nightly_cases("TP2", "fsdp")  # covered: single; every layout in engines/step/test_step.py
@pytest.mark.parametrize("engine", ENGINES)
def test_kto_equals_its_formula_with_the_reference_point_of_the_batch(
    megascend, folder: Path, small_model: Path, engine: str
) -> None:
    nproc, settings = ENGINES[engine]
    chosen = ["kto.beta=0.5", "kto.desirable_weight=1.25", "kto.undesirable_weight=0.75", *settings]
    rows = train(megascend, folder, f"kto-{engine}", overrides("labels", 5, *chosen), nproc=nproc)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # The model is still the reference: no divergence, and half of each weight.
    assert rows[0]["reference_point"] == pytest.approx(0, abs=1e-5)
    assert rows[0]["loss"] == pytest.approx((3 * 1.25 + 2 * 0.75) / 10, abs=1e-5)
    expected, point = kto(small_model, folder / f"kto-{engine}" / "hf")
    assert rows[2]["validation_loss"] == pytest.approx(expected, abs=2e-5)
    assert rows[3]["loss"] == pytest.approx(expected, abs=2e-5)
    assert rows[3]["reference_point"] == pytest.approx(point, abs=1e-4)
    assert rows[3]["loss"] < rows[0]["loss"]


@pytest.mark.nightly_cases("simpo-*")  # covered: orpo; engines/step/test_step.py
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("simpo", ["simpo.beta=1.5", "simpo.gamma=0.25"]),
        ("orpo", ["loss=orpo", "orpo.beta=0.5"]),
        ("ipo", ["loss=losses.py:ipo"]),
    ],
)
def test_losses_of_pairs_equal_their_formulas(
    megascend, folder: Path, small_model: Path, kind: str, settings: list[str]
) -> None:
    rows = train(megascend, folder, kind, overrides("pairs", 4, *settings))
    sequences = [(prompt, side) for prompt, *sides in PAIRS for side in sides]
    expected = pair_losses(scores(small_model, folder / kind / "hf", sequences), kind)
    assert rows[2]["validation_loss"] == pytest.approx(expected, abs=2e-5)
    assert rows[3]["loss"] == pytest.approx(expected, abs=2e-5)
    assert rows[3]["loss"] < rows[0]["loss"]


def test_loss_function_of_a_file_trains_tokens_with_its_settings(megascend, folder: Path, small_model: Path) -> None:
    arguments = overrides("texts", 5, "loss=losses.py:focal", "loss_settings={power: 1.5}")
    rows = train(megascend, folder, "focal", arguments)
    after = [
        value
        for _, tokens in scores(small_model, folder / "focal" / "hf", [t[:2] for t in LABELLED])
        for value in tokens
    ]
    expected = mean([-((1 - math.exp(value)) ** 1.5) * value for value in after])
    assert rows[2]["validation_loss"] == pytest.approx(expected, abs=2e-5)
    assert rows[3]["loss"] == pytest.approx(expected, abs=2e-5)


def test_changed_loss_function_is_reported_on_resuming(megascend, folder: Path) -> None:
    (folder / "changing.py").write_text("def loss(logprobs, inputs):\n    return -logprobs\n")
    arguments = overrides("texts", 5, "loss=changing.py:loss", "output=changing", "checkpoint.every=1", "steps=1")
    megascend("train", "run.yaml", *arguments, cwd=folder)
    (folder / "changing.py").write_text("def loss(logprobs, inputs):\n    return -2 * logprobs\n")
    completed = megascend("train", "run.yaml", *arguments, "--set", "steps=2", "--resume", "auto", cwd=folder)
    assert "loss: the code is not that of the checkpoint" in completed.stderr
