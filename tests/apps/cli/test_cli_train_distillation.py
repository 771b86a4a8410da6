"""A student learns a teacher's stored distributions with ``megascend train``; scores are those of plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import metrics, reference, sets, write_run

# The student with other weights: a teacher that is sure of some tokens and not of others.
TEACHER = """
import json, sys, torch
import pyarrow as pa
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).float()
with torch.no_grad():
    model.lm_head.weight.add_(0.4 * torch.randn_like(model.lm_head.weight))
model.save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
rows = []
for number in range(28):
    ids = torch.randint(40, 52, (12 + number % 5,))  # few tokens: what follows one can be learned
    with torch.no_grad():
        top = model(ids[None]).logits[0, :-1].log_softmax(-1).topk(8 + number % 3)
    rows.append({"token_ids": ids.tolist(), "prompt_length": 2, "top_ids": [[], *top.indices.tolist()],
                 "top_logprobs": [[], *top.values.tolist()]})
with open(sys.argv[3] + "/train.jsonl", "w") as file:
    file.writelines(json.dumps(row) + chr(10) for row in rows[:24])
parquet.write_table(pa.Table.from_pylist(rows[24:]), sys.argv[3] + "/held_out.parquet")
"""
# KL(teacher || student) with the tokens that are no candidates as one, and over the whole vocabulary.
SCORE = """
import sys, torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM
teacher, student = (AutoModelForCausalLM.from_pretrained(path).double() for path in sys.argv[1:3])
bound = exact = count = 0.0
for row in parquet.read_table(sys.argv[3]).to_pylist():
    ids = torch.tensor(row["token_ids"])
    with torch.no_grad():
        q, p = (model(ids[None]).logits[0].softmax(-1) for model in (teacher, student))
    for position in range(row["prompt_length"], len(ids)):
        a, b, top = q[position - 1], p[position - 1], torch.tensor(row["top_ids"][position])
        exact += float((a * (a / b).log()).sum())
        rest = 1 - a[top].sum(), 1 - b[top].sum()
        bound += float((a[top] * (a[top] / b[top]).log()).sum() + rest[0] * (rest[0] / rest[1]).log())
        count += 1
print([bound / count, exact / count])
"""


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with a teacher, its distributions, and a run file."""
    path = tmp_path_factory.mktemp("distillation")
    reference(TEACHER, small_model, path / "teacher", path)
    write_run(
        path,
        model=str(small_model),
        data={"path": "train.jsonl", "global_batch_size": 8},
        validation={"path": "held_out.parquet", "every": 40},
        distillation={"loss": "forward_kl"},
        steps=40,
        optimizer={"lr": 0.01},
    )
    return path


def scores(folder: Path, student: Path) -> list[float]:
    return reference(SCORE, folder / "teacher", student, folder / "held_out.parquet")


@pytest.mark.nightly_cases("megatron")  # covered: a teacher beside the student; step/test_distillation.py
@pytest.mark.parametrize("engine", ["megatron", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_student_learns_the_teachers_distributions(megascend, engine: str, small_model: Path, folder: Path) -> None:
    arguments = [*sets(f"output={engine}", f"engine={engine}"), "--nproc", "2"]
    megascend("train", "run.yaml", *arguments, cwd=folder)
    rows = metrics(folder / engine)
    assert rows[-1]["loss"] < rows[0]["loss"] / 3
    assert 0 < rows[0]["student_mass"] < rows[-1]["student_mass"] < 1
    before, after = scores(folder, small_model), scores(folder, folder / engine / "hf")
    assert rows[-1]["validation_loss"] == pytest.approx(after[0], rel=1e-3)
    assert after[0] < after[1] < before[1] / 1.5


@pytest.mark.nightly_cases("megatron", "fsdp")  # covered: single; the gradients of both by train/test_teacher_model.py
@pytest.mark.parametrize("engine", ["megatron", "fsdp", "single"])
def test_student_learns_the_distributions_of_a_teacher_beside_it(
    megascend, engine: str, small_model: Path, folder: Path
) -> None:
    """The divergence is over the whole vocabulary, as plain transformers measures it."""
    output = f"taught-{engine}"
    columns = "data.columns={token_ids: token_ids, prompt_length: prompt_length}"
    changes = [f"output={output}", f"engine={engine}", "distillation.teacher=teacher", columns]
    ranks = "1" if engine == "single" else "2"
    megascend("train", "run.yaml", *sets(*changes), "--nproc", ranks, cwd=folder)
    rows = metrics(folder / output)
    assert rows[-1]["loss"] < rows[0]["loss"] / 3
    before, after = scores(folder, small_model), scores(folder, folder / output / "hf")
    assert rows[-1]["validation_loss"] == pytest.approx(after[1], rel=1e-3)
    assert after[1] < before[1] / 1.5
