"""Preference pairs: ``megascend train`` with ``dpo``, compared with the loss of plain transformers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from support.runs import ANSWER_LOGPROBS, losses, metrics, reference, sets, write_lines, write_run

BETA = 0.5
PAIRS = [
    ("one?", "two", "three, or so"),
    ("red?", "blue and green", "no"),
    ("up?", "down", "up"),
    ("left?", "right", "l"),
]
HELD_OUT = [("in?", "out", "in"), ("hot?", "cold", "hotter"), ("day?", "night", "d")]

# Mean of -log sigmoid(beta * ((chosen - rejected) of the trained model - (chosen - rejected) of the initial model)).
SCORE = (
    ANSWER_LOGPROBS
    + """
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
initial, trained = load(sys.argv[1]), load(sys.argv[2])
losses = []
for record in map(json.loads, open(sys.argv[3])):
    before, after = [
        [answer_logprobs(model, tokenizer, record["prompt"], record[side][0]["content"]).sum() for side in ("chosen", "rejected")]
        for model in (initial, trained)
    ]
    margin = after[0] - after[1] - before[0] + before[1]
    losses.append(-torch.nn.functional.logsigmoid(float(sys.argv[4]) * margin).item())
print(sum(losses) / len(losses))
"""
)


def write(path: Path, pairs: list[tuple[str, str, str]]) -> None:
    def answer(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    lines = [{"prompt": prompt, "chosen": answer(good), "rejected": answer(bad)} for prompt, good, bad in pairs]
    write_lines(path, lines)


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with data and a run file."""
    tmp_path = tmp_path_factory.mktemp("dpo")
    write(tmp_path / "pairs.jsonl", PAIRS)
    write(tmp_path / "held_out.jsonl", HELD_OUT)
    write_run(
        tmp_path,
        model=str(small_model),
        data={"path": "pairs.jsonl", "global_batch_size": 2},
        validation={"path": "held_out.jsonl", "every": 4},
        dpo={"beta": BETA},
        epochs=3,
        optimizer={"lr": 0.003},
        checkpoint={"every": 4},
    )
    return tmp_path


@pytest.fixture(scope="module")
def single(megascend, folder: Path) -> Path:
    """Run on one process."""
    completed = megascend("train", "run.yaml", "--set", "output=single", cwd=folder)
    assert "4 pairs and 3 held out, 6 steps of 2 pairs" in completed.stdout
    return folder / "single"


def test_dpo_learns_and_loss_equals_transformers(single: Path, small_model: Path, folder: Path) -> None:
    rows = metrics(single)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the model still equals the reference
    assert rows[0]["reward_chosen"] == pytest.approx(0, abs=1e-4)
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["accuracy"] == 1.0
    measured = {row["step"]: row["validation_loss"] for row in rows if row["validation_loss"] is not None}
    assert list(measured) == [4, 6]
    expected = reference(SCORE, small_model, single / "hf", folder / "held_out.jsonl", str(BETA))
    assert measured[6] == pytest.approx(expected, abs=1e-3)


@pytest.mark.nightly
def test_resumed_run_keeps_its_reference(megascend, folder: Path) -> None:
    megascend("train", "run.yaml", "--nproc", "2", *sets("output=two"), cwd=folder)
    repeated = (*sets("output=again", "export=false"), "--resume", "two/checkpoints/step-00000004")
    megascend("train", "run.yaml", "--nproc", "2", *repeated, cwd=folder)
    uninterrupted, resumed = (
        [(*row, measured) for row, measured in zip(losses(run), validation(run), strict=True)]
        for run in (folder / "two", folder / "again")
    )
    assert resumed == uninterrupted[4:]


def validation(run: Path) -> list[float | None]:
    return [row["validation_loss"] for row in metrics(run)]
