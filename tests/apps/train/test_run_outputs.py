"""Outputs of a run: metrics, plot and progress lines; refusal to overwrite."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megascend.apps.train import plot
from megascend.apps.train.plot import plot_metrics
from megascend.apps.train.records import StepRecord
from megascend.apps.train.run_directory import OutputDirectory
from megascend.apps.train.run_log import RunLog, StepClock


def record(step: int, **changes: object) -> StepRecord:
    values: dict = {
        "step": step,
        "loss": 1.0 / step,
        "grad_norm": 2.0,
        "lr": 1e-3,
        "tokens": 10,
        "total_tokens": 20,
        "tokens_per_s": 100.0,
        "skipped": False,
        "epoch": 0.1 * step,
        "peak_memory_bytes": 5,
        "seconds": float(step),
        "step_seconds": 1.0,
        "dispatch_seconds": 0.25,
    }
    return StepRecord(**(values | changes))


def directory(output: Path, steps: int, steps_done: int = 0) -> OutputDirectory:
    config: Any = SimpleNamespace(output=output, steps=steps)
    backend: Any = SimpleNamespace(rank=0, step_count=steps_done)
    return OutputDirectory(config, backend, event_log=cast("Any", None))


def test_metrics_are_lines_of_valid_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(directory(tmp_path / "run", steps=2)) as log:
        assert not (tmp_path / "run").exists()  # a run without a step leaves no files
        log.write(record(1))
        log.write(record(2, loss=float("nan"), grad_norm=float("inf"), skipped=True))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert first["loss"] == 1.0
    assert first["tokens_per_s"] == 100.0
    assert (first["step_seconds"], first["dispatch_seconds"]) == (1.0, 0.25)
    assert (second["loss"], second["grad_norm"], second["skipped"]) == (None, None, True)
    assert "SKIPPED" in capsys.readouterr().out


def test_long_steps_report_progress_by_time() -> None:
    """Use a fake clock: 8 micro batches of 10 s a step, and two steps done by an earlier process."""
    seconds = 0.0
    progress = StepClock(steps=5, steps_done=2, now=lambda: seconds)
    lines = []
    for step in (3, 4):
        for micro_batches_done in range(8):
            lines.append(progress.micro_batch(micro_batches_done, 8))
            seconds += 10.0
        seconds += 20.0  # the update
        progress.step_done(step)
    reported = [index for index, line in enumerate(lines) if line]
    assert reported == [3, 6, 11, 14]
    assert (
        lines[3] == "step 3/5  micro batch 3/8  0:30 in the step, 0:50 to its end  ETA 3:30"
    )  # 80 s for each of two more
    assert lines[11] == "step 4/5  micro batch 3/8  0:30 in the step, 0:50 to its end  ETA 2:30"  # 100 s for the last


def test_plot_has_a_panel_per_metric_and_a_log_axis_over_decades() -> None:
    rows = [
        record(step, loss=8.0 * 0.9**step, grad_norm=1.0 + step % 3, lr=1e-3 * step).to_dict() for step in range(1, 81)
    ]
    rows[39]["validation_loss"] = 2.5
    figure = plot.draw(rows, "a run", plot.PANELS)
    loss, rate, norm, speed = figure.axes
    assert [axes.get_title("left").split()[0] for axes in figure.axes] == ["loss", "learning", "gradient", "tokens"]
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear", "linear", "linear"]
    assert [line.get_label() for line in loss.lines] == ["each step", "smoothed", "validation"]
    assert list(loss.lines[2].get_ydata()) == [2.5]
    assert list(loss.lines[1].get_ydata()) == pytest.approx(
        [row["loss"] for row in rows], rel=1e-4
    )  # smoothing keeps an exponential decay
    assert [len(axes.lines) for axes in (rate, norm, speed)] == [1, 2, 2]
    assert rate.lines[0].get_ydata()[-1] == pytest.approx(0.08)
    assert norm.get_ylim()[0] == 0
    short = plot.draw(rows[:5], "a run", plot.PANELS).axes[0]
    assert (short.get_yscale(), len(short.lines)) == ("linear", 1)


def test_plot_is_a_png(tmp_path: Path) -> None:
    rows = [record(step).to_dict() for step in range(1, 20)]
    rows[5] = record(6, loss=float("nan"), skipped=True).to_dict()
    plot_metrics(rows, tmp_path / "metrics.png", title="a run")
    data = (tmp_path / "metrics.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 300
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.png"]


def test_resume_truncates_later_rows_in_place(tmp_path: Path) -> None:
    with RunLog(directory(tmp_path, steps=4)) as log:
        for step in (1, 2, 3):
            log.write(record(step))
    metrics = tmp_path / "metrics.jsonl"
    (tmp_path / "elsewhere").mkdir()
    metrics.rename(tmp_path / "elsewhere" / "m")
    metrics.symlink_to("elsewhere/m")
    with metrics.open("a") as file:
        file.write('{"step": 4, "lo')
    before = metrics.stat().st_ino
    with RunLog(directory(tmp_path, steps=4, steps_done=2)) as log:
        log.write(record(3, loss=7.0))
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert rows == log.rows
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 0.5), (3, 7.0)]
    assert (metrics.is_symlink(), metrics.stat().st_ino) == (True, before)


def test_rows_wait_for_disk_space_and_for_an_earlier_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = tmp_path / "run"
    waiting = directory(output, steps=4)
    waiting.holds_earlier_run = True
    with RunLog(waiting) as log:
        log.write(record(1))
        assert not output.exists()
        waiting.holds_earlier_run = False
        output.write_text("in the way")  # as if the directory could not be created
        log.write(record(2))
        log.write(record(3))
        output.unlink()
        log.write(record(4))
    assert [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert caplog.text.count("its lines are kept until it can be") == 1
