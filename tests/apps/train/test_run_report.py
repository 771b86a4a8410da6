"""Reports on handwritten run directories, and their text; tests/apps/cli/test_cli_resume.py reads those of real runs."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from megascend.apps.cli.run_text import next_steps, run_json, run_lines
from megascend.apps.train.run_report import RunReport, attempts_of, blame, read_run
from megascend.testing import faults
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.manifest import CheckpointManifest

COMMAND = ["/usr/bin/python3", "/usr/bin/megascend", "train", "run.yaml", "--nproc", "2", "--overwrite"]


def event(kind: str, when: float, attempt: int = 0, **values: object) -> dict:
    return {"event": kind, **values, "time": when, "host": "far", "pid": 1, "attempt": attempt}


def start(when: float, attempt: int = 0, **values: object) -> dict:
    common = {"world_size": 2, "agent": "far:1", "platform": "cpu", "steps": 12, "command": COMMAND}
    return event("start", when, attempt, **common, **values)


def error(rank: int, when: float, kind: str, message: str = "", **values: object) -> dict:
    common = {"rank": rank, "world_size": 2, "started": True, "agent": "far:1", "step": 5, "attempt": 0, "host": "far"}
    return common | {"error": kind, "message": message, "time": when} | values


def write_run(folder: Path, events: list[dict], errors: list[dict] = (), steps: int = 0) -> Path:  # type: ignore[assignment]
    (folder / "errors").mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    for record in errors:
        path = folder / "errors" / f"attempt-{record['attempt']}-rank-{record['rank']}.json"
        path.write_text(json.dumps(record) + "\n")
    rows = [{"step": n, "loss": 1 / n, "grad_norm": 2.0, "skipped": n == 2} for n in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def add_checkpoint(run: Path, step: int) -> Path:
    path = run / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    names = ("__0_0.distcp", "common.pt")
    for name in names:
        (path / name).write_bytes(name.encode() * 100)
    entry = CheckpointManifest(
        step, "fp32", {}, {}, None, [], {}, files={name: manifest.digest(path / name) for name in names}
    )
    (path / manifest.NAME).write_text(entry.to_text())
    (run / "checkpoints" / "latest").write_text(path.name + "\n")
    return path


def text_of(report: RunReport) -> str:
    return "\n".join(run_lines(report))


# --- attempts ---


def test_finished_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(100), event("finished", 160, step=12, loss=0.1)], steps=12)
    (run / "hf").mkdir()
    report = read_run(run)
    assert report.ok
    (attempt,) = report.attempts
    assert (attempt.outcome, attempt.step, attempt.started, attempt.ended) == ("finished", 12, 100, 160)
    assert next_steps(report) == [f"nothing: the result is in {run / 'hf'}"]


def test_stopped_run_is_resumed_with_its_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(100), event("stopped", 160, step=4, signal="SIGTERM")], steps=4)
    add_checkpoint(run, 4)
    report = read_run(run)
    assert report.ok
    assert (report.attempts[0].outcome, report.attempts[0].signal) == ("stopped", "SIGTERM")
    assert next_steps(report)[-1] == "  megascend train run.yaml --nproc 2 --resume auto"


def test_first_failed_rank_is_named(tmp_path: Path) -> None:
    late = error(0, 150.0, "PeerLostError", "rank 0: failed. Rank 1 failed in forward")
    first = error(1, 151.0, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB")
    report = read_run(write_run(tmp_path / "run", [start(100)], [late, first], steps=4))
    assert not report.ok
    (attempt,) = report.attempts
    assert (attempt.outcome, attempt.step, attempt.silent) == ("error", 5, ())
    assert [record.rank for record in attempt.errors] == [1, 0]
    assert next_steps(report)[-1] == "  megascend train run.yaml --nproc 2 --overwrite"


def test_blame_of_failed_and_silent_ranks() -> None:
    def summary(*errors: tuple[int, str, str], world_size: int = 4) -> tuple:
        drafts = [error(rank, 10.0 + rank, kind, message) for rank, kind, message in errors]
        (attempt,) = attempts_of([start(1) | {"world_size": world_size}], drafts)
        return attempt.outcome, attempt.silent, [record.rank for record in attempt.errors]

    assert summary() == ("no end", (), [])
    assert summary((2, "PeerLostError", "Rank 3 is gone")) == ("lost", (3,), [2])  # the launcher ended 0 and 1
    assert summary((2, "PeerLostError", "somebody")) == ("lost", (0, 1, 3), [2])
    assert summary((0, "PeerLostError", ""), (1, "DataError", "")) == ("error", (2, 3), [1, 0])
    assert summary((0, "KeyboardInterrupt", ""), world_size=1) == ("interrupted", (), [0])
    assert summary((0, "PeerLostError", ""), (1, "PeerLostError", ""), world_size=2) == ("error", (), [0, 1])
    assert blame([], None) == ("no end", (), ())


def test_attempts_are_separated_with_their_errors() -> None:
    events = [
        start(100),
        start(200, 1),
        event("resumed", 201, 1, step=4),
        start(1000),
        event("resumed", 1001, step=8),
        event("finished", 1100, step=12),
    ]
    errors = [
        error(1, 300, "DataError", "second attempt", attempt=1),
        error(0, 150, "DataError", "first attempt"),
        error(1, 500, "ConfigError", "never started", started=False, agent="far:2", step=0),
    ]
    attempts = attempts_of(events, errors)
    assert [attempt.number for attempt in attempts] == [1, 2, 3, 4]
    assert [attempt.outcome for attempt in attempts] == ["error", "error", "error", "finished"]
    assert [attempt.restart for attempt in attempts] == [0, 1, 0, 0]
    assert [attempt.resumed_after for attempt in attempts] == [0, 4, 0, 8]
    assert [attempt.started for attempt in attempts] == [100, 200, None, 1000]
    assert [[record.message for record in attempt.errors] for attempt in attempts] == [
        ["first attempt"],
        ["second attempt"],
        ["never started"],
        [],
    ]


def test_run_is_running_while_its_process_lives(tmp_path: Path) -> None:
    this_process = {"host": socket.gethostname(), "pid": os.getpid()}
    report = read_run(write_run(tmp_path / "run", [start(time.time()) | this_process], steps=3))
    assert report.running
    assert not report.ok
    assert next_steps(report) == ["nothing: it is running"]
    # The pid of an ended process may belong to a later process.
    report = read_run(write_run(tmp_path / "old", [start(100) | this_process], steps=3))
    assert not report.running


# --- checkpoints and saves ---


def test_checkpoints_with_their_problems(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(100)], [error(0, 150, "DataError")], steps=9)
    paths = [add_checkpoint(run, step) for step in (2, 4, 6, 8)]
    faults.flip_byte(paths[1] / "common.pt")
    faults.truncate(paths[2] / manifest.NAME, 20)
    (paths[3] / "common.pt").unlink()
    (run / "checkpoints" / ".step-00000010.writing").mkdir()
    quick, thorough = read_run(run), read_run(run, verify=True)
    assert [bool(checkpoint.problems) for checkpoint in quick.checkpoints] == [False, False, True, True]
    assert [bool(checkpoint.problems) for checkpoint in thorough.checkpoints] == [False, True, True, True]
    assert thorough.checkpoints[1].problems == ("common.pt is damaged: its content is not what was written",)
    assert "megascend.json is damaged" in thorough.checkpoints[2].problems[0]
    assert thorough.checkpoints[3].problems == ("common.pt is missing",)
    assert (quick.last_good.step, thorough.last_good.step) == (4, 2)  # type: ignore[union-attr]
    assert (thorough.latest, thorough.unfinished) == (
        "step-00000008",
        (str(run / "checkpoints" / ".step-00000010.writing"),),
    )
    (run / "checkpoints" / "latest").write_text("step-00000099\n")
    assert "'latest' names 'step-00000099', which is not there" in text_of(read_run(run))


# --- damaged and missing files ---


def test_half_written_and_missing_files(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", [start(100), event("save", 110, stall_s=0.1)], [error(1, 150, "DataError")], steps=4
    )
    with (run / "events.jsonl").open("a") as file:
        file.write('[1]\n\n"text"\n{"event": "sa')
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "lo\xff')
    (run / "errors" / "attempt-0-rank-0.json").write_text('{"rank": 0, "err')
    report = read_run(run)
    assert report.metrics[-1]["step"] == 4
    assert report.attempts[0].errors[0].rank == 1
    assert [remark.rpartition("/")[2] for remark in report.remarks] == [
        "events.jsonl: not JSON, perhaps cut off by a crash: lines 3, 5, 6",
        "attempt-0-rank-0.json: not JSON, perhaps cut off by a crash: line 1",
        "metrics.jsonl: not JSON, perhaps cut off by a crash: line 5",
    ]
    for name in ("events.jsonl", "metrics.jsonl"):
        (run / name).unlink()
        json.loads(run_json(read_run(run)))
        assert "next" in text_of(read_run(run))


@pytest.mark.parametrize("values", [{}, {"time": None, "world_size": "x", "command": 3, "pid": "y", "steps": []}])
def test_lines_with_missing_or_invalid_fields(tmp_path: Path, values: dict) -> None:
    lines = [{"event": "start", **values}, {"event": "save", "stall_s": "x"}, {"event": "stopped"}, {"event": 3}]
    run = write_run(tmp_path / "run", lines)
    (run / "errors" / "attempt-0-rank-0.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"loss": 1}\n{"step": 1}\n{"step": "2"}\n')
    text_of(read_run(run))


# --- the command ---


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "my_script.py"], "megascend train RUN/config.yaml --nproc 2 --resume auto"),
        (["/bin/python", "/bin/megascend", "rl", "rl.yaml"], "megascend rl rl.yaml --resume auto"),
    ],
)
def test_command_that_resumes(tmp_path: Path, command: list[str], expected: str) -> None:
    run = write_run(tmp_path / "run", [start(100) | {"command": command}], steps=2)
    add_checkpoint(run, 2)
    assert next_steps(read_run(run))[-1].strip() == expected.replace("RUN", str(run))
