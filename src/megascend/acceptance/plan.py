"""The sections of an acceptance run, in the order in which one explains the next. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megascend.errors import ConfigError


@dataclass(frozen=True)
class Section:
    """One part of the run.

    Attributes:
        module: its code; ``run(settings, results)`` in it.
        title: for the terminal.
        deadline_s: seconds it may take on cards.
        least_cards: with fewer, it is left out.
    """

    name: str
    title: str
    deadline_s: float
    least_cards: int = 1

    @property
    def module(self) -> str:
        """The module whose ``run`` does it."""
        return f"megascend.acceptance.{self.name}"


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
    """The sections named, or all of them, in their order.

    Raises:
        ConfigError: there is no such section.
    """
    if unknown := [name for name in only if name not in NAMES]:
        raise ConfigError(f"no section {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return [section for section in SECTIONS if not only or section.name in only]


def reason_to_leave_out(section: Section, cards: int) -> str:
    """Why a section cannot run on so many cards; empty if it can."""
    if cards >= section.least_cards:
        return ""
    return f"needs {section.least_cards} cards, and {cards} take{'s' if cards == 1 else ''} part"
