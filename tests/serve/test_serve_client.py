"""The real Tinker client, unmodified, against a service on two ranks, and transformers, peft and AdamW beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_ranks import service, training_job, written

from forked_programs import environment, run_forked
from megascend.config import Parallel
from megascend.config.serve import ServeConfig
from megascend.serve.names import CheckpointPath
from megascend.testing import write_tiny_checkpoint
from megascend.testing.reference import run_reference

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServeConfig]]:
    """A service on two tensor parallel ranks."""
    folder = tmp_path_factory.mktemp("serve")
    settings = ServeConfig(
        model=model, port=0, storage=folder / "storage", precision="fp32", parallel=Parallel(tensor=2), platform="cpu"
    )
    with service(settings, 2, folder / "run") as url:
        yield url, settings


def test_the_client_trains_as_transformers_peft_and_adamw_do(model, served, tmp_path) -> None:
    url, settings = served
    job = training_job(url, model)
    job_file = written(tmp_path / "job.json", job)
    done = run_forked(HERE / "client_program.py", job_file, tmp_path / "answer.json", variables=environment())
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    check(answer, reference(job_file, answer, settings, tmp_path), job)


def reference(job: Path, answer: dict[str, Any], settings: ServeConfig, folder: Path) -> dict[str, Any]:
    """What the same steps are in transformers, from the adapter that the client began with."""
    start = CheckpointPath.parse(answer["start"]).directory(settings.storage, "alice")
    done = run_reference(HERE / "tinker_reference.py", job, start, folder / "reference.json")
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "reference.json").read_text())


def check(answer: dict[str, Any], expected: dict[str, Any], job: dict[str, Any]) -> None:
    """Every log-probability and loss within 1e-5; loading resumes exactly; a bad request fails its own step only."""
    assert answer["rank"] == job["rank"]
    for wanted, mine, theirs in zip(job["steps"], answer["steps"], expected["steps"], strict=True):
        for one, other in zip(mine["logprobs"], theirs["logprobs"], strict=True):
            assert one == pytest.approx(other, abs=1e-5), wanted
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-5), wanted
    assert answer["forward"] == pytest.approx(expected["forward"], rel=1e-5)
    assert answer["forward of the loaded"] == pytest.approx(answer["forward"], abs=1e-5)
    one, other = answer["both"]
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    check_samples(answer["sampled"], len(job["data"]["cross_entropy"][1][0]))
    (bad, of_bad, why), (step, of_step, _) = answer["failures"]
    assert (bad, of_bad, step, of_step) == ("RequestFailedError", "user", "RequestFailedError", "user")
    assert f"target_ids {job['vocabulary']}" in why
    assert answer["after"] < answer["forward"]
    assert len(answer["checkpoints"]) == 4
    assert answer["left"] == 3


def check_samples(found: dict[str, Any], length: int) -> None:
    """Log-probabilities of sampler and trainer agree; the same seed gives the same tokens; the base model is another one."""
    first, again = found["tokens"]
    assert first == again
    assert [len(each) for each in first] == [6, 6]
    for sampled, trained in zip(found["logprobs"], found["trainer"], strict=True):
        assert sampled == pytest.approx(trained[length - 1 :], abs=1e-5)
    assert found["prompt"][0] is None
    assert found["prompt"][1:] == pytest.approx(found["trainer"][0][: length - 1], abs=1e-5)
    assert found["base"][1] != pytest.approx(found["logprobs"][0], abs=1e-3)
