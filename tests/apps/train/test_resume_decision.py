"""The start point of a run, from the content of its directory and the way it was started."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import pytest

from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.apps.train.event_log import EventLog, agent
from megascend.apps.train.resume import (
    StartPoint,
    check_start,
    checkpoints_at,
    decide,
    differences,
    may_write,
    with_template_date,
)
from megascend.apps.train.run_directory import JOURNAL, RESULTS, RUN_FILES, run_files
from megascend.config import Lora, RunConfig
from megascend.errors import CheckpointError, ConfigError
from megascend.runtime.distributed.launch import Launch
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.retention import Retention

RESTART = Launch(attempt=1)
LATE_RANK = Launch(rank=1, world_size=2, attempt=1)


def add_run(output: Path, *steps: int, by: str | None = None) -> Path:
    """Write a run with checkpoints after ``steps``, started by the launcher ``by``."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "metrics.jsonl").write_text('{"step": 1}\n')
    (output / "events.jsonl").write_text(json.dumps({"event": "start", "agent": by}) + "\n")
    retention = Retention(output / "checkpoints")
    for step in steps:
        retention.path(step).mkdir(parents=True)
        (retention.path(step) / manifest.NAME).write_text("{}")
        (retention.directory / "latest").write_text(retention.path(step).name + "\n")
    return output


def names(start: StartPoint) -> list[str]:
    return [path.name for path in start.candidates]


def test_new_directory(tmp_path: Path) -> None:
    for output in (tmp_path / "new", tmp_path):
        assert decide(output, False, None, Launch()) == StartPoint(clear=RESULTS)
        start = decide(output, False, "auto", Launch())
        assert start.candidates == ()
        assert "no checkpoint" in start.remark


def test_earlier_run_requires_resume_or_overwrite(tmp_path: Path) -> None:
    output = add_run(tmp_path, 4, 8)
    for refuse in (decide, check_start):
        with pytest.raises(ConfigError, match=r"--resume auto, .*--overwrite"):
            refuse(output, False, None, Launch())
    assert decide(output, True, None, Launch()) == StartPoint(clear=RUN_FILES)
    assert names(decide(output, False, "auto", Launch())) == ["step-00000008", "step-00000004"]
    with pytest.raises(ConfigError, match="--overwrite and --resume auto contradict each other"):
        check_start(output, True, "auto", Launch())


def test_earlier_run_without_a_checkpoint(tmp_path: Path) -> None:
    output = add_run(tmp_path)
    with pytest.raises(ConfigError) as caught:
        decide(output, False, None, Launch())
    assert "--resume" not in str(caught.value)
    # Killed before its first checkpoint: a job that is started again with the same command begins again.
    assert decide(output, False, "auto", Launch()).clear == RESULTS
    check_start(output, False, "auto", Launch())
    with (output / "events.jsonl").open("a") as events:
        events.write('{"event": "saved", "checkpoint": "step-00000004"}\n')
    with pytest.raises(ConfigError, match="no complete checkpoint of it; start over with --overwrite"):
        decide(output, False, "auto", Launch())


def test_run_that_failed_in_step_1_can_be_retried(tmp_path: Path) -> None:
    """Retry if an error file or the missing process shows that it ended, and no step is logged or saved."""
    start = {"event": "start", "time": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
    (tmp_path / "config.yaml").write_text("model: m\n")
    (tmp_path / "metrics.jsonl").touch()
    events, errors = tmp_path / "events.jsonl", tmp_path / "errors"
    dead_pid = 2**22 + 1  # above any process id
    for event, ended in (
        (start, False),
        (start | {"pid": dead_pid}, True),
        (start | {"pid": dead_pid, "host": "other"}, False),
    ):
        events.write_text(json.dumps(event) + "\n")
        assert bool(run_files(tmp_path)) is not ended
    errors.mkdir()
    (errors / "attempt-0-rank-1.json").write_text(json.dumps({"time": start["time"] + 1}) + "\n")
    for resume in (None, "auto"):
        check_start(tmp_path, False, resume, Launch())
        assert decide(tmp_path, False, resume, Launch()).clear == RESULTS  # the journal stays
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="holds an earlier run"):
        check_start(tmp_path, False, None, Launch())


