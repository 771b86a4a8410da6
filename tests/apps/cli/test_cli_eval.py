"""``megascend eval`` and ``validation.tasks``, compared with lm-eval-harness's own model ``hf`` on the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from support.runs import events, metrics, reference, sets, write_lines, write_run

ANSWERS = {
    "red dog": " blue",
    "one cat": " three",
    "two suns": " moon",
    "a bird": " red one",
    "no fish": " two",
    "the moon": " cat",
}
LONG = " ".join(["red", "sun", "two", "birds"] * 20)
"""More than the model's context of 256 bytes, so that it is scored in windows."""

REFERENCE = """
import json, os, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
os.chdir(sys.argv[2])
results = simple_evaluate(
    "hf", {"pretrained": sys.argv[1], "dtype": "float32"}, tasks=sys.argv[4:], batch_size=1, device="cpu", bootstrap_iters=0,
    task_manager=TaskManager(include_defaults=False), apply_chat_template=sys.argv[3] == "chat",
)
responses = {task: [document["resps"] for document in part] for task, part in results["samples"].items()}
print(json.dumps({"results": results["results"], "responses": responses}))
"""

# Merged: with an adapter, the harness's own model drops the rows of the vocabulary that the tokenizer does not use.
MERGE = """
import sys
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).float()
PeftModel.from_pretrained(model, sys.argv[2]).merge_and_unload().save_pretrained(sys.argv[3])
AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[3])
"""

TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "num_fewshot": 1,
        "fewshot_split": "test",
        "doc_to_choice": "choices",
        "doc_to_target": "{{choices.index(answer)}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    # Answers of one token to the same question.
    "letters": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}:",
        "doc_to_choice": ["A", "B", "C"],
        "doc_to_target": "{{choices.index(answer)}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "continuations": {
        "output_type": "loglikelihood",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}
FILES = [f"{name}.yaml" for name in TASKS]
INTERVAL = 10


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create tasks of every kind about questions, and a run file that learns their answers."""
    tmp_path = tmp_path_factory.mktemp("eval")
    answers = list(ANSWERS.values())
    lines = [
        {
            "question": question,
            "answer": answer,
            "choices": [answer, answers[number - 1], answers[number - 2]][:: 1 if number % 2 else -1],
            "text": LONG if number == 0 else f"{question} and {question}",
        }
        for number, (question, answer) in enumerate(ANSWERS.items())
    ]
    write_lines(tmp_path / "documents.jsonl", lines)
    write_lines(tmp_path / "data.jsonl", ({"text": f"{question}\n{answer}\n"} for question, answer in ANSWERS.items()))
    for name, settings in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": "documents.jsonl"}},
            "test_split": "test",
            "doc_to_text": "{{question}}\n",
            "doc_to_target": "{{answer}}",
            "target_delimiter": "",
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(common | settings))
    write_run(
        tmp_path,
        model=str(small_model),
        output="run",
        data={"path": "data.jsonl", "global_batch_size": 6},
        validation={
            "tasks": {"names": FILES},
            "every": INTERVAL,
            "at_start": True,
            "metric": "continuations/acc",
            "keep_best": True,
        },
        steps=6 * INTERVAL,
        engine="single",
        optimizer={"lr": 0.01},
    )
    return tmp_path


def harness(folder: Path, model: Path, *, chat: bool = False) -> dict:
    """Return the metrics and responses of the harness's own model."""
    return reference(REFERENCE, model, folder, "chat" if chat else "plain", *FILES)


def flat(values: list) -> list:
    """Return what nested lists hold, in order."""
    return [part for value in values for part in (flat(value) if isinstance(value, list) else [value])]


@pytest.fixture(scope="module")
def trained(megascend, folder: Path) -> Path:
    completed = megascend("train", "run.yaml", cwd=folder)
    (folder / "run" / "stdout").write_text(completed.stdout)
    return folder / "run"


@pytest.fixture(scope="module")
def expected(folder: Path, trained: Path) -> dict:
    return harness(folder, trained / "hf")


