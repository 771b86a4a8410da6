"""Classifiers and reward models: trained as transformers' classifiers, peft and AdamW do, and exported for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support import runs
from support.runs import metrics, sets, write_lines, write_run

NAMES = ["bad", "fair", "good"]
TEXTS = ["no", "it is well made and I like it", "so so", "broke on day one", "I would buy it again", "ok then", "fine"]
LABELS = {
    # Names, ids and integral floats of tables mean the same.
    "single_label_classification": ["bad", 2, "fair", "bad", 2.0, "1", "good"],
    "multi_label_classification": [["bad"], [1, 2], [], [0, "good"], [True, True, True], ["good"], [0.0, 1.0, 0.0]],
    "regression": [[0.5, -1, 2.0], [1, 1, 1], [0, 0.25, 0], [-3, 1, 4], [1, 5, 9], [0, 0, 0], [2, 6, 5]],
}
TARGETS = {
    "single_label_classification": [0, 2, 1, 0, 2, 1, 2],
    "multi_label_classification": [[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1], [0, 0, 1], [0, 1, 0]],
    "regression": LABELS["regression"],
}
SINGLE, MULTI, REGRESSION = LABELS
REWARD = "reward"
PAIRS = [
    ("one?", " two", " three, or so", 0.5),
    ("red?", " blue and green", " no", 0.0),
    ("up?", " down", " up", 1.0),
    ("left?", " right", " l", 0.25),
    ("in?", " out", " inside of it", 0.125),
]
CENTER, STEPS, LR, DECAY, RANK = 0.05, 3, 0.005, 0.1, 2

# Loss and outputs of a model for the samples, and the figures of a validation.
CLASSIFIER = """
texts, targets = samples
labels = torch.tensor(targets) if isinstance(targets[0], int) else torch.tensor(targets).float()
def outputs(model, tokenizer):
    output = model(**tokenizer(texts, padding=True, return_tensors="pt"), labels=labels)
    return output.loss, output.logits
def figures(loss, logits):
    if problem_type == "regression":
        return {"validation_loss": loss}
    if isinstance(targets[0], int):
        truth, guess = (torch.nn.functional.one_hot(values, 3).bool() for values in (labels, logits.argmax(-1)))
        values = {"validation_accuracy": (logits.argmax(-1) == labels).float().mean()}
    else:
        truth, guess = labels > 0.5, logits.sigmoid() > 0.5
        values = {"validation_accuracy": (truth == guess).float().mean()}
        values["validation_exact_match"] = (truth == guess).all(-1).float().mean()
    scores = []
    for column in range(3):
        hits, claims, members = (truth & guess)[:, column].sum(), guess[:, column].sum(), truth[:, column].sum()
        if claims + members:
            scores.append(float(2 * hits / (claims + members)))
    return values | {"validation_loss": loss, "validation_macro_f1": sum(scores) / len(scores)}
"""
# Tokens of a side: prompt and response together, closed by the end of sequence.
REWARDS = """
def outputs(model, tokenizer):
    rows = [tokenizer(p + side)["input_ids"] + [tokenizer.eos_token_id] for p, *sides, _ in samples for side in sides]
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    chosen, rejected = model(**batch).logits[:, 0].view(-1, 2).unbind(1)
    margins = torch.tensor([margin for *_, margin in samples])
    losses = torch.nn.functional.softplus(margins + rejected - chosen) + CENTER * (chosen + rejected) ** 2
    return losses.mean(), (chosen, rejected)
def figures(loss, sides):
    chosen, rejected = sides
    return {
        "validation_loss": loss,
        "validation_accuracy": (chosen > rejected).float().mean(),
        "validation_reward_chosen": chosen.mean(),
        "validation_reward_rejected": rejected.mean(),
        "validation_reward_margin": (chosen - rejected).mean(),
        "validation_reward_mean": torch.cat([chosen, rejected]).mean(),
    }
"""

# Arguments: samples, a language model, the model with a head to write.
NEW = """
torch.manual_seed(3)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
head = {"num_labels": 1}
if problem_type != "reward":
    ids = dict(enumerate(NAMES))
    head = {"id2label": ids, "label2id": {name: label for label, name in ids.items()}, "problem_type": problem_type}
