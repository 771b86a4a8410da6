"""Tables and labelled lines of the commands' output. Lines are not wrapped: paths and commands are copied from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Column, Table

GIB = 2**30


def labelled(label: str, lines: Iterable[str], width: int = 10) -> Iterator[str]:
    """Yield lines with a label of ``width`` columns before the first."""
    for index, line in enumerate(lines):
        yield f"{'' if index else label:<{width}}{line}"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]], left: Iterable[int] = (0,)) -> Iterator[str]:
    """Yield the lines of a table whose columns are divided by two spaces.

    Args:
        columns: their titles.
        left: indices of the columns that are not aligned to the right.
    """
    titles = (
        Column(title, justify="left" if index in (*left,) else "right", no_wrap=True)
        for index, title in enumerate(columns)
    )
    grid = Table(*titles, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for row in rows:
        grid.add_row(*row)
    # Without markup, which would read brackets in paths as tags, and wider than any row.
    console = Console(width=1000, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(grid)
    yield from (line.rstrip() for line in captured.get().splitlines())