def test_directory_of_a_running_run_is_refused(tmp_path: Path) -> None:
    output = add_run(tmp_path, 4)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        start = {"event": "start", "time": time.time() + 1, "pid": other.pid, "host": socket.gethostname()}
        events = output / "events.jsonl"
        events.write_text(json.dumps(start) + "\n")
        message = f"is being written by another run, process {other.pid} on {socket.gethostname()}: stop it first"
        for overwrite, resume in ((True, None), (False, "auto")):
            with pytest.raises(ConfigError, match=message):
                check_start(output, overwrite, resume, Launch())
        for allowed in (
            [start, {"event": "finished", "step": 8}],
            [start | {"host": "another"}],  # a process of another host cannot be checked
            [start | {"time": 0}],  # the pid now may_write to another process
            [start | {"pid": os.getpid()}],
        ):
            events.write_text("".join(json.dumps(event) + "\n" for event in allowed))
            check_start(output, True, None, Launch())
        events.write_text(json.dumps(start) + "\n")
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie: ended, but not reaped
        check_start(output, True, None, Launch())


def test_running_run_is_refused_after_the_clock_was_set(tmp_path: Path) -> None:
    output = add_run(tmp_path, 4)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        start_ticks = int(Path(f"/proc/{other.pid}/stat").read_text().rsplit(")", 1)[1].split()[19])  # proc_pid_stat(5)
        # The clock was an hour behind when the run began.
        start = {"event": "start", "time": time.time() - 3600, "pid": other.pid, "host": socket.gethostname()}
        (output / "events.jsonl").write_text(json.dumps(start | {"start_ticks": start_ticks}) + "\n")
        with pytest.raises(ConfigError, match=f"is being written by another run, process {other.pid}"):
            check_start(output, True, None, Launch())
        # The number belongs to a later process, as the clock was an hour ahead.
        later = start | {"time": time.time() + 3600, "start_ticks": start_ticks - 1}
        (output / "events.jsonl").write_text(json.dumps(later) + "\n")
        check_start(output, True, None, Launch())
        other.kill()


def test_error_of_a_refused_start_does_not_end_the_running_run(tmp_path: Path) -> None:
    """A second start that was refused once its model was built leaves an error beside the events of the run in progress."""
    output = add_run(tmp_path, 4)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        start = {"event": "start", "time": time.time(), "pid": other.pid, "host": socket.gethostname()}
        (output / "events.jsonl").write_text(json.dumps(start) + "\n")
        EventLog(output, Launch()).error(ConfigError("output: it holds an earlier run"), step=1)
        for overwrite, resume in ((True, None), (False, "auto")):
            with pytest.raises(ConfigError, match=f"is being written by another run, process {other.pid}"):
                check_start(output, overwrite, resume, Launch())
        started = EventLog(output, Launch())
        started.started = True  # the run itself has failed, although its process has not ended yet
        started.error(ConfigError("the data"), step=5)
        check_start(output, True, None, Launch())
        other.kill()


def test_resume_from_a_path(tmp_path: Path) -> None:
    output, other = tmp_path / "new", add_run(tmp_path / "other", 4, 8)
    checkpoint = other / "checkpoints" / "step-00000004"
    assert decide(output, False, other, Launch()).candidates == tuple(checkpoints_at(other))
    assert decide(output, False, str(checkpoint), Launch()) == StartPoint((checkpoint,))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint there"):
        decide(output, False, tmp_path / "empty", Launch())
    with pytest.raises(CheckpointError, match="not a directory"):
        check_start(output, False, str(tmp_path / "missing"), Launch())


def test_restart_resumes_without_the_option(tmp_path: Path) -> None:
    output = add_run(tmp_path / "with", 4, by=agent())
    for overwrite, resume in ((False, None), (True, None), (False, "auto")):
        check_start(output, overwrite, resume, RESTART)
        start = decide(output, overwrite, resume, RESTART)
        assert names(start) == ["step-00000004"]
        assert start.clear == ()
    assert may_write(output, None, RESTART)


