"""Text of ``megascend doctor --run``: a :class:`RunReport` in words, and the next steps."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megascend.apps.cli.text import labelled
from megascend.apps.train.run_directory import failed_in_step_1
from megascend.apps.train.run_report import Attempt, RunReport
from megascend.runtime.io.paths import format_bytes

LABEL = 13
"""Columns of a paragraph's label."""
SHOWN_FAILURES, SHOWN_NAMES, SHOWN_CHARACTERS = 3, 12, 300
"""Limits of failed saves, of names in a list and of an error message that are shown."""


def run_lines(report: RunReport) -> Iterator[str]:
    """Yield the lines of a report. Lines are not wrapped: paths and commands are copied from them."""
    yield f"{report.directory}: {headline(report)}"
    yield ""
    for attempt in report.attempts:
        yield from labelled(f"attempt {attempt.number}", attempt_lines(attempt, report), LABEL)
    yield from labelled("steps", steps_lines(report), LABEL)
    yield from labelled("checkpoints", checkpoint_lines(report), LABEL)
    yield from labelled("saves", saves_lines(report), LABEL)
    yield from labelled("disk", [f"{format_bytes(report.free_bytes)} free"], LABEL)
    yield from labelled("files", report.remarks, LABEL)
    yield ""
    yield from labelled("next", next_steps(report), LABEL)


def run_json(report: RunReport) -> str:
    """Format the report as one JSON object."""
    good = report.last_good
    values = asdict(report) | {"directory": str(report.directory)}
    del values["metrics"]
    summary = {
        "ok": report.ok,
        "headline": headline(report),
        "last_step": report.metrics[-1] if report.metrics else None,
        "skipped_steps": [row["step"] for row in report.metrics if row.get("skipped")],
        "resumes_from": None if good is None else good.name,
        "next": next_steps(report),
    }
    return json.dumps(summary | values, indent=2)


def headline(report: RunReport) -> str:
    """Summarize the state of the run in a line."""
    if not report.attempts:
        return "the run began, but its event log (events.jsonl) is missing"
    last = report.attempts[-1]
    if last.started is None:
        return f"the last attempt {ending(last, report)}"
    return ending(last, report)


def ending(attempt: Attempt, report: RunReport) -> str:
    """Describe how an attempt ended."""
    total = f" of {report.steps}" if report.steps is not None else ""
    if attempt.started is None:
        return "failed before its first step"
    if attempt.running:
        return "running"
    if attempt.outcome == "no end":
        last = attempt is report.attempts[-1]
        progress = f" after step {report.metrics[-1]['step']}{total}" if last and report.metrics else ""
        return f"ended without an error message{progress}{', or is running on another machine' if last else ''}"
    if attempt.outcome == "finished":
        return f"finished after step {attempt.step}{total}"
    if attempt.outcome == "stopped":
        return f"stopped by {attempt.signal} after step {attempt.step}{total}"
    if attempt.outcome == "interrupted":
        return f"interrupted at once in step {attempt.step}{total}, without a checkpoint"
    # A step beyond the last means the export and the plot after training.
    if report.steps is not None and (attempt.step or 0) > report.steps:
        return f"failed after step {report.steps}, its last"
    return f"failed in step {attempt.step}{total}"


def attempt_lines(attempt: Attempt, report: RunReport) -> list[str]:
    """Describe the start and the end of an attempt, and the ranks that failed or are gone, the cause first."""
    ranks = f"{attempt.world_size} rank{'s' * (attempt.world_size != 1)}" if attempt.world_size else "ranks unknown"
    on = f" on {attempt.platform}" if attempt.platform else ""
    restarted = f", restarted by the launcher (restart {attempt.restart})" if attempt.restart else ""
    lines, end = [], ending(attempt, report)
    if attempt.started is None:
        end += f"; {ranks}{restarted}"
    else:
        since = f"resumed after step {attempt.resumed_after}" if attempt.resumed_after else "began with step 1"
        lines.append(f"{clock(attempt.started)}: {since}; {ranks}{on}{restarted}")
    lines.append(f"{clock(attempt.ended)}: {end}" if attempt.ended else end)
    if attempt.outcome == "no end" and not attempt.running:
        lines.append("no rank has left an error: all were killed at once (out of memory? SIGKILL? power?)")
    if not attempt.errors or attempt.outcome == "interrupted":
        return lines
    first, others = attempt.errors[0], attempt.errors[1:]
    # The line names the rank already.
    message = " ".join(first.message.split()).removeprefix(f"rank {first.rank}: ")
    if len(message) > SHOWN_CHARACTERS:
        message = f"{message[:SHOWN_CHARACTERS].rstrip()}... (the rest is in errors/)"
    message = f"{first.error}: {message}" if message else first.error
    if attempt.outcome == "lost":
        lost = f"lost {'their machines' if len(attempt.silent) > 1 else 'its machine'}"
        lines.append(f"{ranks_named(attempt.silent)} left no error: killed (out of memory? SIGKILL?) or {lost}")
        return [*lines, f"rank {first.rank} ({first.host}) says: {message}"]
    lines.append(f"rank {first.rank} ({first.host}) failed{' first' * bool(others or attempt.silent)}: {message}")
    if others:
        kinds = ", ".join(sorted({error.error for error in others}))
        lines.append(f"then {ranks_named([error.rank for error in others])}: {kinds}")
    if attempt.silent:
        lines.append(f"{ranks_named(attempt.silent)} left no error: ended by the launcher, or killed")
    return lines


