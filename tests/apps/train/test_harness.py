"""Tasks of lm-eval-harness that cannot be measured are refused by name."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest

from megascend.apps.train import preflight
from megascend.apps.train.harness import TaskSuite, sampling_params
from megascend.config import RunConfig, ValidationTasks
from megascend.errors import EvaluationError, MissingDependencyError
from support.task_files import write_task


def task_file(folder: Path, **settings: object) -> str:
    """Write a task of two documents and return its file."""
    documents = [{"q": "a", "a": "b"}, {"q": "c", "a": "d"}]
    return write_task(folder, documents, "acc mean true", **settings)


def test_data_sets_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    file = task_file(tmp_path, dataset_path="nobody/nothing", dataset_kwargs={})
    with pytest.raises(EvaluationError, match=r"small.yaml cannot be loaded: .*Offline.*nothing is downloaded"):
        TaskSuite(ValidationTasks(names=(file,)), "validation.tasks")
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False


def test_tasks_and_metrics_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"--tasks: .*missing.yaml is not a file"):
        TaskSuite(ValidationTasks(names=(str(tmp_path / "missing.yaml"),)), "--tasks")
    suite = TaskSuite(ValidationTasks(names=(task_file(tmp_path),), fewshot=0), "validation.tasks")
    suite.check_metric("small/acc")
    with pytest.raises(EvaluationError, match="no task has small/accuracy; they have: small/acc"):
        suite.check_metric("small/accuracy")


def test_generation_settings_without_an_effect_pass_and_others_are_refused() -> None:
    params = sampling_params({"do_sample": True, "temperature": 0.5, "top_p": 0.9, "num_beams": 1}, 8, ("\n",), 3)
    assert (params.temperature, params.top_p, params.max_tokens, params.stop) == (0.5, 0.9, 8, ("\n",))
    assert sampling_params({"do_sample": False, "temperature": 0.5}, 8, (), 3).temperature == 0
    with pytest.raises(EvaluationError, match=r"repetition_penalty: 1\.2, which the sampler does not have"):
        sampling_params({"repetition_penalty": 1.2}, 8, (), 3)


def test_missing_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "is_installed", lambda name: name != "lm_eval")
    settings = {"model": "m", "output": "o", "data": {"path": "d.jsonl"}, "plot": False}
    config = RunConfig.model_validate(settings | {"validation": {"tasks": {"names": ["small"]}}})
    with pytest.raises(
        MissingDependencyError, match=r"validation.tasks needs lm_eval .*pip install 'megascend\[eval\]'"
    ):
        preflight.check_packages(config)
    preflight.check_packages(RunConfig.model_validate(settings))