def test_restart_before_the_first_checkpoint_keeps_the_journal(tmp_path: Path) -> None:
    output = add_run(tmp_path / "without", by=agent())
    start = decide(output, False, None, RESTART)
    assert start.candidates == ()
    assert set(RUN_FILES) - set(start.clear) == set(JOURNAL)
    other = add_run(tmp_path / "other", 8)
    assert names(decide(output, False, other, RESTART)) == ["step-00000008"]  # where the first attempt began


def test_restart_does_not_touch_another_run(tmp_path: Path) -> None:
    output = add_run(tmp_path, 4, by="elsewhere:1")
    for refuse in (decide, check_start):
        with pytest.raises(ConfigError, match="holds an earlier run"):
            refuse(output, False, None, RESTART)
    check_start(
        output, False, None, LATE_RANK
    )  # on another machine the launcher is another process, so only rank 0 refuses
    assert not may_write(output, None, LATE_RANK)
    assert not may_write(output, None, Launch())
    assert may_write(output, "auto", Launch())


def test_restart_in_a_new_container_does_not_touch_the_run_of_the_last_one(tmp_path: Path) -> None:
    """In two process namespaces, as two containers of one host name are, the launchers have the same process id."""

    def in_container(program: str) -> str:
        # Two commands, so that the shell, the launcher, stays the parent.
        command = f"{sys.executable} -c {shlex.quote(program)}; true"
        completed = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "bash", "-c", command],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if "unshare" in completed.stderr:
            pytest.skip(f"this machine allows no process namespaces: {completed.stderr.strip()}")
        return completed.stdout.strip() or completed.stderr

    name = "import os; from megascend.apps.train.event_log import agent; print(os.getppid(), agent())"
    parent, first = in_container(name).split()
    assert parent == "1"
    output = add_run(tmp_path, 4, by=first)
    same_launcher = (
        "from pathlib import Path; from megascend.apps.train.resume import has_same_launcher; "
        f"print(has_same_launcher(Path({str(output)!r})))"
    )
    assert in_container(same_launcher) == "False"


def test_differences_names_the_settings(tmp_path: Path) -> None:
    config = RunConfig(model=tmp_path, output=tmp_path, data={"path": tmp_path}, steps=10)
    saved = config.model_dump(mode="json")
    assert differences(saved, config) == []
    assert differences(None, config) == []
    saved["optimizer"]["lr"] = 0.5
    saved["gone"] = 1
    changed = config.model_copy(update={"steps": 20})
    assert differences(saved, changed) == ["gone: 1 -> None", "optimizer.lr: 0.5 -> 1e-05", "steps: 10 -> 20"]
    changed = config.model_copy(update={"lora": Lora(rank=4)})
    assert "lora.rank: None -> 4" in differences(config.model_dump(mode="json"), changed)


def test_template_date_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """Take the checkpoint's date if the template writes the date and none is set; today for a new run."""
    output = add_run(tmp_path / "run", 4, 8, by=agent())
    early = manifest.CheckpointManifest(4, "fp32", {}, {}, None, [], {}, config={"template_date": "2024-02-29"})
    (Retention(output / "checkpoints").path(4) / manifest.NAME).write_text(early.to_text())  # that of step 8 is damaged
    config = RunConfig(model=tmp_path, output=output, data={"path": tmp_path})
    tokenizer = byte_tokenizer(256)
    tokenizer.chat_template = {"default": "{{ strftime_now('%Y') }}"}
    today, saved = date.today(), date(2024, 2, 29)
    for resume, launch, day in (
        ("auto", Launch(), saved),
        (output, Launch(), saved),
        (output / "checkpoints" / "step-00000004", Launch(), saved),
        (None, RESTART, saved),
        (None, LATE_RANK, saved),
        (None, Launch(), today),
    ):
        assert with_template_date(config, tokenizer, resume, launch).template_date == day
    new = config.model_copy(update={"output": tmp_path / "new"})
    assert with_template_date(new, tokenizer, "auto", Launch()).template_date == today
    chosen = config.model_copy(update={"template_date": date(2020, 1, 1)})
    assert with_template_date(chosen, tokenizer, "auto", Launch()) is chosen
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert with_template_date(config, tokenizer, "auto", Launch()) is config
