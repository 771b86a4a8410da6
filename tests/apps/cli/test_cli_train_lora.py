"""``megascend train`` with ``lora:``, from a YAML file to an adapter that plain transformers and peft load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import ANSWER_LOGPROBS, chats, metrics, reference, write_lines, write_run

STEPS = 12

# The loss on the training data, of the base model without and with the adapter, by transformers and peft; and peft's settings.
SCORE = (
    ANSWER_LOGPROBS
    + """
from peft import PeftModel
base, adapter, data = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(base), PeftModel.from_pretrained(load(base), adapter)
with_adapter = loss_of_chats(model, tokenizer, data)
with model.disable_adapter():
    alone = loss_of_chats(model, tokenizer, data)
config = model.peft_config["default"]
print(json.dumps([alone, with_adapter, config.r, config.lora_alpha, sorted(config.target_modules)]))
"""
)

# The largest difference of logits between peft's merge_and_unload and the base model, and each merged checkpoint.
MERGED = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, adapter, *exported = sys.argv[1:]
load = lambda path: AutoModelForCausalLM.from_pretrained(path).float().eval()
ids = torch.arange(4, 60)[None]
with torch.no_grad():
    alone = load(base)(ids).logits
    merged = PeftModel.from_pretrained(load(base), adapter).merge_and_unload()(ids).logits
    found = [load(path)(ids).logits for path in exported]
assert all(AutoTokenizer.from_pretrained(path).chat_template for path in exported)
print(json.dumps([(alone - merged).abs().max().item(), *((one - merged).abs().max().item() for one in found)]))
"""


@pytest.fixture(scope="module")
def folder(megascend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with a model, data and a run file."""
    folder = tmp_path_factory.mktemp("lora")
    # An adapter cannot change the random output projection, and in a narrow one all tokens are alike.
    megascend("new-model", folder / "model", "--hidden", "128", "--layers", "2", "--context", "256")
    write_lines(folder / "chat.jsonl", chats())
    write_run(
        folder,
        model="model",
        data={"path": "chat.jsonl", "global_batch_size": 4},
        steps=STEPS,
        optimizer={"lr": 0.01},
        lora={"rank": 4, "alpha": 8, "targets": ["q_proj", "o_proj", "down_proj"], "schedule": {"warmup_steps": 2}},
        plot=True,
    )
    return folder


@pytest.fixture(scope="module")
def single(megascend, folder: Path) -> Path:
    """Run on one process."""
    completed = megascend("train", "run.yaml", "--set", "output=single", cwd=folder)
    assert "LoRA of rank 4" in completed.stdout
    return folder / "single"


def test_adapter_learns_and_is_the_only_model_output(single: Path) -> None:
    rows = metrics(single)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert [row["lr"] for row in rows] == pytest.approx([0.005] + [0.01] * (STEPS - 1))  # the adapter's own schedule
    assert sorted(path.name for path in single.iterdir()) == [
        "adapter",
        "config.yaml",
        "events.jsonl",
        "metrics.jsonl",
        "metrics.png",
    ]
    files = ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "megascend_adapter.json"]
    files += ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (single / "adapter").iterdir()) == files


def test_peft_reproduces_the_trained_loss(single: Path, folder: Path) -> None:
    base_loss, with_adapter, rank, alpha, targets = reference(
        SCORE, folder / "model", single / "adapter", folder / "chat.jsonl"
    )
    rows = metrics(single)
    # The adapter's output is 0 at the first step, and every batch is the full data set.
    assert base_loss == pytest.approx(rows[0]["loss"], abs=1e-4)
    # The update of the last step comes after its loss, so the adapter must be at least that good.
    assert with_adapter < rows[-1]["loss"]
    assert (rank, alpha, targets) == (4, 8, ["down_proj", "o_proj", "q_proj"])


def test_export_merges_the_adapter_as_peft_does(megascend, single: Path, folder: Path) -> None:
    completed = megascend("export", "single", "wrong", cwd=folder, code=2)
    assert "megascend export BASE OUT --adapter single/adapter" in completed.stderr
    for engine in ("megatron", "single"):
        arguments = ("--adapter", "single", "--engine", engine, "--dtype", "fp32")
        completed = megascend("export", "model", f"merged-{engine}", *arguments, cwd=folder)
        assert "make sure" not in completed.stderr
        assert "model with single/adapter merged -> merged-" in completed.stdout
    paths = (folder / name for name in ("model", "single/adapter", "merged-megatron", "merged-single"))
    change, *differences = reference(MERGED, *paths)
    assert change > 0.1
    assert max(differences) < 1e-5


def test_export_warns_about_another_base_model(tmp_path: Path) -> None:
    from megascend.apps.train.exports import other_base

    base, moved, other = tmp_path / "a" / "base", tmp_path / "b" / "base", tmp_path / "other"
    for path in (base, moved, other):
        path.mkdir(parents=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert other_base(tmp_path, base) is None
    assert other_base(tmp_path, moved) == str(base)  # another directory, while the first one still exists
    base.rmdir()
    assert other_base(tmp_path, moved) is None
    assert other_base(tmp_path, other) == str(base)
