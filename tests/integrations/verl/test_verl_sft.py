"""verl's SFT trainer, unmodified, on megascend's engine: equal to plain transformers in every layout; killed and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl.workers", reason="no verl in this environment: bash scripts/test_integrations.sh verl")

from verl_runs import DEADLINE_S, environment, logged, python, sft_command, write_data

from support import families

FOLDER = Path(__file__).parent
pytestmark = [pytest.mark.nightly, pytest.mark.torchrun]

TOLERANCE = 1e-5
MOE = "qwen3_moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two models and data, and run transformers on both."""
    directory = tmp_path_factory.mktemp("verl")
    write_data(directory)
    for arch in ("qwen3", MOE):
        size = ["--hidden", "64", "--layers", "2"]
        new_model = python(
            ["-m", "megascend", "new-model", arch, "--arch", arch, *size], directory, VERL_ENGINE_VENDOR=""
        )
        assert new_model.returncode == 0, new_model.stderr
        arguments = [str(directory / arch), "train.parquet", "val.parquet", "2", "8", "1e-2", f"{arch}.json"]
        completed = python([str(FOLDER / "reference_sft.py"), *arguments], directory, VERL_ENGINE_VENDOR="")
        assert completed.returncode == 0, completed.stderr[-4000:]
    return directory


def reference(folder: Path, model: str) -> dict[str, Any]:
    return json.loads((folder / f"{model}.json").read_text())


LAYOUTS = {
    "one rank": ("qwen3", 1, []),
    "DP2": ("qwen3", 2, []),
    "DP2, sequences counted": ("qwen3", 2, ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=2"]),
    "TP2": ("qwen3", 2, ["engine.tensor_model_parallel_size=2"]),
    "PP2": ("qwen3", 2, ["engine.pipeline_model_parallel_size=2"]),
    "CP2": ("qwen3", 2, ["engine.context_parallel_size=2"]),
    "MoE, EP2": (MOE, 2, ["engine.expert_model_parallel_size=2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_norms_are_those_of_transformers(folder: Path, layout: str) -> None:
    model, ranks, settings = LAYOUTS[layout]
    name = f"run {layout}".replace(" ", "-").replace(",", "")
    log = folder / f"{name}.jsonl"
    command = sft_command(folder, model, name, ranks, *settings)
    completed = python(command, folder, VERL_FILE_LOGGER_PATH=str(log))
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]
    assert "verl's engine is megascend" in completed.stdout
    run, expected = logged(log), reference(folder, model)
    assert sorted(run["steps"]) == [1, 2, 3, 4, 5, 6]
    for step, (loss, norm) in enumerate(expected["steps"], 1):
        assert run["steps"][step][0] == pytest.approx(loss, abs=TOLERANCE)
        assert run["steps"][step][1] == pytest.approx(norm, rel=1e-4)
    assert run["validation"][6] == pytest.approx(expected["validation"], abs=TOLERANCE)
    assert (folder / name / "global_step_6" / "megascend").is_dir()


@pytest.fixture
def killed(folder: Path) -> Path:
    """Check a run of two ranks that was killed after its checkpoint of step 4."""
    name = "killed"
    log = folder / "killed.jsonl"
    command = sft_command(folder, "qwen3", name, 2, "trainer.save_freq=2", "trainer.max_ckpt_to_keep=1")
    tracker, end = folder / name / "latest_checkpointed_iteration.txt", time.monotonic() + DEADLINE_S
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    env = environment(VERL_FILE_LOGGER_PATH=str(log))
    with families.started([sys.executable, *command], cwd=folder, env=env, **quiet) as process:  # and killed at its end
        while not (tracker.exists() and tracker.read_text() == "4"):
            assert process.poll() is None, "the run ended before its checkpoint"
            assert time.monotonic() < end
            time.sleep(0.02)
    assert tracker.read_text() == "4", "the run was faster than the kill"
    return folder / name


def test_a_killed_run_resumes_with_the_same_losses(folder: Path, killed: Path) -> None:
    """Keep one checkpoint, as trainer.max_ckpt_to_keep sets; the last one has an export."""
    log = folder / "resumed.jsonl"
    settings = ["checkpoint.save_contents=[model,optimizer,extra,hf_model]"]
    completed = python(sft_command(folder, "qwen3", "killed", 2, *settings), folder, VERL_FILE_LOGGER_PATH=str(log))
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]
    run, expected = logged(log), reference(folder, "qwen3")
    assert sorted(run["steps"]) == [5, 6]
    for step in (5, 6):
        assert run["steps"][step][0] == pytest.approx(expected["steps"][step - 1][0], abs=TOLERANCE)
    assert run["validation"][6] == pytest.approx(expected["validation"], abs=TOLERANCE)
    assert not (killed / "global_step_2").exists()
    assert (killed / "global_step_6" / "huggingface" / "model.safetensors").exists() or list(
        (killed / "global_step_6" / "huggingface").glob("*.safetensors")
    )


def test_a_setting_that_megascend_does_not_have_ends_the_run_by_name(folder: Path) -> None:
    completed = python(sft_command(folder, "qwen3", "refused", 1, "engine.router_replay.mode=R2"), folder)
    assert completed.returncode != 0
    assert "engine.router_replay.mode='R2': R2, which replays" in completed.stderr


def test_verl_does_not_carry_on_without_the_engine(folder: Path) -> None:
    """Raise because Megatron-Core was imported too early; verl itself would only log it at debug level."""
    completed = python(["-c", "import megatron.core, verl; print('carried on')"], folder)
    assert completed.returncode == 1
    assert "carried on" not in completed.stdout
    assert "VERL_ENGINE_VENDOR=megascend: the engine cannot be used" in completed.stderr


def test_without_the_vendor_nothing_is_prepared(folder: Path) -> None:
    program = (
        "import sys, verl; print('megascend.runtime.bootstrap.runtime' in sys.modules, 'megatron.core' in sys.modules)"
    )
    completed = python(["-c", program], folder, VERL_ENGINE_VENDOR="", VERL_PLATFORM="")
    assert completed.stdout.splitlines()[-1] == "False False", completed.stderr[-2000:]
