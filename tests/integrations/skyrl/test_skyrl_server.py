"""SkyRL's Tinker server, started by megascend's launcher, with a real client of its protocol version."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "skyrl.tinker.engine", reason="no SkyRL here: bash scripts/test_integrations.sh skyrl", exc_type=ImportError
)

from skyrl_server import served

from support.integration_programs import run

FOLDER = Path(__file__).parent
TENANTS = ("ann", "bob")

pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]


@pytest.fixture(
    scope="module",
    params=[{}, {"ranks": 2, "parallel": {"tensor": 2}}, {"ranks": 2}],
    ids=["1", "TP2", "DP2"],
)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the tenants; return their report, with the folder of the server's files."""
    folder = tmp_path_factory.mktemp("skyrl")
    new_model = [sys.executable, "-m", "megascend.apps.cli.main", "new-model", "model", "--arch", "qwen3"]
    run([*new_model, "--hidden", "64", "--layers", "2"], folder)  # with a tokenizer, which the client loads
    with served(folder, **request.param) as address:
        run([sys.executable, str(FOLDER / "skyrl_tenants.py"), address, str(folder / "model"), "out.json"], folder)
    return {**json.loads((folder / "out.json").read_text()), "folder": folder}


def losses(steps: list[dict[str, float]]) -> list[float]:
    return [step["loss:sum"] for step in steps]


@pytest.mark.parametrize("name", TENANTS)
def test_two_tenants_in_one_batch_learn_as_in_separate_batches(report: dict[str, Any], name: str) -> None:
    single, mixed = report["alone"][name], report["mixed"][name]
    assert {step["models_in_batch:max"] for step in single} == {1.0}
    # SkyRL looks for work every 0.1 s, so that the tenants now and then miss each other
    assert [step["models_in_batch:max"] for step in mixed].count(2.0) >= len(mixed) / 2
    assert losses(mixed) == pytest.approx(losses(single), rel=1e-6)
    assert mixed[-1]["loss:sum"] < mixed[1]["loss:sum"]


@pytest.mark.parametrize("name", TENANTS)
def test_a_tenant_learns_as_with_peft(report: dict[str, Any], name: str) -> None:
    folder = report["folder"]
    model, checkpoint = report["starts"][name].removeprefix("tinker://").split("/")
    with tarfile.open(folder / "checkpoints" / model / "sampler_weights" / f"{checkpoint}.tar.gz") as archive:
        archive.extractall(folder / name, filter="data")
    reference = [sys.executable, str(FOLDER / "reference_tenant.py"), "model", str(folder / name / "adapter"), name]
    assert losses(report["mixed"][name]) == pytest.approx(json.loads(run(reference, folder)), rel=1e-5)


def test_checkpoints_load_and_are_sampled_from(report: dict[str, Any]) -> None:
    observed = report["losses"]
    assert observed["loaded"] == pytest.approx(observed["saved"], rel=1e-6)
    assert observed["trained"] != pytest.approx(observed["saved"], rel=1e-3)
    assert [len(tokens) for tokens in report["responses"]] == [4, 4]
    sampler, trainer = report["prompt_logprobs"]
    assert sampler == pytest.approx(trainer, abs=1e-4)


def test_request_error_reaches_the_client(report: dict[str, Any]) -> None:
    assert "target_tokens" in report["refusal"]
