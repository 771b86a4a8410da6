"""The picture of a run: loss, gradient norm and throughput over the steps."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascend.errors import MissingDependencyError
from megascend.files import replacing


def require_extra(package: str, setting: str) -> None:
    """Find out before training, not after it, that a package of the ``track`` extra is missing.

    Raises:
        MissingDependencyError: ``package`` is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingDependencyError(
            f"{setting}: true needs {package}, which is not installed: pip install 'megascend[track]', "
            f"or set {setting}: false"
        )


Panel = tuple[str, str, str]
"""A key of metrics.jsonl, what is written above its panel, and a colour."""


def plot_metrics(
    rows: Sequence[dict[str, Any]], path: Path, title: str = "", panels: Sequence[Panel] | None = None
) -> None:
    """Draw ``rows`` (the lines of metrics.jsonl) as a PNG, three panels a line. Steps whose value is None leave a gap."""
    require_extra("matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = PANELS if panels is None else tuple(panels)
    lines = -(-len(shown) // ACROSS)
    figure = Figure(figsize=(4 * ACROSS, 3.6 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    drawn = figure.subplots(lines, ACROSS, squeeze=False).flatten()
    steps = [row["step"] for row in rows]
    for axes in drawn[len(shown) :]:
        axes.set_axis_off()
    for axes, (key, label, colour) in zip(drawn, shown, strict=False):
        values = [float("nan") if row.get(key) is None else row[key] for row in rows]
        axes.plot(steps, values, color=colour, linewidth=1.4, marker="." if len(rows) < 30 else None)
        if key == "loss" and (held_out := [row for row in rows if row.get("validation_loss") is not None]):
            measured = [row["validation_loss"] for row in held_out]
            axes.plot(
                [row["step"] for row in held_out], measured, "o-", color="tab:red", markersize=3, label="validation"
            )
            axes.legend(frameon=False, fontsize=9)
        axes.set_title(label, loc="left", fontsize=11)
        axes.set_xlabel("step")
        if all(value >= 0 for value in values if value == value):
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if key == "grad_norm":
            for step in (row["step"] for row in rows if row.get("skipped")):
                axes.axvline(step, color="tab:red", alpha=0.4, linewidth=0.8)
    figure.suptitle(title, fontsize=11)
    with replacing(path) as fresh:
        figure.savefig(fresh, format="png", dpi=130)


ACROSS = 3
PANELS = (
    ("loss", "loss (mean over trained tokens)", "tab:blue"),
    ("grad_norm", "gradient norm", "tab:orange"),
    ("tokens_per_s", "tokens per second", "tab:green"),
)
