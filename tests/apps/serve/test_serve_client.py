"""The real, unmodified Tinker client with a service in several layouts, compared with transformers, peft and AdamW."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from serve_ranks import service, training_job, write_json

from megascend.apps.serve.checkpoints import CheckpointPath
from megascend.config import Parallel
from megascend.config.serve import Limits, ServeConfig
from megascend.testing import write_tiny_checkpoint
from megascend.testing.reference import run_reference
from support.forked_programs import environment, run_forked

FOLDER = Path(__file__).parent
CLIENT_S = 600.0
"""Deadline of a client's program: ten times what it takes when the machine has nothing else to do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_hidden_layers=2)


LAYOUTS = {
    "TP2": (2, Parallel(tensor=2)),
    "one rank": (1, Parallel()),
    "PP2": (2, Parallel(pipeline=2)),
    "DP2": (2, Parallel()),
    "CP2": (2, Parallel(context=2)),
}
CLIENTS = (
    sorted(Path(os.environ["MEGASCEND_TINKER_CLIENTS"]).iterdir()) if "MEGASCEND_TINKER_CLIENTS" in os.environ else []
)
"""Environments with clients of other versions, as scripts/test_serve.sh makes them."""


@pytest.fixture(scope="module")
def served(request, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServeConfig]]:
    """Start a service in the layout that the test names, shared by all tests; return address and settings."""
    folder, (ranks, parallel) = tmp_path_factory.mktemp("serve"), LAYOUTS[request.param]
    settings = ServeConfig(
        model=model, port=0, storage=folder / "storage", precision="fp32", parallel=parallel, platform="cpu",
        limits=Limits(models=64),  # clients that end without a word keep theirs for a while
    )  # fmt: skip
    with service(settings, ranks, folder / "run", CLIENT_S * (4 + len(CLIENTS))) as url:
        yield url, settings


IN_CI = "TP2"
in_every_layout = pytest.mark.parametrize(
    "served",
    [pytest.param(layout, marks=[] if layout == IN_CI else pytest.mark.nightly) for layout in LAYOUTS],
    indirect=True,
)


@pytest.mark.core
@in_every_layout
def test_the_client_trains_as_transformers_peft_and_adamw_do(model, served, tmp_path, record_property) -> None:
    compare_with_reference(model, *served, tmp_path, record_property)


@pytest.mark.nightly
@pytest.mark.skipif(
    not CLIENTS, reason="MEGASCEND_TINKER_CLIENTS names no environments (bash scripts/test_serve.sh makes them)"
)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda path: path.name)
@in_every_layout
def test_clients_of_other_versions_do_too(model, served, tmp_path, client, record_property) -> None:
    def run(job_file: Path, answer: Path) -> subprocess.CompletedProcess[str]:
        command = [client / "bin" / "python", FOLDER / "client_program.py", job_file, answer]
        variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=CLIENT_S, check=False)

    assert compare_with_reference(model, *served, tmp_path, record_property, run)["version"] == client.name


Run = Callable[[Path, Path], "subprocess.CompletedProcess[str]"]


def compare_with_reference(
    model: Path,
    url: str,
    settings: ServeConfig,
    folder: Path,
    record: Callable[[str, object], None],
    run: Run | None = None,
) -> dict[str, Any]:
    """Let a client train, and compare with transformers, peft and AdamW; what the client wrote.

    Args:
        record: takes the largest differences by name (pytest's ``--junitxml`` keeps them).
        run: the client's program; default: with the client that is installed here.
    """
    job = training_job(url, model)
    job_file, answer_file = write_json(folder / "job.json", job), folder / "answer.json"
    if run is None:
        completed = run_forked(FOLDER / "client_program.py", job_file, answer_file, variables=environment())
    else:
        completed = run(job_file, answer_file)
    assert completed.returncode == 0, completed.stderr
    answer = json.loads(answer_file.read_text())
    expected = reference(job_file, answer, settings, folder)
    for name, difference in largest_differences(answer, expected).items():
        record(name, f"{difference:.1e}")
    check(answer, expected, job)
    return answer


def largest_differences(answer: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Compute differences of log-probabilities and losses (relative above 1) to the reference, and of sampler to trainer."""
    pairs = list(zip(answer["steps"], expected["steps"], strict=True))
    trained = [
        max_difference(logprobs, reference_logprobs)
        for step, reference_step in pairs
        for logprobs, reference_logprobs in zip(step["logprobs"], reference_step["logprobs"], strict=True)
    ]
    losses = [
        abs(step["loss"] - reference_step["loss"]) / max(1.0, abs(reference_step["loss"]))
        for step, reference_step in pairs
        if step["loss"] is not None
    ]
    samples = answer["sampled"]
    sampled = [
        max_difference(logprobs, reference_logprobs[-len(logprobs) :])
        for logprobs, reference_logprobs in zip(samples["logprobs"], samples["trainer"], strict=True)
    ]
    return {"logprobs": max(trained), "losses": max(losses), "sampler": max(sampled)}


def max_difference(values: Sequence[float], references: Sequence[float]) -> float:
    """Return the largest difference of two lists."""
    return max(abs(value - reference_value) for value, reference_value in zip(values, references, strict=True))


def reference(job: Path, answer: dict[str, Any], settings: ServeConfig, folder: Path) -> dict[str, Any]:
    """Run the same steps in transformers, from the client's initial adapter."""
    start = CheckpointPath.parse(answer["start"]).directory(settings.storage, "alice")
    completed = run_reference(FOLDER / "tinker_reference.py", job, start, folder / "reference.json")
    assert completed.returncode == 0, completed.stderr
    return json.loads((folder / "reference.json").read_text())


def check(answer: dict[str, Any], expected: dict[str, Any], job: dict[str, Any]) -> None:
    """Check log-probabilities and losses to 1e-5, exact resumption, and that a bad request fails only its step."""
    assert answer["rank"] == job["rank"]
    for settings, step, reference_step in zip(job["steps"], answer["steps"], expected["steps"], strict=True):
        for first, second in zip(step["logprobs"], reference_step["logprobs"], strict=True):
            assert first == pytest.approx(second, abs=1e-5), settings
        if step["loss"] is not None:
            assert step["loss"] == pytest.approx(reference_step["loss"], rel=1e-5, abs=1e-5), settings
    assert answer["forward"] == pytest.approx(expected["forward"], rel=1e-5)
    assert answer["forward of the loaded"] == pytest.approx(answer["forward"], abs=1e-5)
    first, second = answer["both"]
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-5)
    check_samples(answer["sampled"], len(job["data"]["cross_entropy"][1][0]))
    (error, category, reason), (step_error, step_category, _) = answer["failures"]
    assert (error, category, step_error, step_category) == ("RequestFailedError", "user", "RequestFailedError", "user")
    assert f"target_ids {job['vocabulary']}" in reason
    assert answer["after"] < answer["forward"]
    assert len(answer["checkpoints"]) == 4
    assert answer["left"] == 3


def check_samples(samples: dict[str, Any], length: int) -> None:
    """Check that sampler and trainer agree, a seed repeats tokens, and the base model differs."""
    first, repeated = samples["tokens"]
    assert first == repeated
    assert [len(layout) for layout in first] == [6, 6]
    for sampled, trained in zip(samples["logprobs"], samples["trainer"], strict=True):
        assert sampled == pytest.approx(trained[length - 1 :], abs=1e-5)
    assert samples["prompt"][0] is None
    assert samples["prompt"][1:] == pytest.approx(samples["trainer"][0][: length - 1], abs=1e-5)
    assert samples["base"][1] != pytest.approx(samples["logprobs"][0], abs=1e-3)
