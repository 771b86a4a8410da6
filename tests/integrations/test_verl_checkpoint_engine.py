"""verl's checkpoint engine ``megascend`` in the real verl: its registry, its topology, two actors and two rollout workers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("MEGASCEND_VERL_PYTHON") or ROOT / ".venv-verl" / "bin" / "python")
NAMES = ["embed", "odd", "norm", "none", "scale", "head"]
OK, SENDER_RESULT, RECEIVER_RESULT = ["ok", None], ["ok", 6], ["ok", NAMES]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Run tests/integrations/verl_updates.py once (verl's import takes most of the time); return its report."""
    if not PYTHON.exists():
        pytest.skip(
            f"no verl: {PYTHON} does not exist; bash scripts/verl_env.sh makes it, or set MEGASCEND_VERL_PYTHON"
        )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        [PYTHON, Path(__file__).with_name("verl_updates.py")],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads(completed.stdout[completed.stdout.index('{"registered"') :])


@pytest.mark.parametrize("version", [1, 2])
def test_every_worker_receives_every_tensor(report: dict[str, Any], version: int) -> None:
    """Send two updates to the same workers; the second one is staged."""
    assert report[f"connect {version}"] == [OK] * 4
    assert report[f"update {version}"] == [SENDER_RESULT, SENDER_RESULT, RECEIVER_RESULT, RECEIVER_RESULT]
    assert report[f"finalize {version}"] == [OK] * 4


@pytest.mark.parametrize(("case", "given_out"), [("flipped", 5), ("flipped, staged", 0)])
def test_a_flipped_bit_is_an_error_before_the_tensor_is_given_out(
    report: dict[str, Any], case: str, given_out: int
) -> None:
    """Raise before the tensor is yielded or, staged, before any is."""
    sender, other, *receivers = report[case]
    for worker, (kind, text) in enumerate(receivers):
        assert kind == "DigestError"
        assert text.startswith(f"after {given_out} tensors: receiver {worker + 1} (rollout worker {worker}")
        assert "batch 2: a digest is" in text
    assert sender[0] == "PeerLostError"
    assert "has failed: DigestError" in sender[1]
    assert other == SENDER_RESULT  # it has exhausted the generator, and so has the sender


def test_another_version_is_refused(report: dict[str, Any]) -> None:
    for kind, text in report["another version"][2:]:
        assert kind == "VersionError"
        assert text.startswith("after 0 tensors")
        assert text.endswith("version 5 was expected, and 4 arrived")


def test_missing_worker_is_named(report: dict[str, Any]) -> None:
    sender, other, first, _ = report["a worker is missing"]
    for kind, text in (sender, first):  # the side whose deadline passes first notifies the other
        assert kind == "DeadlineError"
        assert "timed out waiting for members to join" in text
        assert text.endswith("receiver 2 (rollout worker 1)")
    assert other == OK


def test_the_next_update_works_after_failures(report: dict[str, Any]) -> None:
    assert report["update 6"] == [SENDER_RESULT, SENDER_RESULT, RECEIVER_RESULT, RECEIVER_RESULT]


def test_a_sender_that_dies_is_named(report: dict[str, Any]) -> None:
    sender, _, *receivers = report["the sender dies"]
    assert sender == ["ended", ""]
    for kind, text in receivers:
        assert kind == "PeerLostError"
        assert "the sender (actor 0" in text
        assert "is gone" in text
    assert report["exit codes"] == [9, 0, 0, 0]
