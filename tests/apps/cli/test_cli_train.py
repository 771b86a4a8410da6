"""``megascend train`` from a YAML file to a model that plain transformers loads, on one and on two processes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megascend.testing.reference import run_reference

STEPS = 12
GENERATION = "{every: 5, prompts: ['one?', 'left?'], max_tokens: 12}"
CHATS = [("one?", "two"), ("red?", "blue and green"), ("up?", "down"), ("left?", "right, as ever")]

# The loss of the exported model on the training data, computed by plain transformers.
SCORE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]).float(), AutoTokenizer.from_pretrained(sys.argv[1])
total = count = 0
for line in open(sys.argv[2]):
    messages = json.loads(line)["messages"]
    head = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    answer = messages[1]["content"] + tokenizer.eos_token
    ids = torch.tensor([tokenizer(head + answer, add_special_tokens=False)["input_ids"]])
    start = len(tokenizer(head, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logits = model(ids).logits[0, start - 1 : -1]
    total += torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum").item()
    count += len(ids[0]) - start
print(total / count)
"""


# Greedy answers of plain transformers.
ANSWER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]).float(), AutoTokenizer.from_pretrained(sys.argv[1])
found = []
for content in sys.argv[2:]:
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)[0, ids.shape[1]:]
    found.append([tokenizer.decode(answer, skip_special_tokens=True), len(answer)])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with data and run files."""
    folder = tmp_path_factory.mktemp("train")
    lines = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in CHATS]
    for name in ("chat.jsonl", "held_out.jsonl"):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "model": str(small_model),
        "output": "out",
        "data": {"path": "chat.jsonl", "global_batch_size": 4},
        "validation": {"path": "held_out.jsonl", "every": 5},
        "steps": STEPS,
        "platform": "cpu",
        "precision": "fp32",
        "optimizer": {"lr": 0.01},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def score(model: Path, data: Path) -> float:
    completed = run_reference(SCORE, model, data)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return float(completed.stdout.split()[-1])


@pytest.fixture(scope="module")
def single(megascend, folder: Path) -> Path:
    """Run on one process, started as by a user."""
    arguments = (
        "--set",
        "output=single",
        "--set",
        "tensorboard=true",
        "--profile",
        "--set",
        f"generation={GENERATION}",
    )
    completed = megascend("train", "run.yaml", *arguments, cwd=folder, fresh=True)
    assert completed.returncode == 0, completed.stderr
    assert f"step {STEPS}/{STEPS}" in completed.stdout
    assert completed.stdout.count("  > one?\n    ") == 3
    assert "profile: steps 4 to 6 in single/profile/trace-rank-0.json.gz" in completed.stdout
    return folder / "single"


@pytest.mark.core
def test_one_process_learns_and_writes_all_outputs(single: Path, folder: Path) -> None:
    rows = metrics(single)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["loss"] == pytest.approx(math.log(320), abs=0.1)
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert all(row["lr"] == 0.01 and not row["skipped"] and row["tokens_per_s"] > 0 for row in rows)
    assert all(0 < row["dispatch_seconds"] <= row["step_seconds"] for row in rows)
    assert rows[-1]["epoch"] == STEPS
    names = ["config.yaml", "events.jsonl", "hf", "metrics.jsonl", "metrics.png", "profile", "tensorboard"]
    assert sorted(path.name for path in single.iterdir()) == names
    assert yaml.safe_load((single / "config.yaml").read_text())["optimizer"]["lr"] == 0.01
    # The update of the last step comes after its loss, so the export must be at least that good.
    exported = score(single / "hf", folder / "chat.jsonl")
    assert exported < rows[-1]["loss"]
    # The validation set equals the training data, and the last measurement is of the exported model.
    measured = {row["step"]: row["validation_loss"] for row in rows if row["validation_loss"] is not None}
    assert list(measured) == [5, 10, STEPS]
    assert measured[STEPS] == pytest.approx(exported, abs=1e-4)
    assert measured[5] == pytest.approx(rows[5]["loss"], abs=1e-4)  # the loss of step 6 is that after step 5


def test_startup_times_are_recorded_by_phase(single: Path) -> None:
    events = [json.loads(line) for line in (single / "events.jsonl").read_text().splitlines()]
    (start,) = [event for event in events if event["event"] == "first_step"]
    phases = [
        "Python",
        "settings",
        "torch",
        "transformers",
        "data",
        "Megatron",
        "model",
        "self-check",
        "preparing",
        "first step",
    ]
    assert list(start["seconds"]) == list(start["processor_s"]) == phases
    assert all(value >= 0 for value in start["seconds"].values())


def test_generation_equals_transformers(single: Path) -> None:
    events = [json.loads(line) for line in (single / "events.jsonl").read_text().splitlines()]
    answers = {event["step"]: event["answers"] for event in events if event["event"] == "answered"}
    assert list(answers) == [5, 10, STEPS]
    completed = run_reference(ANSWER, single / "hf", "one?", "left?")
    assert completed.returncode == 0, completed.stderr[-4000:]
    expected = json.loads(completed.stdout.splitlines()[-1])
    assert [[answer["text"], answer["tokens"]] for answer in answers[STEPS]] == expected
    assert [answer["prompt"] for answer in answers[STEPS]] == ["one?", "left?"]


@pytest.mark.nightly  # covered: a cookbook script on two ranks; one process in the same file
@pytest.mark.parametrize("axis", ["tensor", pytest.param("data", marks=pytest.mark.nightly)])
def test_two_processes_learn_the_same(megascend, single: Path, folder: Path, axis: str) -> None:
    layout = ["--set", "parallel.tensor=2"] if axis == "tensor" else []
    length = ["--set", "steps=0", "--set", f"epochs={STEPS}"]  # an epoch is one batch
    completed = megascend("train", "run.yaml", "--nproc", "2", "--set", f"output={axis}", *layout, *length, cwd=folder)
    assert completed.returncode == 0, completed.stderr
    rows, reference = metrics(folder / axis), metrics(single)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in reference], rel=2e-4)
    assert rows[-1]["validation_loss"] == pytest.approx(reference[-1]["validation_loss"], rel=2e-4)
    assert [row["total_tokens"] for row in rows] == [row["total_tokens"] for row in reference]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in reference]
    assert completed.stdout.count(f"step {STEPS}/{STEPS}") == 1


@pytest.mark.nightly
@pytest.mark.torchrun
def test_training_under_torchrun(megascend, single: Path, folder: Path) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = ["--nproc-per-node", "2", "--standalone", "-m", "megascend.apps.cli.main", "train", "run.yaml"]
    completed = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command, "--set", "output=torchrun", "--set", "export=false"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=180,
        check=False,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert completed.returncode == 0, completed.stderr
    rows = metrics(folder / "torchrun")
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in metrics(single)], rel=2e-4)
    assert not (folder / "torchrun" / "hf").exists()


@pytest.mark.nightly
def test_repeated_non_finite_gradients_end_the_run(megascend, folder: Path) -> None:
    arguments = ["--set", "optimizer.lr=1e38", "--set", "max_skipped_steps=2", "--set", "output=diverged"]
    completed = megascend("train", "run.yaml", "--nproc", "2", *arguments, cwd=folder)
    assert completed.returncode == 2
    [line] = [line for line in completed.stderr.splitlines() if line.startswith("NonFiniteError")]
    assert "3 steps in a row" in line
    assert "max_skipped_steps: 2" in line
    rows = metrics(folder / "diverged")
    assert [row["skipped"] for row in rows[-3:]] == [True] * 3
    assert not (folder / "diverged" / "hf").exists()


@pytest.mark.nightly
def test_run_can_be_overwritten_and_exported_again(megascend, single: Path, folder: Path) -> None:
    arguments = ("--set", "steps=1", "--set", "plot=false", "--set", "output=again")
    for extra in ((), ("--overwrite",)):
        assert megascend("train", "run.yaml", *arguments, *extra, cwd=folder).returncode == 0
    assert len(metrics(folder / "again")) == 1
    completed = megascend("export", "single", "exported", "--dtype", "fp32", cwd=folder)
    assert completed.returncode == 0, completed.stderr
    data = folder / "chat.jsonl"
    assert score(folder / "exported", data) == pytest.approx(score(single / "hf", data), abs=1e-5)
