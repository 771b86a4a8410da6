"""``megascend train`` with ``classification``: trained as transformers' classifiers, peft and AdamW do, and exported for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megascend.testing.reference import run_reference

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
STEPS, LR, DECAY, RANK = 3, 0.005, 0.1, 2

HEAD = """
import json, sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
texts, targets = json.loads(sys.argv[1])
def batch_of(tokenizer):
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    return batch | {"labels": torch.tensor(targets) if isinstance(targets[0], int) else torch.tensor(targets).float()}
"""

# Arguments: samples, a language model, the classifier to write, its problem type.
NEW = (
    HEAD
    + """
torch.manual_seed(3)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
model = AutoModelForSequenceClassification.from_pretrained(
    sys.argv[2], id2label=dict(enumerate(NAMES)), label2id={name: label for label, name in enumerate(NAMES)},
    problem_type=sys.argv[4], dtype=torch.float32, pad_token_id=tokenizer.pad_token_id,
)
torch.nn.init.normal_(model.score.weight, std=0.2)
model.save_pretrained(sys.argv[3])
tokenizer.save_pretrained(sys.argv[3])
"""
)

# Arguments: samples, a classifier, a file for its weights, and an adapter that is trained in its place, or nothing.
TRAINED = (
    HEAD
    + """
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
    loss = model(**batch_of(tokenizer)).loss
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
)

# Arguments: samples, an export, and the base model if it is an adapter.
SCORED = (
    HEAD
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
        sys.argv[3], num_labels=3, dtype=torch.float32, pad_token_id=tokenizer.pad_token_id
    )
    model = PeftModel.from_pretrained(model, sys.argv[2])
model.eval()
with torch.no_grad():
    output = model(**batch_of(tokenizer))
figures, labels, logits = {"validation_loss": float(output.loss)}, torch.tensor(targets), output.logits
if isinstance(targets[0], int):
    figures["validation_accuracy"] = float((logits.argmax(-1) == labels).float().mean())
    truth, guess = (torch.nn.functional.one_hot(values, 3).bool() for values in (labels, logits.argmax(-1)))
else:
    truth, guess = labels > 0.5, logits.sigmoid() > 0.5
    figures["validation_accuracy"] = float((truth == guess).float().mean())
    figures["validation_exact_match"] = float((truth == guess).all(-1).float().mean())
scores = []
for column in range(3):
    hits, claims, members = (truth & guess)[:, column].sum(), guess[:, column].sum(), truth[:, column].sum()
    if claims + members:
        scores.append(float(2 * hits / (claims + members)))
figures["validation_macro_f1"] = sum(scores) / len(scores)
print(json.dumps([figures, logits.tolist(), model.config.id2label, model.config.problem_type]))
"""
)


def reference(program: str, problem_type: str, *arguments: Path | str) -> str:
    """Return the last line that a program of transformers prints."""
    constants = f"NAMES, STEPS, LR, DECAY = {NAMES}, {STEPS}, {LR}, {DECAY}\n"
    samples = json.dumps([TEXTS, TARGETS[problem_type]])
    completed = run_reference(constants + program, samples, *arguments)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return completed.stdout.splitlines()[-1] if completed.stdout else ""


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with classifiers, data and a run file for each kind of label."""
    tmp_path = tmp_path_factory.mktemp("classification")
    for problem_type, labels in LABELS.items():
        rows = [json.dumps({"text": text, "label": label}) + "\n" for text, label in zip(TEXTS, labels, strict=True)]
        (tmp_path / f"{problem_type}.jsonl").write_text("".join(rows))
        (tmp_path / f"{problem_type}-held-out.jsonl").write_text("".join(rows))
        reference(NEW, problem_type, small_model, tmp_path / problem_type, problem_type)
        settings = {
            "model": problem_type,
            "output": "out",
            "steps": STEPS,
            "platform": "cpu",
            "precision": "fp32",
            "optimizer": {"lr": LR, "weight_decay": DECAY, "max_grad_norm": 1.0},
            "data": {"path": f"{problem_type}.jsonl", "global_batch_size": len(TEXTS)},
            "batching": {"micro_batch_tokens": 40},
            "validation": {"path": f"{problem_type}-held-out.jsonl"},
            "classification": {"problem_type": problem_type},
            "plot": False,
            "self_check": False,
        }
        (tmp_path / f"{problem_type}.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def train(
    megascend, folder: Path, problem_type: str, name: str, settings: Sequence[str], *options: str, nproc: int = 1
) -> list[dict]:
    """Return the metrics of a run into ``name``."""
    overrides = [part for setting in (f"output={name}", *settings) for part in ("--set", setting)]
    launcher = ["--nproc", str(nproc)] if nproc > 1 else []
    completed = megascend("train", f"{problem_type}.yaml", *launcher, *options, *overrides, cwd=folder)
    assert completed.returncode == 0, completed.stderr
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def assert_trained_alike(
    rows: list[dict], weights: dict[str, torch.Tensor], expected: list[list[float]], expected_file: Path
) -> None:
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx([norm for _, norm in expected], rel=1e-4)
    torch.testing.assert_close(weights, load_file(expected_file), rtol=1e-3, atol=2e-4)


