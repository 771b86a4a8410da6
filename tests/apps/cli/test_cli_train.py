"""``megascend train`` from a YAML file to a model that plain transformers loads, on one and on two processes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from support.runs import ANSWER_LOGPROBS, chats, events, metrics, reference, sets, write_lines, write_run

STEPS = 12
GENERATION = "{every: 5, prompts: ['one?', 'left?'], max_tokens: 12}"

# The loss of the exported model on the training data, computed by plain transformers.
SCORE = (
    ANSWER_LOGPROBS
    + """
print(loss_of_chats(load(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1]), sys.argv[2]))
"""
)

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
    for name in ("chat.jsonl", "held_out.jsonl"):
        write_lines(folder / name, chats())
    write_run(
        folder,
        model=str(small_model),
        data={"path": "chat.jsonl", "global_batch_size": 4},
        validation={"path": "held_out.jsonl", "every": 5},
        steps=STEPS,
        optimizer={"lr": 0.01},
        plot=True,
        self_check=True,
    )
    return folder


@pytest.fixture(scope="module")
def single(megascend, folder: Path) -> Path:
    """Run on one process, started as by a user."""
    arguments = (*sets("output=single", "tensorboard=true", f"generation={GENERATION}"), "--profile")
    completed = megascend("train", "run.yaml", *arguments, cwd=folder, fresh=True)
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
    exported = reference(SCORE, single / "hf", folder / "chat.jsonl")
    assert exported < rows[-1]["loss"]
    # The validation set equals the training data, and the last measurement is of the exported model.
    measured = {row["step"]: row["validation_loss"] for row in rows if row["validation_loss"] is not None}
    assert list(measured) == [5, 10, STEPS]
    assert measured[STEPS] == pytest.approx(exported, abs=1e-4)
    assert measured[5] == pytest.approx(rows[5]["loss"], abs=1e-4)  # the loss of step 6 is that after step 5


def test_generation_equals_transformers(single: Path) -> None:
    answers = {event["step"]: event["answers"] for event in events(single, "answered")}
    assert list(answers) == [5, 10, STEPS]
    expected = reference(ANSWER, single / "hf", "one?", "left?")
    assert [[answer["text"], answer["tokens"]] for answer in answers[STEPS]] == expected
    assert [answer["prompt"] for answer in answers[STEPS]] == ["one?", "left?"]
