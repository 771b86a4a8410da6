"""Identification of the MindSpeed on the path by its files, without importing it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from megascend.apps.cli import checks
from megascend.errors import PlatformError, VersionError
from megascend.runtime.bootstrap.mindspeed import tree
from megascend.runtime.bootstrap.versions import (
    STACKS,
)

STACK = {stack.name: stack for stack in STACKS if stack.name in tree.BRANCHES}
DOCSTRING = '"""A library."""\n'
LATER = DOCSTRING + "import megatron_adaptor  # noqa\n"
TRAP = "raise SystemExit('a package of an unknown version was imported')\n"

# name: (mindspeed/__init__.py, version in setup.py, further files, its stack or None, parts of the refusal)
TREES = {
    "core_r0.16.0": (DOCSTRING, "0.16.0", (), "0.16", ["MindSpeed 0.16.0 is", "of stack 0.16"]),
    "core_r0.15.3": (DOCSTRING, "0.15.3", (), "0.15", ["MindSpeed 0.15.3 is", "of stack 0.15"]),
    "core_r0.17.0": (
        *(LATER, "0.12.1", ("core/context_parallel/adaptor.py",), None),
        ["branch core_r0.17.0 (which gives itself version 0.12.1)", "MegatronAdaptor core_r0.17.0", "CANN 9.0"],
    ),
    "core_r0.18.0": (
        *(LATER, "0.12.1", ("core/context_parallel/tenpu_adaptor.py",), None),
        ["branch core_r0.18.0", "It is that of stack 0.18, with provider megatron_adaptor"],
    ),
    "later still, and it says 0.16.0": (LATER, "0.16.0", (), None, ["core_r0.17.0 or later", "itself version 0.16.0"]),
    "later, installed without setup.py": (LATER, None, (), None, ["a branch on MegatronAdaptor"]),
    "importing something else": (
        *(DOCSTRING + "from torch_patcher.all import go\n", "0.16.0", (), None),
        ["0.16.0, which imports torch_patcher when it is imported"],
    ),
    "master": (DOCSTRING, "0.12.1", (), None, ["MindSpeed 0.12.1 is", "branches for Megatron-Core 0.12.1 (master"]),
    "dev": (DOCSTRING, "0.14.1", (), None, ["It is branch core_r0.14.0 or dev, for Megatron-Core 0.14"]),
    "core_r0.8.0": ("", "0.8.0", (), None, ["It is branch core_r0.8.0, for Megatron-Core 0.8"]),
    "1.0.RC2": ("", "1.1.0", (), None, ["It is branch 1.0.RC2"]),
    "states itself": ("__version__ = '0.16.0'\n", "0.1.0", (), "0.16", ["MindSpeed 0.16.0 is"]),
    "computes its version": (DOCSTRING + "__version__ = str(1 + 1)\n", None, (), None, ["of an unknown version is"]),
    "no version": ("", None, (), None, ["MindSpeed of an unknown version is on the path"]),
    "no version that is one": ("", "the latest", (), None, ["MindSpeed of an unknown version is on the path"]),
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an empty folder first on ``sys.path``."""
    for name in [module for module in sys.modules if module.partition(".")[0] in ("mindspeed", "megatron_adaptor")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    importlib.invalidate_caches()


def build(folder: Path, name: str) -> None:
    """Write a small MindSpeed as in ``TREES``; importing it, or a package that it imports, ends the process."""
    init, setup, further, *_ = TREES[name]
    write(folder, {"mindspeed/__init__.py": init + TRAP} | {f"mindspeed/{file}": TRAP for file in further})
    write(folder, {f"{package}/__init__.py": TRAP for package in ("megatron_adaptor", "torch_patcher")})
    if setup is not None:
        write(folder, {"setup.py": f"{TRAP}__version__ = '{setup}'\n"})


def look(stack: str) -> str:
    (prerequisite,) = [entry for entry in tree.PREREQUISITES if entry.name == "MindSpeed"]
    return prerequisite.check(STACK[stack])


@pytest.mark.parametrize("name", TREES)
def test_trees_are_identified_by_files_and_refused_for_other_stacks(name: str, path: Path) -> None:
    build(path, name)
    *_, belongs_to, messages = TREES[name]
    for stack in STACK:
        if stack == belongs_to:
            assert look(stack).endswith(f"({path / 'mindspeed'})")
            continue
        with pytest.raises(VersionError) as raised:
            look(stack)
        message = str(raised.value)
        for part in (
            *messages,
            f"is on the path ({path / 'mindspeed' / '__init__.py'})",
            f"stack {stack} needs branch {tree.BRANCHES[stack]}",
            "Supported branches: core_r0.16.0 and core_r0.15.3",
            f"git clone -b {tree.BRANCHES[stack]}",
        ):
            assert part in message
    assert not [module for module in sys.modules if module.partition(".")[0] in ("mindspeed", "megatron_adaptor")]


def test_an_unreadable_tree_is_refused(path: Path) -> None:
    write(path, {"mindspeed/__init__.py": "this is no Python\n"})
    with pytest.raises(VersionError, match="cannot be parsed as Python"):
        look("0.16")


def test_missing_tree_error_names_the_branch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "find_spec", lambda name: None)
    with pytest.raises(PlatformError, match=r"needs MindSpeed \(core_r0\.16\.0\), which is not installed"):
        look("0.16")


TRANSFORMER_ENGINES = {
    "cuda": (
        "import transformer_engine_torch as tex\n",
        ["CUDA's Transformer Engine is installed", "it cannot run on NPUs", "transformer-engine-cu12"],
    ),
    "npu": (
        "import torch_npu\n",
        ["TransformerEngineNPU is installed as transformer_engine", "pip uninstall transformer-engine"],
    ),
}


@pytest.mark.parametrize("kind", TRANSFORMER_ENGINES)
def test_installed_transformer_engine_is_identified_and_refused(
    kind: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [module for module in sys.modules if module.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    code, messages = TRANSFORMER_ENGINES[kind]
    write(path, {"transformer_engine/__init__.py": TRAP, "transformer_engine/pytorch/ops.py": code + TRAP})
    (prerequisite,) = [entry for entry in tree.PREREQUISITES if entry.name == "Transformer Engine"]
    with pytest.raises(PlatformError) as raised:
        prerequisite.check(STACK["0.16"])
    for part in (*messages, str(path / "transformer_engine" / "__init__.py")):
        assert part in str(raised.value)
    assert ("CUDA's" in str(raised.value)) == (kind == "cuda")


def test_doctor_names_the_prerequisite_whose_check_died(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    write(
        path, {"torch_npu/__init__.py": dies, "torch_npu-2.13.0.dist-info/METADATA": "Name: torch_npu\nVersion: 2.13\n"}
    )
    monkeypatch.delenv("SIMNPU", raising=False)
    (check,) = checks.check_npu(60)
    assert (check.name, check.status, check.result) == ("torch_npu", "fail", "exit code -9")
    refuses = "def look(stack): raise KeyError('a fault of ours')\n"
    added = "from dataclasses import replace\nfrom megascend.runtime.bootstrap.mindspeed import tree as p\n"
    added += "p.PREREQUISITES = (*p.PREREQUISITES[1:2], replace(p.PREREQUISITES[3], check=look))\n"
    write(path, {"sitecustomize.py": refuses + added})
    (check,) = checks.check_npu(60)
    assert (check.name, check.status, check.result) == ("MindSpeed", "fail", "KeyError: 'a fault of ours'")
