"""The runs of the check, its cache, and the broadcast to all ranks; test_findings.py covers its results."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megascend import Parallel
from megascend.apps.train.prefetch import SelfCheckPrefetch
from megascend.apps.train.preflight import RunPlan, check_run
from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.errors import CheckpointError, PlatformError, SelfCheckError
from megascend.models import Architecture, registry
from megascend.models.selfcheck import check, process
from megascend.models.selfcheck.process import TrialReport, TrialResult
from megascend.models.selfcheck.verdict import Verdict
from megascend.testing import run_distributed, tiny_config, write_tiny_checkpoint
from megascend.testing.self_checks import slice_of

QWEN = tiny_config("qwen3")
AGREES = TrialResult(lengths=[3, 40], separate=[1e-7, 2e-7], batched=[1e-7, 3e-7], largest_logit=7.0)
DIFFERS = TrialResult(lengths=[3, 40], separate=[1e-7, 2e-7], batched=[0.5, 3e-7], largest_logit=7.0)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Set an empty cache folder."""
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path))
    return tmp_path / "self-check"


def examine(config=QWEN, longest=512) -> Verdict:
    return check.examine(config, config, longest, False)


def counted(monkeypatch, findings: list[TrialResult], log: Path | None = None) -> list[int]:
    """Replace the worker; return the number of trials of each call."""
    calls: list[int] = []

    def run(trials, worker=None):
        calls.append(len(trials))
        if log is not None:
            with log.open("a") as file:
                file.write("made\n")
        return TrialReport([findings[min(index, len(findings) - 1)] for index in range(len(trials))], 1.5, 2**20)

    monkeypatch.setattr(process, "run", run)
    return calls


def test_a_configuration_is_checked_once(folder, monkeypatch) -> None:
    calls = counted(monkeypatch, [AGREES])
    first, second = examine(), examine(QWEN | {"num_hidden_layers": 48, "vocab_size": 50000})
    assert calls == [1]
    assert (first.status, first.largest, first.seconds, first.cached) == ("agrees", 3e-7, 1.5, False)
    assert second == Verdict.from_dict(first.to_dict())
    assert second.cached
    assert "cached" in second.summary()
    assert "1.5 s, 1 MiB" in first.summary()


def test_cache_key_covers_every_input(monkeypatch) -> None:
    part = slice_of(QWEN)
    keys = [
        check.key(part),
        check.key(slice_of(QWEN | {"hidden_act": "gelu"})),
        check.key(slice_of(QWEN, longest=13)),
    ]
    with monkeypatch.context() as changed:
        changed.setattr(process.metadata, "version", lambda name: "9")
        keys.append(check.key(part))
    with monkeypatch.context() as changed:
        changed.setattr(check, "code_digest", lambda: "another check")
        keys.append(check.key(part))
    assert len(set(keys)) == len(keys)
    assert check.key(part) == keys[0]


def test_concurrent_processes_check_once(folder, monkeypatch, tmp_path) -> None:
    counted(monkeypatch, [AGREES], log=tmp_path / "log")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=examine) for _ in range(6)]
    for child in processes:
        child.start()
    for child in processes:
        child.join(60)
        assert child.exitcode == 0
    assert (tmp_path / "log").read_text() == "made\n"


def test_damaged_cache_file_is_rewritten(folder, monkeypatch) -> None:
    calls = counted(monkeypatch, [AGREES])
    examine()
    (file,) = folder.iterdir()
    for text in ("", "[]", '{"status": "agrees"}'):
        file.write_text(text)
        assert examine().status == "agrees"
    assert calls == [1, 1, 1, 1]
    assert json.loads(file.read_text())["status"] == "agrees"


def test_unwritable_cache_logs_a_warning(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "file"))
    counted(monkeypatch, [AGREES])
    assert examine().status == "agrees"
    assert "could not be stored" in caplog.text


def test_failed_worker_caches_no_verdict(folder, monkeypatch) -> None:
    def run(trials, worker=None):
        raise PlatformError("its process has ended with exit code -9")

    monkeypatch.setattr(process, "run", run)
    verdict = examine()
    assert (verdict.status, verdict.reason) == ("not checked", "its process has ended with exit code -9")
    assert list(folder.iterdir()) == []


def test_difference_in_mixed_micro_batches_is_reported(folder, monkeypatch) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    config = QWEN | {"max_position_embeddings": 8192, "rope_scaling": rope}
    counted(monkeypatch, [DIFFERS, AGREES])
    verdict = check.examine(config, config, 8192, False)
    assert (verdict.status, verdict.mixed_only) == ("differs", True)
    text = str(check.objection(verdict, config, process.versions()))
    assert "when short and long samples share a micro batch (each is right in a micro batch of one)" in text


# --- through the backend ---


def plan_of(config: RunConfig) -> RunPlan:
    return check_run(config, 1, overwrite=False)


def backend_of(model: Path, **options):
    from megascend.backends import MegatronBackend

    return MegatronBackend(model=model, precision="fp32", timeout_s=60, **options)