model = AutoModelForSequenceClassification.from_pretrained(
    sys.argv[2], dtype=torch.float32, pad_token_id=tokenizer.pad_token_id, **head
)
torch.nn.init.normal_(model.score.weight, std=0.2)
model.save_pretrained(sys.argv[3])
tokenizer.save_pretrained(sys.argv[3])
"""

# Arguments: samples, a model with a head, a file for its weights, and an adapter that is trained in its place, or nothing.
TRAINED = """
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
model = AutoModelForSequenceClassification.from_pretrained(
    sys.argv[2], dtype=torch.float32, attn_implementation="eager"
)
if sys.argv[4:]:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, sys.argv[4], is_trainable=True)
parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
matrices = [parameter for parameter in parameters if parameter.dim() > 1]
others = [parameter for parameter in parameters if parameter.dim() == 1]
groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
rows = []
for _ in range(STEPS):
    loss, _ = outputs(model, tokenizer)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    rows.append([float(loss), float(norm)])
    optimizer.step()
    optimizer.zero_grad()
if sys.argv[4:]:
    from peft import get_peft_model_state_dict
    save_file({name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(model).items()}, sys.argv[3])
else:
    save_file(model.state_dict(), sys.argv[3])
print(json.dumps(rows))
"""

# Arguments: samples, an export, and the base model if it is an adapter.
SCORED = """
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
if not sys.argv[3:]:
    model, report = AutoModelForSequenceClassification.from_pretrained(
        sys.argv[2], dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
else:
    from peft import PeftModel
    model = AutoModelForSequenceClassification.from_pretrained(
        sys.argv[3], num_labels=1 if problem_type == "reward" else 3, dtype=torch.float32,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = PeftModel.from_pretrained(model, sys.argv[2])
model.eval()
with torch.no_grad():
    scores = figures(*outputs(model, tokenizer))
scores = {name: float(value) for name, value in scores.items()}
print(json.dumps([scores, model.config.id2label, model.config.problem_type]))
"""


def reference(program: str, kind: str, *arguments: Path | str) -> Any:
    """Return what a program of transformers prints about the samples of ``kind``."""
    constants = f"""
import json, sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
NAMES, CENTER, STEPS, LR, DECAY, problem_type = {NAMES}, {CENTER}, {STEPS}, {LR}, {DECAY}, {kind!r}
samples = json.loads(sys.argv[1])
"""
    samples = PAIRS if kind == REWARD else [TEXTS, TARGETS[kind]]
    model_outputs = REWARDS if kind == REWARD else CLASSIFIER
    return runs.reference(constants + model_outputs + program, json.dumps(samples), *arguments)


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create data and a run file for each kind of label."""
    folder = tmp_path_factory.mktemp("heads")
    for kind in (*LABELS, REWARD):
        if kind == REWARD:
            lines = [dict(zip(("prompt", "chosen", "rejected", "margin"), pair, strict=True)) for pair in PAIRS]
            head: dict[str, Any] = {"bradley_terry": {"center_coefficient": CENTER}}
        else:
            lines = [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS[kind], strict=True)]
            head = {"classification": {"problem_type": kind}}
        write_lines(folder / f"{kind}.jsonl", lines)
        write_lines(folder / f"{kind}-held-out.jsonl", lines)
        write_run(
            folder,
            model=kind,
            steps=STEPS,
            optimizer={"lr": LR, "weight_decay": DECAY, "max_grad_norm": 1.0},
            data={"path": f"{kind}.jsonl", "global_batch_size": len(lines)},
            batching={"micro_batch_tokens": 40},
            validation={"path": f"{kind}-held-out.jsonl"},
            **head,
        )
        (folder / "run.yaml").rename(folder / f"{kind}.yaml")
    return folder


@pytest.fixture
def model(folder: Path, kind: str, small_model: Path) -> Path:
    """Create a model with a head for a kind of label."""
    if not (folder / kind).exists():
        reference(NEW, kind, small_model, folder / kind)
    return folder / kind


LAYOUTS = {
    "single": (1, ["engine=single"]),
    "fsdp": (2, ["engine=fsdp"]),
    "TP2": (2, ["engine=megatron", "parallel.tensor=2"]),
    "TP2-SP": (2, ["engine=megatron", "parallel.tensor=2", "parallel.sequence=true"]),
    "PP2": (2, ["engine=megatron", "parallel.pipeline=2"]),
    "DP2, padded": (2, ["engine=megatron", "batching.packing=false"]),
    "CP2": (2, ["engine=megatron", "parallel.context=2"]),
}
IN_CI = {("single", MULTI), ("TP2-SP", SINGLE)}
CASES = [
    ("single", MULTI),
    *((layout, kind) for layout in LAYOUTS if layout != "single" for kind in (SINGLE, MULTI)),
    *((layout, REWARD) for layout in ("fsdp", "TP2", "TP2-SP", "PP2")),
    *((layout, REGRESSION) for layout in ("fsdp", "TP2")),
]


def train(megascend, folder: Path, kind: str, layout: str, name: str, settings: list[str], *options: str) -> list[dict]:
    """Return the metrics of a run into ``name``."""
    ranks, layout_settings = LAYOUTS[layout]
    overrides = sets(f"output={name}", *layout_settings, *settings)
    megascend("train", f"{kind}.yaml", "--nproc", str(ranks), *options, *overrides, cwd=folder)
    return metrics(folder / name)


def assert_trained_alike(
    rows: list[dict], weights: dict[str, torch.Tensor], expected: list[list[float]], expected_file: Path
) -> None:
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx([norm for _, norm in expected], rel=1e-4)
    torch.testing.assert_close(weights, load_file(expected_file), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("layout", "kind"), [pytest.param(*case, marks=[] if case in IN_CI else pytest.mark.nightly) for case in CASES]
)
def test_model_trains_and_scores_as_in_transformers(
    megascend, folder: Path, model: Path, tmp_path: Path, layout: str, kind: str
) -> None:
    name = f"{layout}-{kind}"
    rows = train(megascend, folder, kind, layout, name, [])
    expected = reference(TRAINED, kind, model, tmp_path / "weights")
    assert_trained_alike(rows, load_file(folder / name / "hf" / "model.safetensors"), expected, tmp_path / "weights")
    figures, names, problem_type = reference(SCORED, kind, folder / name / "hf")
    assert {name: rows[-1][name] for name in figures} == pytest.approx(figures, rel=1e-4, abs=1e-5)
    if kind != REWARD:
        assert (list(names.values()), problem_type) == (NAMES, kind)


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "kind"), [case for case in CASES if case[1] != REGRESSION])
def test_adapter_with_its_head_trains_as_in_peft(
    megascend, folder: Path, model: Path, tmp_path: Path, layout: str, kind: str
) -> None:
    """The head of a classifier has more labels than the adapter has ranks."""
    lora = [f"lora.rank={RANK}", "lora.alpha=8"]
    # A step with the learning rate 0 changes nothing: its export is what the other run and peft begin with.
    initial, name = f"initial-{layout}-{kind}", f"lora-{layout}-{kind}"
    train(megascend, folder, kind, layout, initial, [*lora, "steps=1", "optimizer.lr=0"])
    rows = train(megascend, folder, kind, layout, name, lora)
    expected = reference(TRAINED, kind, model, tmp_path / "weights", folder / initial / "adapter")
    trained = load_file(folder / name / "adapter" / "adapter_model.safetensors")
    assert_trained_alike(rows, trained, expected, tmp_path / "weights")


