"""Messages of the commands on stderr: errors, warnings, and megascend's log with the rank in front if there are several."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import typer

from megascend.surroundings import PHASES

READS_RUN_FILES = "megascend.config.run_file"
"""Logger whose messages only the first rank shows."""


def show_messages() -> None:
    """Write megascend's log messages, warnings and phases, to stderr. For commands; importing megascend configures no logging.

    Idempotent. A program of the user's own configures the logger ``megascend`` as it likes.
    """
    logger = logging.getLogger("megascend")
    if any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        return
    handler = _StderrHandler()
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name == PHASES.name)
    handler.setFormatter(RankFormatter())
    # Every rank reads the run file, and finds the same.
    handler.addFilter(lambda record: record.name != READS_RUN_FILES or os.environ.get("RANK", "0") == "0")
    logger.addHandler(handler)
    # A package that configures the root logger would otherwise have each message printed again.
    logger.propagate = False


def report(text: str) -> None:
    """Write an error to stderr, red on a terminal."""
    typer.secho(text, fg=typer.colors.RED, err=True)


def close_stdin() -> None:
    """Close stdin for all packages: a tracker without a key would prompt behind the progress bar. For commands."""
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  until the process ends


class RankFormatter(logging.Formatter):
    """Formatter of the message only, with the rank in front if there are several and the message does not begin with it."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if text.startswith("rank ") or not several_ranks(os.environ):
            return text
        return f"[rank {os.environ.get('RANK', '?')}] {text}"


def several_ranks(environment: Mapping[str, str]) -> bool:
    """Check whether the world size exceeds 1; an invalid value counts as 1 here, and is reported elsewhere."""
    size = environment.get("WORLD_SIZE", "1")
    return size.isdecimal() and int(size) > 1


class _StderrHandler(logging.StreamHandler):
    """Handler that writes to the current ``sys.stderr``, which tests replace; its class marks it, so that it is added once."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # type: ignore[reportIncompatibleVariableOverride]
        return sys.stderr
