"""An earlier run's files are removed atomically, and only after a new run's first step."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.train.resume import check_start
from megascend.apps.train.run_directory import RUN_FILES, clear_output, lock_output, restore
from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.errors import CheckpointError, ConfigError, NonFiniteError, PlatformError
from megascend.runtime.distributed.launch import Launch
from megascend.testing import faults, run_distributed
from support.run_directory import snapshot
from support.runs import events, metrics, run_config, tiny_run

DEADLINE_S = 240


def earlier(output: Path) -> None:
    """Write files of a run, and one other file."""
    for name in ("metrics.jsonl", "events.jsonl", "hf/config.json", "checkpoints/latest", "notes.txt"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(name)
    (output / "checkpoints" / "step-00000001").mkdir()


@pytest.mark.parametrize("moves", range(7))
def test_interrupted_clear_leaves_all_files_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    earlier(tmp_path)
    before, replace, moved = snapshot(tmp_path), os.replace, []

    def killed(source: Path, target: Path) -> None:
        if len(moved) == moves:
            raise KeyboardInterrupt
        moved.append(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with contextlib.suppress(KeyboardInterrupt):
        clear_output(tmp_path, RUN_FILES)
    monkeypatch.setattr(os, "replace", replace)
    check_start(tmp_path, True, None, Launch())
    assert snapshot(tmp_path) == (before if moves < 5 else {"notes.txt": before["notes.txt"]})


def test_directory_that_another_host_has_locked_is_refused(tmp_path: Path) -> None:
    """The process is in a namespace with another host name, as in another container: its number says nothing here."""
    program = (
        "import pathlib, sys; from contextlib import ExitStack; from megascend.apps.train.run_directory import lock_output; "
        "stack = ExitStack(); lock_output(pathlib.Path(sys.argv[1]), stack); print('locked', flush=True); input()"
    )
    container = ["unshare", "--user", "--map-root-user", "--uts", "bash", "-c", 'hostname elsewhere; exec "$@"', "bash"]
    if (probe := subprocess.run([*container, "true"], capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"this machine allows no namespaces: {probe.stderr.strip()}")
    output = tmp_path / "run"
    command = [*container, sys.executable, "-c", program, str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        earlier(output)
        before = snapshot(output)
        for overwrite, resume in ((True, None), (False, "auto"), (False, None)):
            with pytest.raises(ConfigError, match=f"by another run, process {holder.pid} on elsewhere: stop it"):
                check_start(output, overwrite, resume, Launch())
        with pytest.raises(ConfigError, match=r"remove .*/run/\.lock"), contextlib.ExitStack() as stack:
            lock_output(output, stack)
        assert snapshot(output) == before
        holder.kill()
    check_start(output, True, None, Launch())
    with contextlib.ExitStack() as stack:
        lock_output(output, stack)


def test_failed_clear_restores_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier(tmp_path)
    before, replace = snapshot(tmp_path), os.replace

    def refusing(source: Path, target: Path) -> None:
        if Path(source).name == "events.jsonl" and Path(target).parent.name == ".earlier-run":
            raise PermissionError(1, "Operation not permitted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refusing)
    with pytest.raises(PermissionError):
        clear_output(tmp_path, RUN_FILES)
    assert snapshot(tmp_path) == before


def test_clear_keeps_links_and_foreign_files_behind_them(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    earlier(run)
    disk.mkdir()
    for name in ("checkpoints", "hf", "metrics.jsonl"):
        (run / name).rename(disk / name)
        (run / name).symlink_to(disk / name)
    (run / "adapter").symlink_to(disk)  # not an adapter
    (disk / "checkpoints" / "others").write_text("")
    (disk / "tensorboard").mkdir()
    (disk / "tensorboard" / "another run").write_text("")
    (run / "tensorboard").symlink_to(disk / "tensorboard")
    clear_output(run, RUN_FILES)
    restore(run)
    assert sorted(path.name for path in run.iterdir()) == ["adapter", "checkpoints", "hf", "metrics.jsonl", "notes.txt"]
    assert sorted(str(path.relative_to(disk)) for path in disk.rglob("*")) == [
        "checkpoints", "checkpoints/others", "hf", "metrics.jsonl", "tensorboard", "tensorboard/another run",
    ]  # fmt: skip
    assert (disk / "metrics.jsonl").read_text() == ""


def test_mounted_checkpoint_volume_is_emptied(tmp_path: Path) -> None:
    earlier(tmp_path)
    (tmp_path / "checkpoints").rename(tmp_path / "content")
    try:
        context = faults.full_disk(2**20)
        disk = context.__enter__()
    except PlatformError as error:
        pytest.skip(str(error))
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.push(context)
        (disk / "step-00000001").mkdir()
        (disk / "latest").write_text("")
        (tmp_path / "checkpoints").symlink_to(disk)
        clear_output(tmp_path, RUN_FILES)
        assert list(disk.iterdir()) == []


# --- whole runs ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny model and texts."""
    return tiny_run(tmp_path_factory.mktemp("earlier"))


