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
        simulated: on the simulated device: bounds are those of a CPU, and speed means nothing.
        stand_in: the stand-in of the tests takes MindSpeed's place.
        quick: a few cases of every section only.
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
        name: and that of its module in this package, which has ``run(settings, results)``.
        title: for the terminal.
        deadline_s: seconds it may take on cards.
        least_cards: with fewer, it is left out.
    """

    name: str
    title: str
    deadline_s: float
    least_cards: int = 1


SECTIONS = (
    Section("doctor", "megascend doctor", 300),
    Section("operators", "fused operators against plain formulas, forward and backward", 900),
    Section("collectives", "collectives over HCCL, objects over Gloo", 600),
    Section("recipes", "the recipes of cookbook/ascend", 2400, least_cards=4),
    Section("parity", "ten steps of every layout against Hugging Face", 3600),
    Section("resume", "a run that is killed and resumed, bit for bit", 900),
    Section("speed", "speed and memory", 900),
)
NAMES = tuple(section.name for section in SECTIONS)
SIMULATED_TIMEOUT_FACTOR = 2.0
"""Deadlines are this many times as long on the simulated device."""


def chosen(only: Sequence[str]) -> list[Section]:
    """Return the sections named, or all of them, in their order.

    Raises:
        ConfigError: there is no such section.
    """
    if unknown := [name for name in only if name not in NAMES]:
        raise ConfigError(f"no section {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return [section for section in SECTIONS if not only or section.name in only]


def too_few_cards(needed: int, cards: int) -> str:
    """Return why something that needs ``needed`` cards is left out; empty if there are enough."""
    return "" if cards >= needed else f"needs {needed} cards, and {cards} take{'s' if cards == 1 else ''} part"


def largest_power_of_two(cards: int) -> int:
    """Return how many of the cards a layout of powers of two can use, up to eight."""
    return max(size for size in (1, 2, 4, 8) if size <= cards)
