"""Ratios that were stored for a device, and which of a run's have fallen. Pure but for reading and writing the file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One figure. ``ratio`` is what is compared and is better when higher; None: there is nothing to compare with here."""

    name: str
    """``line/what``, once in a run."""
    value: float
    unit: str
    ratio: float | None
    against: str
    """What the ratio is to."""
    noise: float = 0.04
    """How much of the ratio may be gone without a reason: what repeated runs on one device differ by."""
    ours: bool = True
    """Of megascend: what others take is printed, and neither stored nor compared."""


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
    """``fallen`` and ``missing`` fail; ``new`` is only said."""

    fallen: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.fallen and not self.missing


def compare(rows: Iterable[Row], stored: Stored, lines: Iterable[str]) -> Verdict:
    """Hold a run against what is stored.

    Args:
        rows: of this run.
        lines: those that this run was asked for; stored rows of others are left out.
    """
    found = {row.name: row for row in rows}
    asked = set(lines)
    fallen, missing = [], []
    for name, (ratio, noise) in stored.ratios.items():
        if name.partition("/")[0] not in asked:
            continue
        got = found[name].ratio if name in found else None
        if got is None or not math.isfinite(got):
            missing.append(f"{name}: no ratio in this run, {ratio:.3f} stored")
        elif got < ratio * (1 - noise):
            fallen.append(f"{name}: {got:.3f}, {ratio:.3f} stored: {1 - got / ratio:.1%} less, noise is {noise:.0%}")
    new = [name for name, row in found.items() if row.ratio is not None and row.ours and name not in stored.ratios]
    return Verdict(tuple(fallen), tuple(missing), tuple(new))


def merged(stored: Stored | None, rows: Iterable[Row], device: str, scale: str, versions: Mapping[str, str]) -> Stored:
    """What to store after a run: its ratios, and the stored ones of rows that it has not measured."""
    ratios = dict(stored.ratios) if stored else {}
    ratios |= {row.name: (row.ratio, row.noise) for row in rows if row.ratio is not None and row.ours}
    return Stored(device, scale, ratios, versions)


def refusal(stored: Stored, device: str, scale: str) -> str:
    """Why a run on this device cannot be held against ``stored``; empty if it can."""
    if stored.device != device:
        return f"the stored ratios are of {stored.device}, this is {device}"
    return "" if stored.scale == scale else f"the stored ratios are of scale {stored.scale}, this is {scale}"


def file_name(device: str, scale: str) -> str:
    """``NVIDIA H200``, ``full`` as ``nvidia-h200.json``."""
    name = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{name}.json" if scale == "full" else f"{name}-{scale}.json"


def read(path: Path) -> Stored:
    """
    Raises:
        ValueError: the file is no file of ratios.
    """
    try:
        found = json.loads(path.read_text())
        ratios = {name: (float(of["ratio"]), float(of["noise"])) for name, of in found["ratios"].items()}
        return Stored(found["device"], found["scale"], ratios, found["versions"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no stored ratios: {error!r}") from error


def write(path: Path, stored: Stored) -> None:
    ratios = {
        name: {"ratio": round(ratio, 4), "noise": noise} for name, (ratio, noise) in sorted(stored.ratios.items())
    }
    found = {"device": stored.device, "scale": stored.scale, "versions": dict(stored.versions), "ratios": ratios}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