def test_tasks_in_training_are_those_of_the_harness_and_decide_the_best_checkpoint(
    folder: Path, trained: Path, expected: dict
) -> None:
    measured = {row["step"]: row for row in metrics(trained) if "tasks/continuations/acc" in row}
    assert list(measured) == list(range(INTERVAL, 6 * INTERVAL + 1, INTERVAL))
    accuracies = [row["tasks/continuations/acc"] for row in measured.values()]
    assert min(accuracies) < max(accuracies)
    best = list(measured)[accuracies.index(max(accuracies))]
    output = (trained / "stdout").read_text()
    # Later ones that are as good are no improvement.
    assert f"exporting step {best}, the best one" in output or best == 6 * INTERVAL
    for task, figures in expected["results"].items():
        names = {entry["metric"] for entry in TASKS[task]["metric_list"]}
        for name in names:
            assert measured[best][f"tasks/{task}/{name}"] == pytest.approx(figures[f"{name},none"], rel=1e-5), name
    assert "tasks before the first step:" in output
    assert f"tasks after step {best}:" in output
    assert [event["step"] for event in events(trained, "tasks_measured")] == [0, *measured]


@pytest.mark.parametrize(
    "layout",
    [
        ["--engine", "single"],
        pytest.param(["--engine", "megatron", "--nproc", "2", "--tensor", "2"], marks=pytest.mark.nightly),
        pytest.param(["--engine", "fsdp", "--nproc", "2"], marks=pytest.mark.nightly),
    ],
    ids=["single", "TP2", "fsdp"],
)
def test_log_probabilities_and_responses_equal_the_harness_on_every_engine(
    megascend, folder: Path, trained: Path, expected: dict, tmp_path: Path, layout: list[str]
) -> None:
    tasks = [argument for name in FILES for argument in ("--tasks", name)]
    out = tmp_path / "report.json"
    completed = megascend(
        "eval", trained, *tasks, "-o", out, "--dtype", "fp32", "--platform", "cpu", *layout, cwd=folder
    )
    report = json.loads(out.read_text())
    check_report(report, expected)
    answers = [document["resps"] for document in report["samples"]["answers"]]
    assert [[" blue"]] in answers
    scores = [
        part
        for task in ("choices", "continuations")
        for part in flat([entry["resps"] for entry in report["samples"][task]])
    ]
    assert {part for part in scores if isinstance(part, bool)} == {True, False}  # continuations that are the greedy one
    assert f"{6 * len(TASKS)} documents" in completed.stdout
    assert "choices/acc" in completed.stdout


@pytest.mark.nightly
def test_adapters_and_conversations_are_measured_as_by_the_harness(
    megascend, folder: Path, small_model: Path, tmp_path: Path
) -> None:
    megascend("train", "run.yaml", *sets("output=lora", "lora.rank=4", "steps=5", "validation=null"), cwd=folder)
    tasks = [argument for name in FILES for argument in ("--tasks", name)]
    common = ("--dtype", "fp32", "--platform", "cpu", "--chat-template", *tasks)
    adapters = ("--adapter", "first=lora", "--adapter", "second=lora")
    out = tmp_path / "report.json"
    megascend("eval", small_model, *adapters, *common, "-o", out, cwd=folder)
    reports = json.loads(out.read_text())
    assert list(reports) == ["first", "second"]
    reference(MERGE, small_model, folder / "lora" / "adapter", tmp_path / "merged")
    expected = harness(folder, tmp_path / "merged", chat=True)
    for report in reports.values():
        check_report(report, expected)


@pytest.mark.nightly
def test_task_that_fails_ends_all_ranks_with_a_checkpoint(megascend, folder: Path) -> None:
    answers = yaml.safe_load((folder / "answers.yaml").read_text())
    answers["generation_kwargs"]["num_beams"] = 4
    (folder / "beams.yaml").write_text(yaml.safe_dump(answers))
    settings = ["output=beams", "engine=megatron", "validation={tasks: {names: [beams.yaml]}, every: 3}"]
    completed = megascend("train", "run.yaml", "--nproc", "2", *sets(*settings), cwd=folder, code=2)
    assert "EvaluationError" in completed.stderr
    assert "num_beams: 4, which the sampler does not have" in completed.stderr
    assert [path.name for path in (folder / "beams" / "checkpoints").glob("step-*")] == ["step-00000003"]


def check_report(report: dict, expected: dict) -> None:
    """Compare log-probabilities, responses and metrics with the reference's."""
    for task, expected_documents in expected["responses"].items():
        documents = [document["resps"] for document in report["samples"][task]]
        if task == "answers":
            assert documents == expected_documents
            continue
        for response, expected_response in zip(flat(documents), flat(expected_documents), strict=True):
            # Log-probabilities, which the reference sums in fp32, and if a continuation is the greedy one.
            assert response == pytest.approx(expected_response, abs=1e-4, rel=1e-6)
    for task, figures in expected["results"].items():
        for name in (entry["metric"] for entry in TASKS[task]["metric_list"]):
            assert report["results"][task][f"{name},none"] == pytest.approx(figures[f"{name},none"], rel=1e-5)
