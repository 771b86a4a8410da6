"""The installed stack, and marks of tests that need another one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import pytest
from packaging.version import Version

from megascend.models import architecture_named

MEGATRON_CORE = Version(metadata.version("megatron-core"))
FIRST_STACK = Version("0.16.0a0") <= MEGATRON_CORE
"""Not the oldest stack, 0.15."""

first_stack_required = pytest.mark.skipif(not FIRST_STACK, reason="the feature needs megatron-core 0.16")


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


def family_params(cases: Sequence[Any], in_ci: Sequence[str]) -> list[Any]:
    """Return cases, with a name, an architecture and a layout, as parameters; those that ``in_ci`` does not name are nightly."""
    unknown = set(in_ci) - {case.name for case in cases}
    assert not unknown, f"no such cases: {', '.join(unknown)}"
    return [
        pytest.param(
            case,
            id=case.name,
            marks=([] if case.name in in_ci else [pytest.mark.nightly]) + stack_marks(case.arch, case.parallel.context),
        )
        for case in cases
    ]
