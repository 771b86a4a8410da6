"""One row of the tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bad:
    """One bad input.

    It is used in a folder with a valid run: ``run.yaml``, ``data.jsonl``, the model ``model``, and ``rl.yaml``.

    Attributes:
        words: words that the message must contain: the value, the limit, the setting.
        command: arguments of ``megascend``.
        arrange: changes the folder.
        variables: environment variables.
    """

    words: tuple[str, ...]
    command: tuple[str, ...] = ("train", "run.yaml")
    arrange: Callable[[Path], Any] = lambda folder: None
    variables: Mapping[str, str] = field(default_factory=dict)


UNREADABLE = "/proc/self/mem"
"""A file that can be opened, but not read, by any user."""


def settings(*changes: str, says: str) -> Bad:
    """Pass each of ``changes`` with ``--set``; ``says``: words of the message, separated by bars."""
    return Bad(words(says), ("train", "run.yaml", *(part for change in changes for part in ("--set", change))))


def command(line: str, says: str, arrange: Callable[[Path], Any] = lambda folder: None, **variables: str) -> Bad:
    """Run a command line, which is split at spaces."""
    return Bad(words(says), tuple(line.split(" ")), arrange, variables)


def data(*records: Any, says: str, to: str = "bad.jsonl", changes: tuple[str, ...] = ()) -> Bad:
    """Use records as a JSONL file, or one text or bytes as the file's content."""
    [only_record, *rest] = records if records else [""]
    if isinstance(only_record, str | bytes) and not rest:
        content = only_record.encode() if isinstance(only_record, str) else only_record
    else:
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
    return Bad(
        words(says),
        settings(f"data.path={to}", *changes, says="").command,
        lambda folder: (folder / to).write_bytes(content),
    )


def words(says: str) -> tuple[str, ...]:
    """Split ``"one | two"`` at the bars."""
    return tuple(word.strip() for word in says.split(" | ") if word.strip())


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    """Return a conversation record; a message is an object, or ``"role: content"``."""
    converted = []
    for message in messages:
        role, separator, content = message.partition(": ") if isinstance(message, str) else ("", "", "")
        converted.append({"role": role, "content": content} if separator else message)
    return {"messages": converted} | more