@pytest.mark.nightly_cases("fsdp", "TP2", "PP2")  # covered: single; layouts of heads by engines/test_scalar_head.py
@pytest.mark.parametrize("layout", ["single", "fsdp", "TP2", "PP2"])
def test_adapter_with_its_head_scores_as_in_peft(megascend, folder: Path, small_model: Path, layout: str) -> None:
    """The base is a language model: only the adapter has a head. A resumed run continues with the head that it trained."""
    chosen, name = [f"model={small_model}", f"lora.rank={RANK}", "seed=7"], f"adapter-{layout}"
    uninterrupted = train(megascend, folder, REWARD, layout, f"{name}-uninterrupted", [*chosen, "checkpoint.every=2"])
    second = f"{name}-uninterrupted/checkpoints/step-00000002"
    rows = train(megascend, folder, REWARD, layout, name, chosen, "--resume", second)
    assert [row["loss"] for row in rows] == [uninterrupted[2]["loss"]]
    adapter = folder / name / "adapter"
    scores, *_ = reference(SCORED, REWARD, adapter, small_model)
    assert {key: rows[-1][key] for key in scores} == pytest.approx(scores, rel=1e-4, abs=1e-5)
    merged = folder / f"{name}-merged"
    megascend("export", small_model, merged, "--adapter", adapter, "--dtype", "fp32", "--engine", "single")
    assert reference(SCORED, REWARD, merged)[0] == pytest.approx(scores, rel=1e-4, abs=1e-5)