def steps_lines(report: RunReport) -> list[str]:
    """Describe the training progress."""
    if not report.metrics:
        return ["none done"]
    last = report.metrics[-1]
    total = f" of {report.steps}" if report.steps is not None else ""
    # null stands for a number that was not finite.
    loss, norm = (
        f"{last[key]:.4g}" if isinstance(last.get(key), (int, float)) else "not finite" for key in ("loss", "grad_norm")
    )
    lines = [f"{last['step']}{total}; last loss {loss}, gradient norm {norm}"]
    if skipped := [str(row["step"]) for row in report.metrics if row.get("skipped")]:
        lines.append(f"{len(skipped)} skipped (gradients not finite): {abbreviated(skipped)}")
    if report.bad_batches:
        lines.append(f"the batch that was skipped last is kept in {report.bad_batches[-1]}")
    return lines


def checkpoint_lines(report: RunReport) -> list[str]:
    """List the checkpoints and their state."""
    good = report.last_good
    lines = [] if report.checkpoints else ["none"]
    intact = "manifest and files are there (--verify compares digests)"
    if report.verified:
        intact = "every file is as it was written"
    for checkpoint in report.checkpoints:
        marks = [
            *(["latest"] if checkpoint.name == report.latest else []),
            *(["resumed from next"] if checkpoint == good else []),
        ]
        state = f"DAMAGED: {'; '.join(checkpoint.problems)}" if checkpoint.problems else intact
        note = f" ({', '.join(marks)})" if marks else ""
        lines.append(f"{checkpoint.name}{note}, {format_bytes(checkpoint.size_bytes)}: {state}")
    if report.latest is not None and report.latest not in [checkpoint.name for checkpoint in report.checkpoints]:
        lines.append(f"the file 'latest' names {report.latest!r}, which is not there")
    # A directory of a save in progress looks like one that was interrupted.
    state = "being written" if report.running else "left of a save that was interrupted; it can be removed"
    return [*lines, *(f"{path}: {state}" for path in report.unfinished)]


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
    if report.running:
        return ["nothing: it is running"]
    # Before the command to resume: resuming without removing the cause fails again.
    steps = [text for text in (cause(report, last), space(report)) if text]
    directory = next((attempt.directory for attempt in reversed(report.attempts) if attempt.directory), None)
    where = f", in {directory}" if directory and directory != os.getcwd() else ""
    if good is not None:
        return [*steps, f"resume after step {good.step}{where}:", f"  {command_to_go_on(report, '--resume auto')}"]
    has_begun = any(attempt.started is not None for attempt in report.attempts)
    if (has_begun and not failed_in_step_1(report.directory)) or report.metrics or report.checkpoints:
        return [
            *steps,
            f"no complete checkpoint: start over{where}:",
            f"  {command_to_go_on(report, '--overwrite')}",
        ]
    return [*steps, "start it again"]


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
    return f"fix what {error.error} says above (whole tracebacks: {report.directory / 'errors'}/*.json)"


def space(report: RunReport) -> str:
    """Return a warning if the disk has no space for another checkpoint."""
    largest = max((checkpoint.size_bytes for checkpoint in report.checkpoints), default=0)
    if not largest or report.free_bytes >= 2 * largest:
        return ""
    return (
        f"make room: a checkpoint takes {format_bytes(largest)}, and {format_bytes(report.free_bytes)} are free; "
        "checkpoint.keep_last is how many are kept"
    )


def command_to_go_on(report: RunReport, option: str) -> str:
    """Return the command that started the last attempt, changed so that the run resumes or starts over."""
    recorded = next((list(attempt.command) for attempt in reversed(report.attempts) if attempt.command), [])
    words = without_options(short_program(recorded))
    if not {"train", "rl"} & {*words} or not any("megascend" in word for word in words):
        size = next((attempt.world_size for attempt in reversed(report.attempts) if attempt.world_size), 1)
        # The recorded command was a program of the user's: the run's own copy of its settings always works.
        words = ["megascend", "train", str(report.directory / "config.yaml")]
        words += ["--nproc", str(size)] if size and size > 1 else []
    return f"{shlex.join(words)} {option}"


def short_program(words: list[str]) -> list[str]:
    """Shorten ``/usr/bin/python /usr/bin/torchrun ...`` to ``torchrun ...``, as it was typed."""
    if not words or not Path(words[0]).name.startswith("python"):
        return words
    rest = words[1:]
    # Options of Python that do not matter for repeating the run.
    while rest and rest[0] in ("-u", "-P", "-s", "-E", "-I"):
        rest = rest[1:]
    modules = {"megascend.apps.cli.main": "megascend", "torch.distributed.run": "torchrun"}
    if len(rest) > 1 and rest[0] == "-m" and rest[1] in modules:
        return [modules[rest[1]], *rest[2:]]
    program = Path(rest[0]).name if rest else ""
    return [program, *rest[1:]] if program in modules.values() else words


def without_options(words: list[str]) -> list[str]:
    """Remove ``--overwrite`` and ``--resume``, whose value is the next word."""
    following = zip(words, ["", *words], strict=False)
    return [
        word
        for word, before in following
        if before != "--resume" and word not in ("--overwrite", "--resume") and not word.startswith("--resume=")
    ]


def ranks_named(ranks: Sequence[int]) -> str:
    """Format ranks as ``rank 1`` or ``ranks 1, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {abbreviated([str(rank) for rank in sorted(ranks)])}"


def abbreviated(names: Sequence[str]) -> str:
    """Join names with commas; of many, count the last ones."""
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
