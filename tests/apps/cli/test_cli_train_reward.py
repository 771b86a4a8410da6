"""``megascend train`` with ``bradley_terry``: trained as transformers' classifiers, peft and AdamW do, and exported for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from megascend.testing.reference import run_reference

PAIRS = [
    ("one?", " two", " three, or so", 0.5),
    ("red?", " blue and green", " no", 0.0),
    ("up?", " down", " up", 1.0),
    ("left?", " right", " l", 0.25),
    ("in?", " out", " inside of it", 0.125),
]
CENTER, STEPS, LR, DECAY, RANK = 0.05, 3, 0.005, 0.1, 4

# Tokens of a side: prompt and response together, closed by the end of sequence.
TOKENS = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
pairs = json.loads(sys.argv[1])
def rewards(model, tokenizer):
    rows = [tokenizer(p + side)["input_ids"] + [tokenizer.eos_token_id] for p, *sides, _ in pairs for side in sides]
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    return model(**batch).logits[:, 0].view(-1, 2).unbind(1)
def loss_of(chosen, rejected):
    margins = torch.tensor([margin for *_, margin in pairs])
    return (torch.nn.functional.softplus(margins + rejected - chosen) + CENTER * (chosen + rejected) ** 2).mean()
"""

# Arguments: pairs, a language model, the reward model to write.
NEW = (
    TOKENS
    + """
torch.manual_seed(3)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
model = AutoModelForSequenceClassification.from_pretrained(
    sys.argv[2], num_labels=1, dtype=torch.float32, pad_token_id=tokenizer.pad_token_id
)
torch.nn.init.normal_(model.score.weight, std=0.2)
model.save_pretrained(sys.argv[3])
tokenizer.save_pretrained(sys.argv[3])
"""
)

# Arguments: pairs, a reward model, and an adapter that is trained in its place, or nothing.
TRAINED = (
    TOKENS
    + """
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
model = AutoModelForSequenceClassification.from_pretrained(
    sys.argv[2], dtype=torch.float32, attn_implementation="eager"
)
if sys.argv[3:]:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, sys.argv[3], is_trainable=True)
parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
matrices = [parameter for parameter in parameters if parameter.dim() > 1]
others = [parameter for parameter in parameters if parameter.dim() == 1]
groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
rows = []
for _ in range(STEPS):
    loss = loss_of(*rewards(model, tokenizer))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    rows.append([float(loss), float(norm)])
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(rows))
"""
)

# Arguments: pairs, an export, and the base model if it is an adapter.
SCORED = (
    TOKENS
    + """
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
if not sys.argv[3:]:
    model, report = AutoModelForSequenceClassification.from_pretrained(
        sys.argv[2], dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
else:
    from peft import PeftModel
    model = AutoModelForSequenceClassification.from_pretrained(
        sys.argv[3], num_labels=1, dtype=torch.float32, pad_token_id=tokenizer.pad_token_id
    )
    model = PeftModel.from_pretrained(model, sys.argv[2])
model.eval()
with torch.no_grad():
    chosen, rejected = rewards(model, tokenizer)
figures = {
    "validation_loss": loss_of(chosen, rejected),
    "validation_accuracy": (chosen > rejected).float().mean(),
    "validation_reward_chosen": chosen.mean(),
    "validation_reward_rejected": rejected.mean(),
    "validation_reward_margin": (chosen - rejected).mean(),
    "validation_reward_mean": torch.cat([chosen, rejected]).mean(),
}
print(json.dumps({name: float(value) for name, value in figures.items()}))
"""
)


