"""Plot of a run: loss, learning rate, gradient norm and throughput over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.errors import MissingDependencyError
from megascend.runtime.io.atomic import replacing
from megascend.surroundings import is_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def require_extra(package: str, setting: str) -> None:
    """Find out before training, not after it, that a package of the ``track`` extra is missing."""
    if not is_installed(package):
        raise MissingDependencyError(
            f"{setting}: true needs {package}, which is not installed: pip install 'megascend[track]', "
            f"or set {setting}: false"
        )


@dataclass(frozen=True)
class Panel:
    """One panel of the plot.

    Attributes:
        key: key in a row of metrics.jsonl; a mapping has a line for each of its names.
        smoothed: a run of many steps has a smoothed line over that of the steps.
        decades: a logarithmic axis where the values span two decades or more.
        from_zero: the axis begins at 0, unless it is logarithmic.
        second: a key whose values are drawn into the same panel, where a row has one, and what they are called.
    """

    key: str
    label: str
    colour: str
    smoothed: bool = False
    decades: bool = False
    from_zero: bool = True
    second: tuple[str, str] | None = None


def plot_metrics(
    rows: Sequence[dict[str, Any]], path: Path, title: str = "", panels: Sequence[Panel] | None = None
) -> None:
    """Draw ``rows`` (the lines of metrics.jsonl) as a PNG. Steps without a value leave a gap; see :func:`draw_panel`."""
    with replacing(path) as fresh:
        draw(rows, title, PANELS if panels is None else panels).savefig(fresh, format="png", dpi=130)


def draw(rows: Sequence[dict[str, Any]], title: str, panels: Sequence[Panel]) -> Figure:
    """Draw the figure of a run, two panels a row, or three if there are more than four; omit panels without values."""
    require_extra("matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A run without evaluations, or without parts of the reward, has nothing to show of them.
    panels = [panel for panel in panels if any(row.get(panel.key) not in (None, {}) for row in rows)] or panels[:1]
    across = 2 if len(panels) <= 4 else 3
    lines = -(-len(panels) // across)
    size = (5.2 * across, 3.4 * lines) if across == 2 else (4 * across, (3.4 if lines <= 2 else 2.6) * lines)
    figure = Figure(figsize=size, layout="constrained")
    # Not pyplot, which keeps figures in globals and may open a display.
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, across, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid, panels, strict=False):
        draw_panel(axes, rows, panel)
    figure.suptitle(title, fontsize=11)
    return figure


def draw_panel(axes: Axes, rows: Sequence[dict[str, Any]], panel: Panel) -> None:
    """Draw one panel over the steps; a metric of less than half of them, such as an evaluation's, over those that have it."""
    present = [row for row in rows if row.get(panel.key) not in (None, {})]
    sparse = 2 * len(present) < len(rows)
    shown_rows = present if sparse else rows
    steps, curves = [row["step"] for row in shown_rows], columns(shown_rows, panel.key)
    values = [value for curve in curves.values() for value in curve]
    measured = [row for row in rows if panel.second is not None and row.get(panel.second[0]) is not None]
    second_values = column(measured, panel.second[0]) if panel.second is not None else []
    logarithmic = panel.decades and spans_decades([*values, *second_values])
    reach = len(rows) // SMOOTHED_FROM if panel.smoothed and not sparse else 0
    for number, (name, curve) in enumerate(curves.items()):
        # The colours of matplotlib's cycle tell the names of a mapping apart.
        colour = f"C{number}" if name else panel.colour
        if reach:
            means = smoothed([math.log(value) for value in curve] if logarithmic else curve, reach)
            label = "_" if name else "each step"  # matplotlib leaves such a label out of the legend
            axes.plot(steps, curve, color=colour, linewidth=0.8, alpha=0.35, label=label)
            curve = [math.exp(mean) for mean in means] if logarithmic else means
        # Without a line to its neighbours, a point is visible only with a marker.
        marker = "." if not reach and (sparse or len(rows) < MARKED_BELOW) else None
        label = name or ("smoothed" if reach else "each step")
        axes.plot(steps, curve, color=colour, linewidth=1.6 if reach else 1.4, marker=marker, label=label)
    if panel.second is not None and measured:
        measured_steps = [row["step"] for row in measured]
        axes.plot(measured_steps, second_values, "o-", color=SECOND_COLOUR, markersize=3, label=panel.second[1])
    if len(axes.lines) > 1 or "" not in curves:
        axes.legend(frameon=False, fontsize=9)
    axes.set_title(panel.label, loc="left", fontsize=11)
    axes.set_xlabel("step")
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    elif panel.from_zero and all(value >= 0 for value in values if value == value):
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.key == "grad_norm":
        for step in (row["step"] for row in rows if row.get("skipped")):
            axes.axvline(step, color="tab:red", alpha=0.4, linewidth=0.8)


def column(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [math.nan if row.get(key) is None else float(row[key]) for row in rows]


def columns(rows: Sequence[dict[str, Any]], key: str) -> dict[str, list[float]]:
    """Return one metric of all rows by its names, in the order of their appearance; under ``""`` if it is a number."""
    names = dict.fromkeys(name for row in rows if isinstance(row.get(key), dict) for name in row[key])
    if not names:
        return {"": column(rows, key)}
    return {name: column([row.get(key) or {} for row in rows], name) for name in names}


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Return means over ``reach`` steps on either side, fewer at the ends, symmetric; NaN stays and does not count. Pure."""
    means = []
    for index, value in enumerate(values):
        near = min(reach, index, len(values) - 1 - index)
        around = [other for other in values[index - near : index + near + 1] if other == other]
        means.append(sum(around) / len(around) if value == value else math.nan)
    return means


def spans_decades(values: Sequence[float]) -> bool:
    finite = [value for value in values if value == value]
    return bool(finite) and min(finite) > 0 and max(finite) >= 100 * min(finite)


SMOOTHED_FROM = 40
"""Steps from which on a line is smoothed; a mean reaches a part in so many of the run to either side."""
MARKED_BELOW = 30
"""Steps below which each has a dot."""
SECOND_COLOUR = "tab:red"
PANELS = (
    Panel(
        "loss",
        "loss (mean over trained tokens)",
        "tab:blue",
        smoothed=True,
        decades=True,
        from_zero=False,
        second=("validation_loss", "validation"),
    ),
    Panel("lr", "learning rate", "tab:purple"),
    Panel("grad_norm", "gradient norm, before clipping", "tab:orange", smoothed=True, decades=True),
    Panel("tokens_per_s", "tokens per second", "tab:green", smoothed=True),
)
