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

    It is met in a folder with a run that would work: ``run.yaml``, ``data.jsonl``, the model ``model``, and ``rl.yaml``.

    Attributes:
        words: all of them stand in the message: the value, the limit, the setting.
        command: of megascend.
        arrange: puts what is bad into the folder.
        variables: of the environment.
    """

    words: tuple[str, ...]
    command: tuple[str, ...] = ("train", "run.yaml")
    arrange: Callable[[Path], Any] = lambda folder: None
    variables: Mapping[str, str] = field(default_factory=dict)


UNREADABLE = "/proc/self/mem"
"""A file that opens, and of which nothing can be read, by nobody."""


def settings(*changes: str, says: str) -> Bad:
    """``--set`` with each of ``changes``; ``says``: words of the message, divided by a bar."""
    return Bad(words(says), ("train", "run.yaml", *(part for change in changes for part in ("--set", change))))


def command(line: str, says: str, arrange: Callable[[Path], Any] = lambda folder: None, **variables: str) -> Bad:
    """A command line, divided by spaces."""
    return Bad(words(says), tuple(line.split(" ")), arrange, variables)


def data(*records: Any, says: str, to: str = "bad.jsonl", changes: tuple[str, ...] = ()) -> Bad:
    """A file of JSONL, or the text or bytes that are given instead, is the data."""
    [whole, *rest] = records if records else [""]
    if isinstance(whole, str | bytes) and not rest:
        content = whole.encode() if isinstance(whole, str) else whole
    else:
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
    return Bad(
        words(says),
        settings(f"data.path={to}", *changes, says="").command,
        lambda folder: (folder / to).write_bytes(content),
    )


def words(says: str) -> tuple[str, ...]:
    """``"one | two"``: one, two."""
    return tuple(word.strip() for word in says.split(" | ") if word.strip())


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    """A record of a conversation; a message is an object, or ``"role: content"``."""
    found = []
    for message in messages:
        role, separator, content = message.partition(": ") if isinstance(message, str) else ("", "", "")
        found.append({"role": role, "content": content} if separator else message)
    return {"messages": found} | more
