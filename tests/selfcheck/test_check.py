"""When the check runs, what is kept of it, and how every rank hears of it. What it finds: test_findings.py."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from megascend import Batching, Parallel
from megascend.app.ahead import SelfCheckAhead
from megascend.app.preflight import RunPlan, check_run
from megascend.app.train import train
from megascend.config import RunConfig
from megascend.errors import CheckpointError, PlatformError, SelfCheckError
from megascend.selfcheck import check, process
from megascend.selfcheck.process import TrialReport, TrialResult
from megascend.selfcheck.verdict import Verdict
from megascend.testing import run_distributed, tiny_config, write_tiny_checkpoint
from megascend.testing.self_checks import slice_of

ROOT = Path(__file__).resolve().parents[2]
QWEN = tiny_config("qwen3")
AGREES = TrialResult(lengths=[3, 40], alone=[1e-7, 2e-7], together=[1e-7, 3e-7], largest_logit=7.0)
DIFFERS = TrialResult(lengths=[3, 40], alone=[1e-7, 2e-7], together=[0.5, 3e-7], largest_logit=7.0)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path))
    return tmp_path / "self-check"


def examine(config=QWEN, longest=512) -> Verdict:
    return check.examine(config, config, longest, False)


def counted(monkeypatch, findings: list[TrialResult], log: Path | None = None) -> list[int]:
    """Replace the worker; returns the numbers of trials that it was asked for."""
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


def test_whatever_a_verdict_depends_on_is_in_its_key(monkeypatch) -> None:
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


def test_processes_that_start_at_once_check_once(folder, monkeypatch, tmp_path) -> None:
    counted(monkeypatch, [AGREES], log=tmp_path / "log")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=examine) for _ in range(6)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(60)
        assert each.exitcode == 0
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_damaged_file_is_made_again(folder, monkeypatch) -> None:
    calls = counted(monkeypatch, [AGREES])
    examine()
    (file,) = folder.iterdir()
    for text in ("", "[]", '{"status": "agrees"}'):
        file.write_text(text)
        assert examine().status == "agrees"
    assert calls == [1, 1, 1, 1]
    assert json.loads(file.read_text())["status"] == "agrees"


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "file"))
    counted(monkeypatch, [AGREES])
    assert examine().status == "agrees"
    assert "could not be stored" in caplog.text


def test_a_worker_that_dies_is_no_verdict_to_keep(folder, monkeypatch) -> None:
    def run(trials, worker=None):
        raise PlatformError("its process has ended with exit code -9")

    monkeypatch.setattr(process, "run", run)
    verdict = examine()
    assert (verdict.status, verdict.reason) == ("not checked", "its process has ended with exit code -9")
    assert list(folder.iterdir()) == []


def test_the_place_of_the_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("MEGASCEND_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check.cache_folder() == tmp_path / "megascend" / "self-check"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert check.cache_folder() == Path.home() / ".cache" / "megascend" / "self-check"


def test_a_difference_of_mixed_micro_batches_is_told_as_such(folder, monkeypatch) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    config = QWEN | {"max_position_embeddings": 8192, "rope_scaling": rope}
    counted(monkeypatch, [DIFFERS, AGREES])
    verdict = check.examine(config, config, 8192, False)
    assert (verdict.status, verdict.mixed_only) == ("differs", True)
    text = str(check.objection(verdict, config, process.versions()))
    assert "when short and long samples share a micro batch (each by itself is right)" in text


# --- through the backend ---


def plan_of(config: RunConfig) -> RunPlan:
    return check_run(config, 1, overwrite=False)


def backend_of(model: Path, **options):
    from megascend.backends import MegatronBackend

    return MegatronBackend(model=model, precision="fp32", timeout_s=60, **options)


@pytest.mark.usefixtures("megatron_imported")
class TestBackend:
    def test_every_rank_hears_the_same_and_training_never_begins(self, parity_folder, folder) -> None:
        """The whole way, with a real setting that Megatron-Core ignores: RoPE on a part of each head in Llama."""
        model = write_tiny_checkpoint(parity_folder / "partial", "llama", partial_rotary_factor=0.5)

        def on_rank() -> str:
            with pytest.raises(SelfCheckError) as caught:
                backend_of(model, parallel=Parallel(tensor=2))
            return str(caught.value)

        found = run_distributed(on_rank, 2, init=False, timeout_s=240)
        assert found[0] == found[1]
        assert "partial_rotary_factor=0.5 (they agree with 1.0)" in found[0]
        assert "self_check: off" in found[0]
        # Kept: this process is told without another look.
        with pytest.raises(SelfCheckError, match="partial_rotary_factor"):
            backend_of(model)
        with backend_of(model, self_check=False) as backend:
            assert backend.self_check.summary() == "self-check: off"

    def test_what_was_checked_can_be_read(self, parity_folder, caplog) -> None:
        model = write_tiny_checkpoint(parity_folder / "qwen3", "qwen3")
        with backend_of(model) as backend:
            verdict = backend.self_check
        assert "self-check" not in caplog.text
        assert "prove" not in caplog.text
        assert verdict.status == "agrees"
        assert verdict.largest is not None
        assert verdict.largest < process.BOUND / 2
        assert verdict.lengths == [3, 8, 13, 40, 48]

    def test_a_verdict_asked_for_ahead_is_the_one_that_the_backend_looks_for(self, parity_folder, folder, monkeypatch):
        calls = counted(monkeypatch, [AGREES])
        monkeypatch.setattr(process, "start_worker", lambda *_: None)
        model = write_tiny_checkpoint(parity_folder / "qwen3", "qwen3")
        run = RunConfig.model_validate({"model": model, "output": folder, "data": {"path": "chat.jsonl"}})
        for rank, config in ((1, run), (0, run.model_copy(update={"self_check": False})), (0, run)):
            ahead = SelfCheckAhead(plan_of(config), rank)
            ahead.begin()
            if ahead.thread is not None:
                ahead.thread.join(60)
        assert calls == [1]
        with backend_of(model, batching=run.batching) as backend:
            assert backend.self_check.cached
        assert calls == [1]

    def test_a_worker_that_stood_by_makes_the_verdict_and_the_next_run_needs_none(self, parity_folder, folder):
        model = write_tiny_checkpoint(parity_folder / "qwen3", "qwen3")
        run = plan_of(RunConfig.model_validate({"model": model, "output": folder, "data": {"path": "chat.jsonl"}}))
        ahead = SelfCheckAhead(run, 0)
        (worker,) = workers()
        ahead.begin()
        ahead.thread.join(120)
        assert not ahead.thread.is_alive()
        assert not worker.is_running()
        (kept,) = folder.glob("*.json")
        assert json.loads(kept.read_text())["status"] == "agrees"
        SelfCheckAhead(run, 0)
        assert workers() == []

    def test_a_backend_that_imports_megatron_has_one_stand_by_meanwhile_the_first_time(self, parity_folder, folder):
        model = write_tiny_checkpoint(parity_folder / "qwen3", "qwen3")
        environment = os.environ | {"MEGASCEND_CACHE": str(folder / "new")}
        for verdict in (["agrees", False, [False]], ["agrees", True, []]):
            command = [sys.executable, "-c", EARLY_WORKER, str(model)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
            assert done.returncode == 0, done.stderr[-3000:]
            assert json.loads(done.stdout.splitlines()[-1]) == verdict

    def test_a_run_that_is_refused_leaves_no_worker(self, parity_folder, folder, monkeypatch):
        started, worker = [], process.Worker
        monkeypatch.setattr(process, "Worker", lambda: started.append(worker()) or started[-1])
        model, data = write_tiny_checkpoint(parity_folder / "qwen3", "qwen3"), folder.parent / "chat.jsonl"
        data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
        run = {"model": model, "output": folder.parent / "run", "data": {"path": data}, "platform": "cpu"}
        with pytest.raises(CheckpointError, match="vocabulary is missing"):
            train(RunConfig.model_validate(run))
        assert len(started) == 1
        assert workers() == []

    def test_a_worker_that_is_not_asked_is_ended(self, parity_folder, folder):
        """Mistral's configuration has a sliding window where the file says nothing of one."""
        model = shutil.copytree(write_tiny_checkpoint(parity_folder / "qwen3", "qwen3"), folder.parent / "model")
        config = RunConfig.model_validate({"model": model, "output": folder, "data": {"path": "chat.jsonl"}})
        plan = plan_of(config)
        (model / "config.json").write_text(json.dumps({"model_type": "mistral", "max_position_embeddings": 512}))
        ahead = SelfCheckAhead(plan, 0)
        assert len(workers()) == 1
        ahead.begin()
        assert ahead.thread is None
        assert workers() == []

    def test_no_worker_stands_by_for_what_cannot_be_read_or_is_not_installed(self, parity_folder, folder, monkeypatch):
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

    def test_no_worker_stands_by_where_it_may_not_be_asked(self, parity_folder, folder):
        model = shutil.copytree(write_tiny_checkpoint(parity_folder / "qwen3", "qwen3"), folder.parent / "model")
        raw = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(raw | {"sliding_window": 8}))
        run = {"model": model, "output": folder, "data": {"path": "chat.jsonl"}}
        for settings, rank in (({}, 0), ({"self_check": False}, 0), ({}, 1)):
            SelfCheckAhead(plan_of(RunConfig.model_validate(run | settings)), rank)
        assert workers() == []

    @pytest.mark.nightly
    def test_a_run_without_long_samples_is_checked_without_them(self, parity_folder) -> None:
        model = write_tiny_checkpoint(parity_folder / "qwen3", "qwen3")
        with backend_of(model, batching=Batching(max_length=13)) as backend:
            assert backend.self_check.lengths == [3, 8, 13]