def settings(folder: Path, output: Path, **changes: Any) -> RunConfig:
    checkpoint = {"every": 1, "asynchronous": False}
    values = {"steps": 2, "engine": "megatron", "checkpoint": checkpoint, "trackers": ["tensorboard"], "export": True}
    return run_config(folder, output, **(values | changes))


def in_forks(act: Callable[[], Any], ranks: int = 1) -> list[Any]:
    return run_distributed(act, ranks, init=False, timeout_s=DEADLINE_S)


@pytest.fixture(scope="module")
def finished(folder: Path, megatron_imported: object) -> Path:
    """Finish a run with checkpoints, an export and a tracker's files."""
    in_forks(lambda: train(settings(folder, folder / "run")))
    return folder / "run"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_run_that_fails_before_its_first_step_changes_nothing(
    folder: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    before, calls = snapshot(finished), []
    assert {"hf/model.safetensors", "checkpoints/latest", "metrics.jsonl"} <= set(before)

    def fails(error: type[BaseException], *, optimizer_step: Any = None, **changes: Any) -> None:
        def act() -> None:
            if optimizer_step is not None:
                monkeypatch.setattr("megascend.backend.Backend.optimizer_step", optimizer_step)
            with pytest.raises(error):
                train(settings(folder, finished, **changes), overwrite=True)

        in_forks(act, ranks)
        assert snapshot(finished) == before

    def no_step(backend: Any) -> None:
        raise ZeroDivisionError

    def not_finite(backend: Any) -> Any:
        from megascend.training.batch.results import StepResult

        calls.append(backend)
        return StepResult(float("nan"), 0.0, skipped=True, skipped_in_a_row=len(calls))

    fails(ZeroDivisionError, optimizer_step=no_step)
    fails(NonFiniteError, optimizer_step=not_finite, max_skipped_steps=2, steps=9, checkpoint={"every": 2})
    fails(CheckpointError, model=folder / "missing")
    for phase in ("forward and backward", "update"):
        fault = faults.Fault("die", rank=0, phase=phase, step=1)
        with faults.inject(fault):
            run_distributed(
                lambda: train(settings(folder, finished), overwrite=True),
                1, init=False, timeout_s=DEADLINE_S, expect_lost={0},
            )  # fmt: skip
        assert snapshot(finished) == before


def test_first_step_replaces_the_earlier_run(folder: Path, finished: Path) -> None:
    in_forks(lambda: train(settings(folder, finished, steps=1, export=False), overwrite=True))
    kinds = [event["event"] for event in events(finished)]
    assert [row["step"] for row in metrics(finished)] == [1]
    assert (kinds[0], kinds.count("start"), kinds[-1]) == ("start", 1, "finished")
    assert not (finished / "hf").exists()
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["latest", "step-00000001"]
    assert not [path for path in finished.iterdir() if path.name.startswith(".")]
