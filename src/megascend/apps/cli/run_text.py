"""Text of ``megascend doctor --run``: a :class:`RunReport` in words, and the next steps."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import typer

from megascend.apps.cli.run_report import Attempt, RankError, RunReport
from megascend.apps.train.run_directory import failed_in_step_1
from megascend.surroundings import process_lives

WIDTH = 110
LABEL = 13
MIB, GIB = 1024**2, 1024**3
SHOWN_FAILURES = 3
MESSAGE = 300
"""Characters of an error message that are shown."""


def render_run(report: RunReport) -> str:
    """Format the report as plain text."""
    colour = typer.colors.GREEN if report.ok else typer.colors.RED
    lines = [typer.style(f"{report.directory}: {headline(report)}", fg=colour), ""]
    for attempt in report.attempts:
        lines += entry(
            f"attempt {attempt.number}", attempt_lines(attempt, attempt is report.attempts[-1], report.steps)
        )
    lines += entry("steps", steps_lines(report))
    lines += entry("checkpoints", checkpoint_lines(report))
    lines += entry("saves", saves_lines(report))
    lines += entry("disk", [f"{report.free_bytes / GIB:.1f} GiB free"])
    lines += entry("files", list(report.remarks))
    return "\n".join([*lines, "", *entry("next", next_steps(report))])


def render_run_json(report: RunReport) -> str:
    """Format the report as one JSON object."""
    last = report.metrics[-1] if report.metrics else None
    good = report.last_good
    values = asdict(report)
    values["directory"] = str(report.directory)
    del values["metrics"]
    summary = {
        "ok": report.ok,
        "headline": headline(report),
        "last_step": last,
        "skipped_steps": [row["step"] for row in report.metrics if row.get("skipped")],
        "resumes_from": None if good is None else good.name,
        "next": next_steps(report),
    }
    return json.dumps(summary | values, indent=2)


def entry(label: str, paragraphs: list[str]) -> list[str]:
    """Format wrapped paragraphs next to a label; an empty list without paragraphs."""
    lines = [line for text in paragraphs for line in wrapped(text)]
    return [f"{label if index == 0 else '':<{LABEL}}{line}" for index, line in enumerate(lines)]


def wrapped(text: str) -> list[str]:
    """Wrap a paragraph; paths and commands are not broken, so that they can be copied."""
    # Commands are indented, and must be copied as one line.
    if text.startswith("  "):
        return [text]
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False, break_long_words=False) or [""]


def headline(report: RunReport) -> str:
    """Summarize the state of the run in a line."""
    if not report.attempts:
        return "the run began, but its event log (events.jsonl) is missing"
    last = report.attempts[-1]
    total = f" of {report.steps}" if report.steps is not None else ""
    if last.started is None:
        return "the last attempt failed before its first step"
    if last.outcome == "finished":
        return f"finished after step {last.step}{total}"
    if last.outcome == "stopped":
        return f"stopped by {last.signal} after step {last.step}{total}"
    if last.outcome == "no end":
        if still_running(last):
            return "running"
        progress = f" after step {report.metrics[-1]['step']}{total}" if report.metrics else " before the end of step 1"
        return f"ended without an error message{progress}, or is running on another machine"
    if last.outcome == "interrupted":
        return f"interrupted at once in step {last.step}{total}"
    return f"failed {failed_step(last.step, report.steps, total)}"


def failed_step(step: int | None, steps: int | None, total: str = "") -> str:
    """Name the step in which a run failed; a step beyond the last means the export and the plot after training."""
    return f"after step {steps}, its last" if steps is not None and (step or 0) > steps else f"in step {step}{total}"


def attempt_lines(attempt: Attempt, last: bool, steps: int | None = None) -> list[str]:
    """Describe the start and the end of an attempt.

    Args:
        last: it is the latest attempt.
        steps: total steps of the run.
    """
    ranks = (
        f"{attempt.world_size} rank{'s' if attempt.world_size != 1 else ''}" if attempt.world_size else "ranks unknown"
    )
    on = f" on {attempt.platform}" if attempt.platform else ""
    restarted = f", restarted by the launcher (restart {attempt.restart})" if attempt.restart else ""
    if attempt.started is None:
        lines = [f"{clock(attempt.ended)}: failed before its first step; {ranks}{restarted}"]
        return [*lines, *error_lines(attempt)]
    since = f"resumed after step {attempt.resumed_after}" if attempt.resumed_after else "began with step 1"
    lines = [f"{clock(attempt.started)}: {since}; {ranks}{on}{restarted}"]
    if attempt.outcome == "finished":
        lines.append(f"{clock(attempt.ended)}: finished after step {attempt.step}")
    elif attempt.outcome == "stopped":
        lines.append(
            f"{clock(attempt.ended)}: stopped by {attempt.signal} after step {attempt.step}, with a checkpoint"
        )
    # SIGKILL leaves no event: only the process table tells a running attempt from a killed one.
    elif attempt.outcome == "no end" and still_running(attempt):
        lines.append("still running")
    elif attempt.outcome == "no end":
        elsewhere = ", or it runs on another machine" if last else ""
        lines.append(f"no rank has left an error: all were killed at once (out of memory? SIGKILL? power?){elsewhere}")
    elif attempt.outcome == "interrupted":
        return [*lines, f"{clock(attempt.ended)}: interrupted at once in step {attempt.step}, without a checkpoint"]
    else:
        lines.append(f"{clock(attempt.ended)}: failed {failed_step(attempt.step, steps)}")
    return [*lines, *error_lines(attempt)]


def error_lines(attempt: Attempt) -> list[str]:
    """Describe the ranks that failed or are gone, the cause first."""
    if not attempt.errors:
        return []
    first, rest = attempt.errors[0], attempt.errors[1:]
    if attempt.outcome == "lost":
        ranks, many = ranks_named(attempt.silent), len(attempt.silent) > 1
        return [
            f"{ranks} left no error: killed (out of memory? SIGKILL?) or lost {'their machines' if many else 'its machine'}",
            f"rank {first.rank} ({first.host}) says: {error_text(first)}",
        ]
    lines = [
        f"rank {first.rank} ({first.host}) failed{' first' if rest or attempt.silent else ''}: {error_text(first)}"
    ]
    if rest:
        kinds = sorted({error.error for error in rest})
        lines.append(f"then {ranks_named([error.rank for error in rest])}: {', '.join(kinds)}")
    if attempt.silent:
        lines.append(f"{ranks_named(attempt.silent)} left no error: ended by the launcher, or killed")
    return lines


def steps_lines(report: RunReport) -> list[str]:
    """Describe the training progress."""
    if not report.metrics:
        return ["none done"]
    last = report.metrics[-1]
    total = f" of {report.steps}" if report.steps is not None else ""
    skipped = [str(row["step"]) for row in report.metrics if row.get("skipped")]
    lines = [
        f"{last['step']}{total}; last loss {figure(last.get('loss'))}, gradient norm {figure(last.get('grad_norm'))}"
    ]
    if skipped:
        lines.append(f"{len(skipped)} skipped (gradients not finite): {abbreviated(skipped)}")
    if report.bad_batches:
        lines.append(f"the batch that was skipped last is kept in {report.bad_batches[-1]}")
    return lines


def checkpoint_lines(report: RunReport) -> list[str]:
    """List the checkpoints and their state."""
    good, lines = report.last_good, []
    if not report.checkpoints:
        lines.append("none")
    intact = (
        "every file is as it was written"
        if report.verified
        else "manifest and files are there (--verify compares digests)"
    )
    for checkpoint in report.checkpoints:
        state = f"DAMAGED: {'; '.join(checkpoint.problems)}" if checkpoint.problems else intact
        marks = ", ".join(
            mark
            for mark, on in (("latest", checkpoint.name == report.latest), ("resumed from next", checkpoint == good))
            if on
        )
        size = f"{checkpoint.size_bytes / MIB:.1f} MiB"
        lines.append(f"{checkpoint.name}{f' ({marks})' if marks else ''}, {size}: {state}")
    if report.latest is not None and report.latest not in [checkpoint.name for checkpoint in report.checkpoints]:
        lines.append(f"the file 'latest' names {report.latest!r}, which is not there")
    # A directory of a save in progress looks like one that was interrupted.
    running = bool(report.attempts) and still_running(report.attempts[-1])
    lines += [
        f"{path}: {'being written' if running else 'left of a save that was interrupted; it can be removed'}"
        for path in report.unfinished
    ]
    return lines


def saves_lines(report: RunReport) -> list[str]:
    """Describe completed saves, failures and the time that training stalled."""
    saves = report.saves
    if not saves.started and not saves.failures:
        return []
    lines = [f"{saves.completed} complete, {len(saves.failures)} failed"]
    if saves.stall_s:
        mean = sum(saves.stall_s) / len(saves.stall_s)
        lines[0] += f"; training stood still for {sum(saves.stall_s):.2f} s in all, {mean:.3f} s each"
    lines += saves.failures[-SHOWN_FAILURES:]
    if len(saves.failures) > SHOWN_FAILURES:
        lines.append(f"(the last {SHOWN_FAILURES} of {len(saves.failures)} failures; all are in events.jsonl)")
    return lines


def next_steps(report: RunReport) -> list[str]:
    """List what to do next."""
    if not report.attempts:
        return ["look at the output of the command that started it"]
    last, good = report.attempts[-1], report.last_good
    if last.outcome == "finished":
        return [f"nothing: the result is in {' and '.join(report.exported) or report.directory}"]
    if still_running(last):
        return ["nothing: it is running"]
    # Before the command to resume: resuming without removing the cause fails again.
    steps = [text for text in (cause(report, last), space(report)) if text]
    has_begun = any(a.started is not None for a in report.attempts) and not failed_in_step_1(report.directory)
    has_begun = has_begun or bool(report.metrics or report.checkpoints)
    if good is not None:
        steps.append(f"resume after step {good.step}{_location(report)}:")
    elif has_begun:
        steps.append(f"no complete checkpoint: start over{_location(report)}:")
    else:
        steps.append("start it again")
        return steps
    return [*steps, f"  {command_to_go_on(report, '--resume auto' if good is not None else '--overwrite')}"]


def cause(report: RunReport, attempt: Attempt) -> str:
    """Return advice on what to check before the run is restarted."""
    if attempt.outcome in ("lost", "no end"):
        victim = ranks_named(attempt.silent) if attempt.silent else "the run"
        return f"find out what killed {victim}: the scheduler's log; on its machine, dmesg for the out-of-memory killer"
    if not attempt.errors or attempt.outcome == "interrupted":
        return ""
    error = attempt.errors[0]
    if error.error == "NonFiniteError":
        return "the gradients were not finite: look at the batch that is kept, and lower optimizer.lr"
    if "out of memory" in error.message.lower() or error.error == "OutOfMemoryError":
        return "memory ran out: lower batching.micro_batch_tokens, or set recompute.granularity"
    files = report.directory / "errors"
    return f"fix what {error.error} says above (whole tracebacks: {files}/*.json)"


def space(report: RunReport) -> str:
    """Return a warning if the disk has no space for another checkpoint."""
    largest = max((checkpoint.size_bytes for checkpoint in report.checkpoints), default=0)
    if largest and report.free_bytes < 2 * largest:
        return (
            f"make room: a checkpoint takes {largest / GIB:.2f} GiB, and {report.free_bytes / GIB:.2f} GiB are free; "
            "checkpoint.keep_last is how many are kept"
        )
    return ""


def command_to_go_on(report: RunReport, option: str) -> str:
    """Return the command that started the last attempt, changed so that the run resumes or starts over."""
    recorded = next((list(a.command) for a in reversed(report.attempts) if a.command), [])
    words = without_options(short_program(recorded))
    if "train" not in words or not any("megascend" in word for word in words):
        size = next((a.world_size for a in reversed(report.attempts) if a.world_size), 1) or 1
        # The recorded command was a program of the user's: the run's own copy of its settings always works.
        words = ["megascend", "train", str(report.directory / "config.yaml")]
        words += ["--nproc", str(size)] if size > 1 else []
    return f"{shlex.join(words)} {option}"


def short_program(words: list[str]) -> list[str]:
    """Shorten ``/usr/bin/python /usr/bin/torchrun ...`` to ``torchrun ...``, as it was typed."""
    if len(words) > 1 and Path(words[0]).name.startswith("python"):
        rest = words[1:]
        # Options of Python that do not matter for repeating the run.
        while rest and rest[0] in ("-u", "-P", "-s", "-E", "-I"):
            rest = rest[1:]
        if rest and Path(rest[0]).name in ("torchrun", "megascend"):
            return [Path(rest[0]).name, *rest[1:]]
        if rest[:2] == ["-m", "megascend.apps.cli.main"]:
            return ["megascend", *rest[2:]]
        if rest[:2] == ["-m", "torch.distributed.run"]:
            return ["torchrun", *rest[2:]]
    return words


def without_options(words: list[str]) -> list[str]:
    """Remove ``--overwrite`` and ``--resume``."""
    remaining: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word == "--resume":
            skip = True
        elif word != "--overwrite" and not word.startswith("--resume="):
            remaining.append(word)
    return remaining


def still_running(attempt: Attempt) -> bool:
    """Return True if rank 0's process is alive on this machine."""
    if attempt.outcome != "no end" or attempt.process is None:
        return False
    return process_lives(*attempt.process, attempt.started or 0.0, attempt.start_ticks) is True


def _location(report: RunReport) -> str:
    directory = next((a.directory for a in reversed(report.attempts) if a.directory), None)
    return f", in {directory}" if directory and directory != os.getcwd() else ""


def error_text(error: RankError) -> str:
    """Format an error as its rank saw it, shortened."""
    # The line names the rank already.
    text = " ".join(error.message.split()).removeprefix(f"rank {error.rank}: ")
    text = text if len(text) <= MESSAGE else f"{text[:MESSAGE].rstrip()}... (the rest is in errors/)"
    return f"{error.error}: {text}" if text else error.error


def ranks_named(ranks: list[int] | tuple[int, ...]) -> str:
    """Format ranks as ``rank 1`` or ``ranks 1, 2``."""
    names = abbreviated([str(rank) for rank in sorted(ranks)])
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def abbreviated(names: list[str], limit: int = 12) -> str:
    """Join names with commas; beyond ``limit`` only count them."""
    suffix = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + suffix


def figure(value: object) -> str:
    """Format a number of metrics.jsonl, where null stands for one that was not finite."""
    return f"{value:.4g}" if isinstance(value, (int, float)) else "not finite"


def clock(seconds: float | None) -> str:
    """Format seconds since the epoch as local time."""
    return "?" if not seconds else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