@pytest.mark.usefixtures("megatron_imported")
class TestBackend:
    def test_difference_raises_the_same_error_on_every_rank(self, parity_folder, folder, monkeypatch) -> None:
        """Run the full check with a setting that Megatron-Core ignores, of a family that is declared anew without refusing it."""
        monkeypatch.setitem(registry._from_outside, "glm4_moe", Architecture(("glm4_moe",)))
        model = write_tiny_checkpoint(parity_folder / "scores", "glm4_moe", norm_topk_prob=False)

        def on_rank() -> str:
            with pytest.raises(SelfCheckError) as caught:
                backend_of(model, parallel=Parallel(tensor=2))
            return str(caught.value)

        errors = run_distributed(on_rank, 2, init=False, timeout_s=240)
        assert errors[0] == errors[1]
        assert "norm_topk_prob=False (they agree with True)" in errors[0]
        assert "self_check: off" in errors[0]
        # Cached: this process reads the verdict.
        with pytest.raises(SelfCheckError, match="norm_topk_prob"):
            backend_of(model)
        with backend_of(model, self_check=False) as backend:
            assert backend.self_check.summary() == "self-check: off"

    def test_early_worker_checks_and_next_run_starts_none(self, parity_folder, folder):
        model = write_tiny_checkpoint(parity_folder / "qwen3", "qwen3")
        run = plan_of(RunConfig.model_validate({"model": model, "output": folder, "data": {"path": "chat.jsonl"}}))
        check_ahead = SelfCheckPrefetch(run, 0)
        (worker,) = workers()
        check_ahead.begin()
        check_ahead.thread.join(120)
        assert not check_ahead.thread.is_alive()
        assert not worker.is_running()
        (verdict_file,) = folder.glob("*.json")
        assert json.loads(verdict_file.read_text())["status"] == "agrees"
        SelfCheckPrefetch(run, 0)
        assert workers() == []

    def test_refused_run_leaves_no_worker(self, parity_folder, folder, monkeypatch):
        started, worker = [], process.Worker
        monkeypatch.setattr(process, "Worker", lambda: started.append(worker()) or started[-1])
        model, data = write_tiny_checkpoint(parity_folder / "qwen3", "qwen3"), folder.parent / "chat.jsonl"
        data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
        run = {"model": model, "output": folder.parent / "run", "data": {"path": data}, "platform": "cpu"}
        with pytest.raises(CheckpointError, match="vocabulary is missing"):
            train(RunConfig.model_validate(run))
        assert len(started) == 1
        assert workers() == []

    def test_no_early_worker_for_unreadable_model_or_missing_package(self, parity_folder, folder, monkeypatch):
        model = write_tiny_checkpoint(parity_folder / "qwen3", "qwen3")
        broken = folder.parent / "broken"
        broken.mkdir()
        for text in ("", "[]", "3"):
            (broken / "config.json").write_text(text)
            assert process.start_worker(broken, None) is None
        assert process.start_worker(folder.parent / "nowhere", None) is None
        monkeypatch.setattr(process, "PACKAGES", (*process.PACKAGES, "a-package-that-is-not-installed"))
        assert process.start_worker(model, None) is None
        assert workers() == []


def workers() -> list[psutil.Process]:
    """Return the self-check workers among this process's children."""
    children = psutil.Process().children()
    for child in children:
        # Linux resumes the parent of a vfork before the arguments of the child's program can be read.
        while not child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)
    return [child for child in children if "megascend.apps.train.self_check_worker" in child.cmdline()]


def logged_warnings(verdict: Verdict, model_type: str) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megascend.models.selfcheck")
    logger.addHandler(handler)
    try:
        check.log_warnings(verdict, {"model_type": model_type}, rank=0)
    finally:
        logger.removeHandler(handler)
    return lines


def test_unproven_architecture_warns_even_if_it_agrees() -> None:
    assert logged_warnings(Verdict("agrees"), "qwen3") == []
    (text,) = logged_warnings(Verdict("agrees"), "olmo2")
    assert "olmo2 is not among the architectures that megascend's tests prove" in text
    assert "agrees with transformers" in text
    (text,) = logged_warnings(Verdict("off"), "olmo2")
    assert "agrees" not in text


def test_incomplete_check_warns() -> None:
    (text,) = logged_warnings(Verdict("not checked", "no reason"), "qwen3")
    assert "this qwen3 model was not compared with transformers: no reason" in text
    (text,) = logged_warnings(Verdict("agrees", not_shown="layers from 8 on", layers=8), "qwen3")
    assert "only 8 layers of this qwen3 model were compared: layers from 8 on" in text


def test_worker_ends_with_its_parent(tmp_path) -> None:
    """Leave a check running in the background when the process ends."""
    program = """
import sys, threading, time
from megascend.models.selfcheck import process
from megascend.models.selfcheck.process import Trial
sys.executable = sys.argv[1]
threading.Thread(target=lambda: process.run([Trial({}, [3])]), daemon=True).start()
while not open(sys.argv[2], "a+").tell():
    time.sleep(0.01)
"""
    pid, worker = tmp_path / "pid", tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 600\n")
    worker.chmod(0o755)
    completed = subprocess.run(
        [sys.executable, "-c", program, str(worker), str(pid)], timeout=120, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