def test_no_process_stands_by_where_a_package_is_missing(tmp_path, monkeypatch):
    """The backend says which, and how to install it."""
    (tmp_path / "config.json").write_text("{}")

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(process.metadata, "version", version)
    assert process.start_worker(tmp_path, None) is None


EARLY_WORKER = """
import json, sys
import psutil
import megascend
from megascend.selfcheck import process
started, worker = [], process.Worker
process.Worker = lambda: started.append("megatron.core" in sys.modules) or worker()
backend = megascend.MegatronBackend(sys.argv[1], platform="cpu", precision="fp32")
assert psutil.Process().children() == []
print(json.dumps([backend.self_check.status, backend.self_check.cached, started]))
backend.close()
"""
"""Prints the verdict, whether it was kept, and of each process that stood by whether Megatron had been imported before."""


def workers() -> list[psutil.Process]:
    """Processes of this one that check."""
    return [each for each in psutil.Process().children() if "megascend.app.self_check_worker" in each.cmdline()]


def told(verdict: Verdict, model_type: str) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megascend.selfcheck")
    logger.addHandler(handler)
    try:
        check.tell(verdict, {"model_type": model_type}, rank=0)
    finally:
        logger.removeHandler(handler)
    return lines


def test_an_unproven_architecture_warns_although_it_agrees() -> None:
    assert told(Verdict("agrees"), "qwen3") == []
    (text,) = told(Verdict("agrees"), "olmoe")
    assert "olmoe is not among the architectures that megascend's tests prove" in text
    assert "agrees with transformers" in text
    (text,) = told(Verdict("off"), "olmoe")
    assert "agrees" not in text


