"""What pip installs today by the lines of README and docs is what the bootstrap accepts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from uv import find_uv_bin

from megascend.runtime.bootstrap.versions import PACKAGES, STACKS, require_supported

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
INSTALL = re.compile(r"pip install [^`\n]*'(?:megascend|\.)\[([\w,-]*stack-[\w,-]*)\]'")


def printed(pattern: re.Pattern[str]) -> set[str]:
    return {match[1] for page in PAGES for match in pattern.finditer(page.read_text(encoding="utf-8"))}


# "": the dependencies of every installation.
EXTRAS = sorted(printed(INSTALL) | {f"stack-{stack.name.replace('.', '-')}" for stack in STACKS} | {""})
LATER = ("stack-0-18", "stack-0-19")  # their Megatron-Core needs Python 3.12
CASES = [(extras, "3.12" if any(stack in extras for stack in LATER) else "3.11") for extras in EXTRAS]
CASES += [("stack-0-16", "3.10"), ("stack-0-16", "3.13"), ("", "3.12")]
OFTEN = [
    ("stack-0-16,npu,track", "3.11"),
    ("stack-0-19", "3.12"),
]  # the others at night: each asks the registry for some 60 packages


@pytest.mark.parametrize(
    ("extras", "python"),
    [pytest.param(*case, marks=[] if case in OFTEN else pytest.mark.nightly) for case in CASES],
)
def test_newest_versions_are_supported(extras: str, python: str) -> None:
    """Resolve against the registry's newest versions, as on the day when a user types the line; nothing is installed."""
    command = [find_uv_bin(), "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python-version", python]
    for extra in filter(None, extras.split(",")):
        command += ["--extra", extra]
    completed = subprocess.run(
        [*command, str(ROOT / "pyproject.toml")], capture_output=True, text=True, timeout=400, check=False
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    requirements = map(Requirement, completed.stdout.splitlines())
    versions = {requirement.name: next(iter(requirement.specifier)).version for requirement in requirements}
    stack = require_supported({package: versions.get(package) for package in PACKAGES})
    assert f"stack-{stack.name.replace('.', '-')}" in extras or not extras
    if "npu" in extras:
        assert Version(versions["torch-npu"]) in stack.requirement("torch_npu")
        assert Version(versions["torch-npu"]).release[:2] == Version(versions["torch"]).release[:2]
