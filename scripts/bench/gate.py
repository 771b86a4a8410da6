"""Stored ratios of a device, and the check for those that have fallen. Pure except for reading and writing the file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One figure. ``ratio`` is compared, and is better when higher; None if there is nothing to compare with."""

    name: str
    """``line/figure``, unique in a run."""
    value: float
    unit: str
    ratio: float | None
    against: str
    """The reference of the ratio."""
    noise: float = 0.04
    """Tolerated relative drop of the ratio: the difference of repeated runs on one device."""


@dataclass(frozen=True)
class Stored:
    """A file of ``benchmarks/``: the ratios of one device and one scale."""

    device: str
    scale: str
    ratios: Mapping[str, tuple[float, float]]
    """(ratio, noise) by the row's name."""
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison: ``fallen`` and ``missing`` fail, ``new`` is only reported."""

    fallen: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.fallen and not self.missing


def compare(rows: Iterable[Row], stored: Stored, lines: Iterable[str]) -> Verdict:
    """Compare a run with the stored ratios.

    Args:
        rows: of this run.
        lines: names of the lines requested; stored rows of other lines are ignored.
    """
    measured = {row.name: row for row in rows}
    requested = set(lines)
    fallen, missing = [], []
    for name, (ratio, noise) in stored.ratios.items():
        if name.partition("/")[0] not in requested:
            continue
        current = measured[name].ratio if name in measured else None
        if current is None or not math.isfinite(current):
            missing.append(f"{name}: no ratio in this run, {ratio:.3f} stored")
        elif current < ratio * (1 - noise):
            fallen.append(
                f"{name}: {current:.3f}, {ratio:.3f} stored: {1 - current / ratio:.1%} less, noise is {noise:.0%}"
            )
    new = [name for name, row in measured.items() if row.ratio is not None and name not in stored.ratios]
    return Verdict(tuple(fallen), tuple(missing), tuple(new))


def merged(stored: Stored | None, rows: Iterable[Row], device: str, scale: str, versions: Mapping[str, str]) -> Stored:
    """Merge a run's ratios into the stored ones, which stay for rows that it has not measured."""
    ratios = dict(stored.ratios) if stored else {}
    ratios |= {row.name: (row.ratio, row.noise) for row in rows if row.ratio is not None}
    return Stored(device, scale, ratios, versions)


def refusal(stored: Stored, device: str, scale: str) -> str:
    """Return the reason why a run cannot be compared with ``stored``; empty if it can."""
    if stored.device != device:
        return f"the stored ratios are of {stored.device}, this is {device}"
    return "" if stored.scale == scale else f"the stored ratios are of scale {stored.scale}, this is {scale}"


def file_name(device: str, scale: str) -> str:
    """Return the file name of a device and scale: ``nvidia-h200.json`` for ``NVIDIA H200``, ``full``."""
    name = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{name}.json" if scale == "full" else f"{name}-{scale}.json"


def read(path: Path) -> Stored:
    """Read the stored ratios of a device.

    Raises:
        ValueError: the file does not contain stored ratios.
    """
    try:
        data = json.loads(path.read_text())
        ratios = {name: (float(row["ratio"]), float(row["noise"])) for name, row in data["ratios"].items()}
        return Stored(data["device"], data["scale"], ratios, data["versions"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no stored ratios: {error!r}") from error


def write(path: Path, stored: Stored) -> None:
    ratios = {
        name: {"ratio": round(ratio, 4), "noise": noise} for name, (ratio, noise) in sorted(stored.ratios.items())
    }
    data = {"device": stored.device, "scale": stored.scale, "versions": dict(stored.versions), "ratios": ratios}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
