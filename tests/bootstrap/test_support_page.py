"""docs/support.md contains the version table, and the versions in pyproject.toml are inside it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megascend.bootstrap.versions import STACKS, support_table

ROOT = Path(__file__).parents[2]


def test_support_page_contains_the_version_table() -> None:
    page = (ROOT / "docs" / "support.md").read_text()
    assert support_table() in page, (
        "write what megascend.bootstrap.versions.support_table() returns into docs/support.md"
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_pinned_extras_are_admitted_by_their_stack() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for stack in STACKS:
        pinned = {
            requirement.name: requirement
            for requirement in map(Requirement, extras[f"stack-{stack.name.replace('.', '-')}"])
        }
        for package in ("megatron-core", "mcore-bridge"):
            version = re.fullmatch(r"==([\d.]+)", str(pinned[package].specifier))
            assert version is not None
            assert version[1] in stack.requirement(package)