def reference(program: str, *arguments: Path) -> str:
    """Return the last line that a program of transformers prints."""
    constants = f"CENTER, STEPS, LR, DECAY = {CENTER}, {STEPS}, {LR}, {DECAY}\n"
    completed = run_reference(constants + program, json.dumps(PAIRS), *arguments)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return completed.stdout.splitlines()[-1] if completed.stdout else ""


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with a reward model, data and a run file."""
    tmp_path = tmp_path_factory.mktemp("reward")
    keys = ("prompt", "chosen", "rejected", "margin")
    lines = [json.dumps(dict(zip(keys, pair, strict=True))) + "\n" for pair in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    (tmp_path / "held_out.jsonl").write_text("".join(lines))
    (tmp_path / "some_margins.jsonl").write_text("".join(lines) + lines[0].replace(', "margin": 0.5', ""))
    (tmp_path / "wide_margin.jsonl").write_text(lines[0].replace("0.5", "Infinity"))
    reference(NEW, small_model, tmp_path / "reward-model")
    settings = {
        "model": "reward-model",
        "output": "out",
        "steps": STEPS,
        "platform": "cpu",
        "precision": "fp32",
        "optimizer": {"lr": LR, "weight_decay": DECAY, "max_grad_norm": 1.0},
        "data": {"path": "pairs.jsonl", "global_batch_size": len(PAIRS)},
        "validation": {"path": "held_out.jsonl"},
        "bradley_terry": {"center_coefficient": CENTER},
        "plot": False,
        "self_check": False,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def train(megascend, folder: Path, name: str, settings: Sequence[str], *options: str, nproc: int = 1) -> list[dict]:
    """Return the metrics of a run into ``name``."""
    overrides = [part for setting in (f"output={name}", *settings) for part in ("--set", setting)]
    launcher = ["--nproc", str(nproc)] if nproc > 1 else []
    completed = megascend("train", "run.yaml", *launcher, *options, *overrides, cwd=folder)
    assert completed.returncode == 0, completed.stderr
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def assert_trained_alike(rows: list[dict], expected: list[list[float]]) -> None:
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx([norm for _, norm in expected], rel=1e-4)


LAYOUTS = {
    "single": (1, ["engine=single"]),
    "fsdp": (2, ["engine=fsdp"]),
    "TP2": (2, ["engine=megatron", "parallel.tensor=2"]),
    "TP2-SP": (2, ["engine=megatron", "parallel.tensor=2", "parallel.sequence=true"]),
    "PP2": (2, ["engine=megatron", "parallel.pipeline=2"]),
}


@pytest.mark.nightly_cases("TP2")  # covered: the adapter with its head; engines/test_scalar_head.py
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "TP2" else pytest.mark.nightly) for name in LAYOUTS]
)
def test_reward_model_trains_and_scores_as_transformers(megascend, folder: Path, layout: str) -> None:
    nproc, settings = LAYOUTS[layout]
    rows = train(megascend, folder, layout, settings, nproc=nproc)
    assert_trained_alike(rows, json.loads(reference(TRAINED, folder / "reward-model")))
    scores = json.loads(reference(SCORED, folder / layout / "hf"))
    assert {name: rows[-1][name] for name in scores} == pytest.approx(scores, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "single" else pytest.mark.nightly) for name in LAYOUTS]
)
def test_adapter_with_its_head_scores_as_in_peft(megascend, folder: Path, small_model: Path, layout: str) -> None:
    """The base is a language model: only the adapter has a head. A resumed run continues with the head that it trained."""
    nproc, settings = LAYOUTS[layout]
    chosen, name = [*settings, f"model={small_model}", f"lora.rank={RANK}", "seed=7"], f"adapter-{layout}"
    train(megascend, folder, name, [*chosen, "checkpoint.every=2", "steps=2"], nproc=nproc)
    rows = train(megascend, folder, name, chosen, "--resume", "auto", nproc=nproc)
    uninterrupted = train(megascend, folder, f"{name}-uninterrupted", chosen, nproc=nproc)
    assert [row["loss"] for row in rows] == [row["loss"] for row in uninterrupted]
    adapter = folder / name / "adapter"
    scores = json.loads(reference(SCORED, adapter, small_model))
    assert {key: rows[-1][key] for key in scores} == pytest.approx(scores, rel=1e-4, abs=1e-5)
    merged = folder / f"{name}-merged"
    completed = megascend("export", small_model, merged, "--adapter", adapter, "--dtype", "fp32", "--engine", "single")
    assert completed.returncode == 0, completed.stderr
    assert json.loads(reference(SCORED, merged)) == pytest.approx(scores, rel=1e-4, abs=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapter_with_its_head_trains_as_in_peft(megascend, folder: Path, layout: str) -> None:
    nproc, settings = LAYOUTS[layout]
    lora = [*settings, f"lora.rank={RANK}", "lora.alpha=8"]
    # A step with the learning rate 0 changes nothing: its export is what the other run and peft begin with.
    train(megascend, folder, f"initial-{layout}", [*lora, "steps=1", "optimizer.lr=0"], nproc=nproc)
    rows = train(megascend, folder, f"lora-{layout}", lora, nproc=nproc)
    initial = folder / f"initial-{layout}" / "adapter"
    assert_trained_alike(rows, json.loads(reference(TRAINED, folder / "reward-model", initial)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.path=some_margins.jsonl"], "holds pairs with 'margin' and others without: give each pair one"),
        (["data.path=wide_margin.jsonl"], "'margin' must be a finite number"),
        (["bradley_terry=null"], "or in a run file bradley_terry"),
    ],
)
def test_run_that_cannot_score_is_refused(megascend, folder: Path, settings: list[str], message: str) -> None:
    overrides = [part for setting in settings for part in ("--set", setting)]
    completed = megascend("train", "run.yaml", *overrides, cwd=folder)
    assert completed.returncode == 2, completed.stderr
    assert message in " ".join(completed.stderr.split())
