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


def plot_metrics(rows: Sequence[dict[str, Any]], path: Path, title: str = "") -> None:
    """Draw ``rows`` (the lines of metrics.jsonl) as a PNG. Steps whose value is None, skipped ones, leave a gap."""
    require_extra("matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    steps = [row["step"] for row in rows]
    for axes, (key, label, colour) in zip(panels, PANELS, strict=True):
        values = [float("nan") if row.get(key) is None else row[key] for row in rows]
        axes.plot(steps, values, color=colour, linewidth=1.4, marker="." if len(rows) < 30 else None)
        axes.set_title(label, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for step in (row["step"] for row in rows if row.get("skipped")):
        panels[1].axvline(step, color="tab:red", alpha=0.4, linewidth=0.8)
    figure.suptitle(title, fontsize=11)
    with replacing(path) as fresh:
        figure.savefig(fresh, format="png", dpi=130)


PANELS = (
    ("loss", "loss (mean over trained tokens)", "tab:blue"),
    ("grad_norm", "gradient norm", "tab:orange"),
    ("tokens_per_s", "tokens per second", "tab:green"),
)
