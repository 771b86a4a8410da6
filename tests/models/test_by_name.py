"""Every declared architecture by its name: ``megascend new-model --arch``, ``megascend train`` and recipes of the cookbook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megascend.models.registry import BUILT_IN
from support.forked_programs import run_command, run_forked
from support.stacks import stack_marks

OLDER_STACK = (
    r"VersionError: \w+: Megatron-Core has its layers from \S+ on, and \S+ is installed; use Python \S+ and .+"
)
NOT_BUILT = r"CheckpointError: \S+ mcore-bridge \S+ has no model for model_type '\w+'; .+"


# Covered: a whole family.
ALL = [name if name == "deepseek_v3" else pytest.param(name, marks=pytest.mark.nightly) for name in BUILT_IN]

# The mean loss of the samples that the run trains on in its first step, computed by plain transformers.
SCORE = """
import json, sys, torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from megascend.models.checkpoint_files.architectures import make_known_to_transformers
make_known_to_transformers(Path(sys.argv[1]))  # Kimi-K2: transformers' DeepSeek-V3 under its own name
takes_images = hasattr(AutoConfig.from_pretrained(sys.argv[1]), "vision_config")
loader = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
model = loader.from_pretrained(sys.argv[1], attn_implementation="eager").float()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
total = count = 0
for line in open(sys.argv[2], encoding="utf-8"):
    messages = json.loads(line)["messages"]
    head = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(head + messages[-1]["content"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]])
    start = len(tokenizer(head, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logits = model(ids).logits[0, start - 1 : -1]
    total += torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum").item()
    count += len(ids[0]) - start
print(total / count)
"""


def make_model(arch: str, folder: Path) -> Path:
    model = folder / "model"
    sizes = ("--hidden", "64", "--layers", "2", "--context", "512")
    completed = run_command("new-model", model, "--arch", arch, *sizes)
    assert completed.returncode == 0, completed.stderr
    return model


@pytest.mark.parametrize("arch", ALL)
def test_model_by_name_trains_from_the_loss_of_transformers(arch: str, tmp_path: Path) -> None:
    model, data = make_model(arch, tmp_path), tmp_path / "chats.jsonl"
    chats = [("one?", "two"), ("red?", "blue and green"), ("up?", "down"), ("left?", "right, as ever")]
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in chats]
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns), encoding="utf-8")
    settings: dict[str, Any] = {
        "model": str(model),
        "output": str(tmp_path / "out"),
        "data": {"path": str(data), "global_batch_size": len(chats)},
        "steps": 3,
        "platform": "cpu",
        "precision": "fp32",
        "self_check": False,  # the loss is compared below
        "optimizer": {"lr": 1e-3},
    }
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    completed = run_command("train", run_file, "--set", "engine=megatron")
    if refused := engine_refusal(arch):
        assert completed.returncode == 2
        assert re.search(rf"^{refused}$", completed.stderr, re.MULTILINE), completed.stderr[-3000:]
        completed = run_command("train", run_file, "--set", "engine=single")
    assert completed.returncode == 0, completed.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    scored = run_forked(SCORE, model, data)
    assert scored.returncode == 0, scored.stderr[-3000:]
    assert rows[0]["loss"] == pytest.approx(float(scored.stdout.split()[-1]), abs=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"]


def engine_refusal(arch: str) -> str | None:
    """Return the sentence with which the Megatron engine of this stack refuses a family; None where it trains it."""
    if stack_marks(arch):
        return OLDER_STACK
    return None if BUILT_IN[arch].proven or BUILT_IN[arch].proven_with_images else NOT_BUILT
