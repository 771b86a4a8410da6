"""Collect all problems of data, grouped by kind, and remarks about it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megascend.errors import DataError

KINDS = 30
"""Maximum number of kinds that are listed; problems of further kinds are only counted."""
PLACES = 5
"""Maximum number of sources listed for a kind."""
SOURCE = re.compile(r"(.+?(?::\d+|\[\d+\])): (.*)", re.DOTALL)
"""A message that begins with ``file:line`` or ``file[row]``."""
VARIES = re.compile(r"(?<=found )(?!:).*|(?<=got ).*|\(\.\..*?\)|\d+", re.DOTALL)
"""Parts of a message that vary within a kind: quoted values and numbers."""


@dataclass
class Kind:
    """Problems or remarks of one kind: the text of the first, their number, and the first sources in order."""

    text: str
    count: int = 0
    sources: list[str] = field(default_factory=list)

    def add(self, source: str) -> None:
        """Count another source; the same one again is listed once, and none of a message that names it elsewhere."""
        self.count += 1
        if source and len(self.sources) < PLACES and source not in self.sources:
            self.sources.append(source)


@dataclass
class Findings:
    """Problems and remarks by kind, gathered while data are read and turned into tokens.

    Attributes:
        setting: setting that names the data.
        problems, more_problems: data that cannot be trained on, and the number of problems of further kinds.
        remarks, more_remarks: data that was left out, cut or converted.
        incomplete: a file could not be read to its end.
        kinds: number of documents of each kind.
        ends: tokens that end an answer or a text, and are learned.
    """

    setting: str = "data.path"
    problems: dict[str, Kind] = field(default_factory=dict)
    more_problems: int = 0
    remarks: dict[str, Kind] = field(default_factory=dict)
    more_remarks: int = 0
    incomplete: bool = False
    kinds: dict[str, int] = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)

    @property
    def count(self) -> int:
        """Return the number of problems."""
        return sum(kind.count for kind in self.problems.values()) + self.more_problems

    def problem(self, message: str) -> None:
        """Record a problem, whose message begins with its source (``file:line: ``); of a known kind, it is counted."""
        match = SOURCE.fullmatch(message)
        source, text = (match[1], match[2]) if match else ("", message)
        # Messages that differ only in values and numbers are of one kind: one wrong column in a million rows gives one line.
        self.more_problems += not _count(self.problems, VARIES.sub("#", text), text, source)

    def file_problem(self, message: str) -> None:
        """Record a problem after which the rest of a file is not read."""
        self.problem(message)
        self.incomplete = True

    def remark(self, text: str, source: str) -> None:
        """Keep a remark; the same one about another source is counted."""
        self.more_remarks += not _count(self.remarks, text, text, source)

    def skip_problems(self, reason: str) -> None:
        """Turn the problems so far into remarks that their documents are left out for ``reason``."""
        for key, kind in self.problems.items():
            for source in [*kind.sources, *[""] * (kind.count - len(kind.sources))]:
                self.more_remarks += not _count(self.remarks, key, f"left out ({reason}): {kind.text}", source)
        self.more_remarks += self.more_problems
        self.problems.clear()
        self.more_problems = 0

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Turn a DataError raised in the block into a problem, or into one for each line that begins with its source."""
        try:
            yield
        except DataError as error:
            message = str(error)
            match = SOURCE.fullmatch(message)
            for line in re.split(rf"\n(?={re.escape(match[1])}: )", message) if match else [message]:
                self.problem(line)

    def raise_problems(self, subject: str | None = None) -> None:
        """Raise DataError with all problems, if any; ``subject``: the source of the problems; default: the setting's data."""
        if not self.problems:
            return
        count = self.count
        lines = [_line(kind) for kind in self.problems.values()]
        if count == 1:
            raise DataError(lines[0])
        if self.more_problems:
            lines.append(f"and {self.more_problems} more, of other kinds")
        subject = subject or ("data" if self.setting == "data.path" else f"data of {self.setting}")
        kinds = f", of {len(self.problems)} kind{'s' if len(self.problems) > 1 else ''}" if len(lines) < count else ""
        raise DataError(f"{count} problems in the {subject}{kinds}:\n  " + "\n  ".join(lines))

    def lines(self) -> list[str]:
        """Return the remarks as sentences, one a line."""
        lines = []
        for kind in self.remarks.values():
            suffix = "" if kind.count == 1 else f" and {kind.count - 1} more"
            # A problem may name its file at another place than its beginning.
            lines.append(f"{kind.sources[0]}{suffix}: {kind.text}" if kind.sources else f"{kind.text}{suffix}")
        return lines + ([f"and {self.more_remarks} more remarks"] if self.more_remarks else [])


@contextlib.contextmanager
def of_source(source: str) -> Iterator[None]:
    """Begin every line of a DataError raised in the block with the source."""
    try:
        yield
    except DataError as error:
        raise DataError("\n".join(f"{source}: {line}" for line in str(error).split("\n"))) from error.__cause__


def joined(errors: Sequence[DataError]) -> DataError:
    """Join the errors of training and validation data into one."""
    first, *rest = map(str, errors)
    return DataError("\n  and ".join([first, *(message.replace("\n", "\n  ") for message in rest)]))


def _count(kinds: dict[str, Kind], key: str, text: str, source: str) -> bool:
    """Add a source to its kind; False if there are too many kinds for another one."""
    if key not in kinds and len(kinds) >= KINDS:
        return False
    kinds.setdefault(key, Kind(text)).add(source)
    return True


def _line(kind: Kind) -> str:
    """Write a problem with its first sources: ``chat.jsonl:7 and 17 more (:9, :12, :15, :18, ..): ...``."""
    if kind.count == 1 or not kind.sources:
        times = f"{kind.count} times: " if kind.count > 1 else ""
        return f"{times}{': '.join([*kind.sources, kind.text])}"
    first, *rest = kind.sources
    file = re.match(r".*(?=[:\[])", first, re.DOTALL)
    short = [source.removeprefix(file[0]) if file else source for source in rest]
    places = ", ".join([*short, ".."] if kind.count > len(kind.sources) else short)
    return f"{first} and {kind.count - 1} more{f' ({places})' if places else ''}: {kind.text}"