def test_what_was_not_checked_warns() -> None:
    (text,) = told(Verdict("not checked", "no reason"), "qwen3")
    assert "nothing about this qwen3 model was compared with transformers: no reason" in text
    (text,) = told(Verdict("agrees", not_shown="layers from 8 on", layers=8), "qwen3")
    assert "it saw 8 layers of this qwen3 model only: layers from 8 on" in text


def test_the_proven_list_is_what_tests_and_documents_say() -> None:
    from megascend.models import proven
    from megascend.testing.parity import family_matrix, matrix

    assert {architecture.model_type for architecture in proven()} == {
        case.arch for case in [*matrix(), *family_matrix()]
    }
    names = "Qwen2, Qwen3, Qwen3-MoE"
    for text in ((ROOT / "README.md").read_text(), (ROOT / "docs" / "support.md").read_text()):
        assert names in text


@pytest.mark.parametrize("value", ["off", "on", False, True])
def test_the_setting_of_a_run_file(value, tmp_path) -> None:
    config = RunConfig(model=tmp_path, output=tmp_path, data={"path": tmp_path}, self_check=value)
    assert config.self_check is (value in ("on", True))


def test_the_worker_does_not_outlive_the_process(tmp_path) -> None:
    """A check in the background is not asked when the process ends."""
    program = """
import sys, threading, time
from megascend.selfcheck import process
from megascend.selfcheck.process import Trial
sys.executable = sys.argv[1]
threading.Thread(target=lambda: process.run([Trial({}, [3])]), daemon=True).start()
while not open(sys.argv[2], "a+").tell():
    time.sleep(0.01)
"""
    pid, worker = tmp_path / "pid", tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 600\n")
    worker.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", program, str(worker), str(pid)], timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
