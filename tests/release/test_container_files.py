"""Container files: their sources and extras exist. ``scripts/test_release.sh container`` executes the CPU file's steps."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from megascend.runtime.bootstrap.mindspeed.tree import BRANCHES
from megascend.runtime.bootstrap.versions import STACKS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "containers").iterdir())
PROJECT = (ROOT / "pyproject.toml").read_text()


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("container_steps", ROOT / "scripts" / "container_steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix[1:])
def test_container_file_sources_and_extras_exist(path: Path, steps: ModuleType) -> None:
    text = path.read_text()
    instructions = steps.instructions(text)
    assert instructions[-1] == ("ENTRYPOINT", '["megascend"]')
    assert f"-f containers/{path.name} " in text
    for name, rest in instructions:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
    extras = re.findall(r"^([\w-]+) = \[", PROJECT[PROJECT.index("[project.optional-dependencies]") :], re.MULTILINE)
    [installed] = re.findall(r'"/src\[([^]]+)\]"', text)
    arguments = dict(rest.split("=", 1) for name, rest in instructions if name == "ARG" and "=" in rest)
    assert {arguments.get(extra.removeprefix("$"), extra) for extra in installed.split(",")} <= {*extras}
    assert arguments["STACK"] == f"stack-{STACKS[0].name.replace('.', '-')}"
    assert arguments.get("MINDSPEED", BRANCHES[STACKS[0].name]) == BRANCHES[STACKS[0].name]
    completed = subprocess.run(
        ["bash", "-n"], input=steps.shell(text), text=True, capture_output=True, check=False, timeout=20
    )
    assert completed.returncode == 0, completed.stderr
