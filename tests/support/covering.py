"""Selection of the matrix cases that represent the others in CI."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from importlib import metadata
from typing import Any, TypeVar

import pytest
from packaging.version import Version

from megascend.models import architecture_named
from megascend.testing.parity import Case

T = TypeVar("T")
Settings = Mapping[str, Hashable]

MEGATRON_CORE = Version(metadata.version("megatron-core"))
FIRST_STACK = Version("0.16.0a0") <= MEGATRON_CORE
FIRST_STACK_ONLY: list[pytest.MarkDecorator] = [] if FIRST_STACK else [pytest.mark.nightly]
"""Marks of a parameter that is nightly on the oldest stack."""


def stack_marks(model_type: str, context: int = 1) -> list[pytest.MarkDecorator]:
    """Return the mark of a test that trains this family on the Megatron engine: skipped where Megatron-Core cannot.

    Args:
        context: context parallel size.
    """
    architecture = architecture_named(model_type)
    oldest = architecture.megatron_core or (architecture.context_core if context > 1 else None)
    if oldest is None or Version(oldest) <= MEGATRON_CORE:
        return []
    return [
        pytest.mark.skip(reason=f"{model_type} needs megatron-core {oldest} (stack {oldest}), here is {MEGATRON_CORE}")
    ]


first_stack_required = pytest.mark.skipif(not FIRST_STACK, reason="the feature needs megatron-core 0.16")


def first_stack_only(test: T) -> T:
    """Mark a test as nightly on the oldest stack."""
    return test if FIRST_STACK else pytest.mark.nightly(test)


COMBINED = ("MoE CP2 x EP2", "TP2 tied", "TP2 x CP2 + SP", "TP2 x PP2 x VPP2 + SP")
"""Extra CI cases, but not on the oldest stack: layouts that combine in one code path, not only in one run."""


def covering(cases: Sequence[T], settings: Callable[[T], Settings]) -> list[T]:
    """Select few of ``cases`` that together have every setting of all of them.

    Greedy (each step takes the case that adds most) and deterministic.

    Args:
        settings: returns the axes on which a case differs from the plain one, with their values.
    """
    parts = [{*settings(case).items()} for case in cases]
    lacking = set().union(*parts)
    chosen: list[int] = []
    while lacking:
        best = max(range(len(cases)), key=lambda index: len(parts[index] & lacking))
        chosen.append(best)
        lacking -= parts[best]
    return [cases[index] for index in sorted(chosen)]


def settings_of(case: Case) -> Settings:
    """Return the axes on which a parity case differs from the plain one."""
    layout, plain = case.parallel, Case("plain")
    ranks = layout.tensor * layout.pipeline * layout.context
    settings = {f"parallel.{axis}": value for axis, value in layout if value != getattr(plain.parallel, axis)}
    settings |= {"parallel.context_algorithm": layout.context_algorithm} if layout.context > 1 else {}
    settings |= {"data": case.world_size // ranks} if case.world_size > ranks else {}
    settings |= {f"model.{name}": value for name, value in case.overrides.items()}
    settings |= {f"optimizer.{name}": value for name, value in case.optimizer.items()}
    for axis in ("arch", "precision", "recompute", "packing", "targets", "aux_loss", "experts", "resumes"):
        value = getattr(case, axis)
        if value != getattr(plain, axis):
            settings[axis] = repr(value)
    return settings | ({"aux_formula": case.aux_formula} if case.aux_loss else {})


def chosen(cases: Sequence[Case]) -> list[Any]:
    """Return test parameters: cases that are not selected are nightly, except :data:`COMBINED` from stack 0.16 on."""
    standard = covering(cases, settings_of) + [case for case in cases if FIRST_STACK and case.name in COMBINED]
    return [case if case in standard else pytest.param(case, marks=pytest.mark.nightly) for case in cases]


def on_this_stack(cases: Sequence[Case], nightly: Collection[str] = ()) -> list[Any]:
    """Return test parameters: all cases but ``nightly``; on the oldest stack, few that cover all."""
    if not FIRST_STACK:
        return chosen(cases)
    return [pytest.param(case, marks=pytest.mark.nightly) if case.name in nightly else case for case in cases]
