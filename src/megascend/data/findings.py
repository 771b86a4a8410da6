"""What is wrong with data, all of it at once, and what is worth a word about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from megascend.errors import DataError

SHOWN = 20
"""How many problems an error lists."""


@dataclass
class Findings:
    """Problems and remarks, gathered while data are read and turned into tokens.

    Attributes:
        setting: which one names the data.
        problems: what cannot be trained on; each begins with its source, ``file:line``.
        more: how many problems there are beside those listed.
        remarks: what was left out or cut, and how often and where first: ``{text: [count, source]}``.
    """

    setting: str = "data.path"
    problems: list[str] = field(default_factory=list)
    more: int = 0
    remarks: dict[str, list] = field(default_factory=dict)

    def problem(self, text: str) -> None:
        """Keep a problem; beyond :data:`SHOWN` it is only counted."""
        if len(self.problems) < SHOWN:
            self.problems.append(text)
        else:
            self.more += 1

    def remark(self, text: str, source: str) -> None:
        """Keep a remark; the same one about another source is counted."""
        self.remarks.setdefault(text, [0, source])[0] += 1

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """A DataError that leaves the block becomes a problem, and what follows the block goes ahead."""
        try:
            yield
        except DataError as error:
            self.problem(str(error))

    def raise_problems(self, of: str = "data") -> None:
        """Raise DataError with all problems, if there are any.

        Args:
            of: what has them.
        """
        if not self.problems:
            return
        if len(self.problems) == 1:
            raise DataError(self.problems[0])
        more = [f"and {self.more} more"] if self.more else []
        lines = "\n  ".join([*self.problems, *more])
        raise DataError(f"{len(self.problems) + self.more} problems in the {of}:\n  {lines}")

    def lines(self) -> list[str]:
        """The remarks as sentences, one a line."""
        said = []
        for text, (count, source) in self.remarks.items():
            said.append(f"{source}: {text}" if count == 1 else f"{source} and {count - 1} more: {text}")
        return said