LAYOUTS = {
    "single": (1, ["engine=single"]),
    "fsdp": (2, ["engine=fsdp"]),
    "TP2": (2, ["engine=megatron", "parallel.tensor=2"]),
    "TP2-SP": (2, ["engine=megatron", "parallel.tensor=2", "parallel.sequence=true"]),
    "PP2": (2, ["engine=megatron", "parallel.pipeline=2"]),
    "DP2, padded": (2, ["engine=megatron", "batching.packing=false"]),
    "CP2": (2, ["engine=megatron", "parallel.context=2"]),
}
IN_CI = {("single", MULTI), ("fsdp", SINGLE), ("TP2-SP", SINGLE)}
KINDS = [(layout, kind) for layout in LAYOUTS for kind in (SINGLE, MULTI)] + [
    ("single", REGRESSION),
    ("TP2", REGRESSION),
]


@pytest.mark.parametrize(
    ("layout", "kind"), [pytest.param(*case, marks=[] if case in IN_CI else pytest.mark.nightly) for case in KINDS]
)
def test_classifier_trains_and_scores_as_transformers(
    megascend, folder: Path, tmp_path: Path, layout: str, kind: str
) -> None:
    nproc, settings = LAYOUTS[layout]
    name = f"{layout}-{kind}"
    rows = train(megascend, folder, kind, name, settings, nproc=nproc)
    expected = json.loads(reference(TRAINED, kind, folder / kind, tmp_path / "weights"))
    assert_trained_alike(rows, load_file(folder / name / "hf" / "model.safetensors"), expected, tmp_path / "weights")
    figures, _, names, problem_type = json.loads(reference(SCORED, kind, folder / name / "hf"))
    if kind == REGRESSION:
        figures = {"validation_loss": figures["validation_loss"]}
    assert {name: rows[-1][name] for name in figures} == pytest.approx(figures, rel=1e-4, abs=1e-5)
    assert (list(names.values()), problem_type) == (NAMES, kind)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [SINGLE, MULTI])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapter_with_its_head_trains_as_in_peft(
    megascend, folder: Path, tmp_path: Path, layout: str, kind: str
) -> None:
    """The head has more labels than the adapter has ranks."""
    nproc, settings = LAYOUTS[layout]
    lora = [*settings, f"lora.rank={RANK}", "lora.alpha=8"]
    # A step with the learning rate 0 changes nothing: its export is what the other run and peft begin with.
    initial, name = f"initial-{layout}-{kind}", f"lora-{layout}-{kind}"
    train(megascend, folder, kind, initial, [*lora, "steps=1", "optimizer.lr=0"], nproc=nproc)
    rows = train(megascend, folder, kind, name, lora, nproc=nproc)
    expected = json.loads(reference(TRAINED, kind, folder / kind, tmp_path / "weights", folder / initial / "adapter"))
    trained = load_file(folder / name / "adapter" / "adapter_model.safetensors")
    assert_trained_alike(rows, trained, expected, tmp_path / "weights")


@pytest.mark.nightly
def test_metric_of_labels_ends_a_run_without_improvement(megascend, folder: Path) -> None:
    """Train with learning rate 0: the third measurement is the second without an improvement."""
    settings = ["engine=single", "steps=9", "optimizer.lr=0", "validation.every=1", "validation.patience=2"]
    rows = train(megascend, folder, SINGLE, "patient", [*settings, "validation.metric=macro_f1"])
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert len({row["validation_macro_f1"] for row in rows}) == 1
