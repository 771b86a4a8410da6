"""The sections of an acceptance run, in the order in which one explains the next, and the settings of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megascend.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """Settings of a run: read by the command, handed to every section as JSON.

    Attributes:
        folder: for models, logs and results of this run.
        cards: number of cards that take part.
        simulated: run on the simulated device: the bounds are those of a CPU, and speed is meaningless.
        stand_in: use the tests' stand-ins for Ascend's packages.
        quick: run only a few cases of every section.
    """

    folder: Path
    cards: int
    simulated: bool = False
    stand_in: bool = False
    quick: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"folder": str(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**values | {"folder": Path(values["folder"])})


@dataclass(frozen=True)
class Section:
    """One part of the run.

    Attributes:
        name: also the name of its module in this package, which has ``run(settings, results)``.
        title: for the terminal.
        deadline_s: seconds it may take on cards.
        min_cards: minimum number of cards; with fewer, the section is left out.
    """

    name: str
    title: str
    deadline_s: float
    min_cards: int = 1


SECTIONS = (
    Section("doctor", "megascend doctor", 300),
    Section("operators", "fused operators against plain formulas, forward and backward", 900),
    Section("collectives", "collectives over HCCL, objects over Gloo", 600),
    Section("recipes", "the recipes of cookbook/ascend", 2400, min_cards=4),
    Section("parity", "ten steps of every layout against Hugging Face", 3600),
    Section("resume", "a run that is killed and resumed, bit for bit", 900),
    Section("speed", "speed and memory", 900),
)
NAMES = tuple(section.name for section in SECTIONS)
SIMULATED_TIMEOUT_FACTOR = 2.0
"""Deadlines are this many times as long on the simulated device."""


def select(only: Sequence[str]) -> list[Section]:
    """Return the sections named, or all of them, in their order.

    Raises:
        ConfigError: a section is unknown.
    """
    if unknown := [name for name in only if name not in NAMES]:
        raise ConfigError(f"unknown section {', '.join(unknown)}; available: {', '.join(NAMES)}")
    return [section for section in SECTIONS if not only or section.name in only]


def too_few_cards(required: int, cards: int) -> str:
    """Return the reason to leave out a case that needs ``required`` cards; empty if there are enough."""
    return "" if cards >= required else f"needs {required} cards, and {cards} take{'s' if cards == 1 else ''} part"


def largest_power_of_two(cards: int) -> int:
    """Return the largest power of two up to ``cards``, at most eight."""
    return max(size for size in (1, 2, 4, 8) if size <= cards)
