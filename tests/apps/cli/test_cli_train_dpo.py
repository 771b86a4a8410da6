"""Preference pairs: ``megascend train`` with ``dpo``, compared with the loss of plain transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from megascend.testing.reference import run_reference

BETA = 0.5
PAIRS = [
    ("one?", "two", "three, or so"),
    ("red?", "blue and green", "no"),
    ("up?", "down", "up"),
    ("left?", "right", "l"),
]
HELD_OUT = [("in?", "out", "in"), ("hot?", "cold", "hotter"), ("day?", "night", "d")]

# Mean of -log sigmoid(beta * ((chosen - rejected) of the trained model - (chosen - rejected) of the initial model)).
SCORE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
models = [AutoModelForCausalLM.from_pretrained(path).float() for path in sys.argv[1:3]]

def logprob(model, prompt, answer):
    head = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(head + answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]])
    start = len(tokenizer(head, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[start - 1 :].sum()

losses = []
for line in open(sys.argv[3]):
    record = json.loads(line)
    before, after = [
        logprob(model, record["prompt"], record["chosen"][0]["content"])
        - logprob(model, record["prompt"], record["rejected"][0]["content"])
        for model in models
    ]
    losses.append(-torch.nn.functional.logsigmoid(float(sys.argv[4]) * (after - before)).item())
print(sum(losses) / len(losses))
"""


def write(path: Path, pairs: list[tuple[str, str, str]]) -> None:
    def answer(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    lines = [{"prompt": prompt, "chosen": answer(good), "rejected": answer(bad)} for prompt, good, bad in pairs]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with data and a run file."""
    tmp_path = tmp_path_factory.mktemp("dpo")
    write(tmp_path / "pairs.jsonl", PAIRS)
    write(tmp_path / "held_out.jsonl", HELD_OUT)
    settings = {
        "model": str(small_model),
        "output": "out",
        "data": {"path": "pairs.jsonl", "global_batch_size": 2},
        "validation": {"path": "held_out.jsonl", "every": 4},
        "dpo": {"beta": BETA},
        "epochs": 3,
        "platform": "cpu",
        "precision": "fp32",
        "optimizer": {"lr": 0.003},
        "plot": False,
        "self_check": False,
        "checkpoint": {"every": 4},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def single(megascend, folder: Path) -> Path:
    """Run on one process."""
    completed = megascend("train", "run.yaml", "--set", "output=single", cwd=folder)
    assert completed.returncode == 0, completed.stderr
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
    scored = run_reference(SCORE, small_model, single / "hf", folder / "held_out.jsonl", str(BETA))
    assert scored.returncode == 0, scored.stderr[-4000:]
    assert measured[6] == pytest.approx(float(scored.stdout.split()[-1]), abs=1e-3)


def test_repeated_pair_in_a_batch_counts_twice(megascend, folder: Path) -> None:
    """Use a batch larger than the data set: the mean counts repeated pairs twice."""
    settings = ["epochs=null", "steps=1", "validation=null", "checkpoint.every=0", "export=false"]
    results = []
    for size in (4, 8):
        overrides = [f"output=twice-{size}", f"data.global_batch_size={size}", *settings]
        completed = megascend(
            "train", "run.yaml", *(part for override in overrides for part in ("--set", override)), cwd=folder
        )
        assert completed.returncode == 0, completed.stderr
        results.append(metrics(folder / f"twice-{size}")[0])
    once, twice = results
    assert twice["grad_norm"] == pytest.approx(once["grad_norm"], rel=1e-4)
    assert twice["tokens"] == 2 * once["tokens"]


@pytest.mark.nightly
def test_two_processes_learn_the_same_and_resume_keeps_the_reference(megascend, single: Path, folder: Path) -> None:
    completed = megascend("train", "run.yaml", "--nproc", "2", "--set", "output=two", cwd=folder)
    assert completed.returncode == 0, completed.stderr
    rows = metrics(folder / "two")
    for key in ("loss", "grad_norm", "reward_rejected"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in metrics(single)], rel=1e-3, abs=1e-4)
    assert rows[-1]["validation_loss"] == pytest.approx(metrics(single)[-1]["validation_loss"], rel=1e-3)
    repeated = ("--set", "output=again", "--set", "export=false", "--resume", "two/checkpoints/step-00000004")
    completed = megascend("train", "run.yaml", "--nproc", "2", *repeated, cwd=folder)
    assert completed.returncode == 0, completed.stderr
    resumed = [(row["step"], row["loss"], row["validation_loss"]) for row in metrics(folder / "again")]
    assert resumed == [(row["step"], row["loss"], row["validation_loss"]) for row in rows[4:]]


def test_pairs_require_dpo_and_dpo_requires_pairs(megascend, folder: Path) -> None:
    completed = megascend("train", "run.yaml", "--set", "dpo=null", cwd=folder)
    assert completed.returncode == 2
    assert "pairs.jsonl holds preference pairs ('chosen' and 'rejected'): set dpo:" in completed.stderr
    (folder / "texts.jsonl").write_text('{"text": "abc"}\n{"text": "abd"}\n')
    texts = ("--set", "validation=null", "--set", "data.path=texts.jsonl")
    completed = megascend("train", "run.yaml", *texts, cwd=folder)
    assert completed.returncode == 2
    assert "dpo is set, which learns from preference pairs" in completed.stderr


@pytest.mark.nightly
def test_reference_of_an_adapter_is_the_base_model(megascend, single: Path, folder: Path) -> None:
    lora = ("--set", "lora.rank=8", "--set", "optimizer.lr=0.005", "--set", "epochs=10", "--set", "output=lora")
    completed = megascend("train", "run.yaml", *lora, cwd=folder)
    assert completed.returncode == 0, completed.stderr
    rows = metrics(folder / "lora")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert sum(row["loss"] for row in rows[-2:]) < 0.5 * sum(row["loss"] for row in rows[:2])
    assert rows[0]["tokens"] == metrics(single)[0]["tokens"]
