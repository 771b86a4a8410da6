"""The hook of ``megascend run`` in plain Python processes, with a fake package megascend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascend.apps.cli.run import SITE, isolating_option, with_hook
from megascend.runtime.bootstrap.reference import gloo

BOOTSTRAP = """
import sys
from types import ModuleType
from importlib.machinery import ModuleSpec

def bootstrap(platform, engine):
    print("bootstrap", platform, engine)
    import mindspeed  # as the provider of NPUs does
    module = ModuleType("transformer_engine")
    module.__spec__, module.__path__, module.here = ModuleSpec("transformer_engine", None, is_package=True), [], "reference"
    sys.modules["transformer_engine"] = module
"""


RUNTIME = "megascend/runtime/bootstrap/runtime.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "megascend" / "runtime" / "bootstrap").mkdir(parents=True)
    for package in ("megascend", "megascend/runtime", "megascend/runtime/bootstrap"):
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / RUNTIME).write_text(BOOTSTRAP)
    (tmp_path / "mindspeed.py").write_text("print('body of mindspeed')\n")
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("")
    return tmp_path


def run(folder: Path, program: str, *options: str) -> tuple[int, str, str]:
    base = {"PATH": os.defpath, "PYTHONPATH": str(folder)}
    command = [sys.executable, *options, "-c", program]
    completed = subprocess.run(
        command, env=with_hook(base, "cpu"), capture_output=True, text=True, timeout=60, check=False, cwd=folder
    )
    return completed.returncode, completed.stdout, completed.stderr


def test_bootstrap_runs_before_the_first_import_only(folder: Path) -> None:
    program = """
import importlib.util, sys
assert importlib.util.find_spec("megatron") and not importlib.util.find_spec("transformer_engine")  # looked for only
print("ready")
import megatron.core
import transformer_engine as first, transformer_engine as second, mindspeed
assert first is second is sys.modules["transformer_engine"]
print(first.here)
sys.exit(7)
"""
    assert run(folder, program) == (7, "ready\nbootstrap cpu megatron-core\nbody of mindspeed\nreference\n", "")


@pytest.mark.parametrize("first", ["transformer_engine", "mindspeed"])
def test_program_gets_the_modules_imported_by_the_bootstrap(folder: Path, first: str) -> None:
    program = f"""
import {first}, sys, importlib.util
assert {first} is sys.modules["{first}"]
assert importlib.util.find_spec("{first}") is {first}.__spec__ and type({first}.__spec__.loader).__name__ != "_Present"
import mindspeed
print(sys.modules["transformer_engine"].here)
"""
    assert run(folder, program) == (0, "bootstrap cpu megatron-core\nbody of mindspeed\nreference\n", "")


def test_failed_bootstrap_ends_the_process(folder: Path) -> None:
    (folder / RUNTIME).write_text("def bootstrap(platform, engine):\n    raise ImportError('does not fit')\n")
    program = """
try:
    import megatron.core
except Exception:
    print("goes on without")
"""
    code, out, err = run(folder, program)
    assert (code, out) == (2, "")
    assert "Traceback" in err
    assert err.endswith("megascend run: ImportError: does not fit\n")
    (folder / RUNTIME).write_text("raise ModuleNotFoundError('No module', name='megascend')\n")  # as if it were not
    code, out, err = run(folder, program)
    assert (code, out) == (2, "")
    assert err.endswith(f"No module; megascend is not installed for {sys.executable}\n")
    assert run(folder, "print('no Megatron')") == (0, "no Megatron\n", "")


def test_user_sitecustomize_runs_too(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("import sys; sys.mine = __name__\n")
    code, out, err = run(folder, "import sys, sitecustomize, megatron.core; print(sys.mine, sitecustomize.__file__)")
    assert (code, err) == (0, "")
    assert out.endswith(f"sitecustomize {folder / 'sitecustomize.py'}\n")
    assert out.startswith("bootstrap cpu")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["python", "-I", "x.py"], "-I"),
        (["/usr/bin/python3.11", "-uE", "x.py"], "-uE"),
        (["python3", "-u", "-S"], "-S"),
        (["python", "-u", "x.py", "-S"], None),
        (["python", "-m", "x", "-I"], None),
        (["python", "-c", "x", "-I"], None),
        (["torchrun", "-I", "x.py"], None),
    ],
)
def test_isolating_python_options_are_detected(command: list[str], option: str | None) -> None:
    assert isolating_option(command) == option


def test_hook_is_first_on_pythonpath_once() -> None:
    once = with_hook({"PYTHONPATH": "/a", "X": "1"}, "npu")
    assert once == {"PYTHONPATH": f"{SITE}{os.pathsep}/a", "X": "1", "MEGASCEND_RUN_PLATFORM": "npu"}
    assert with_hook(once, "npu") == once


def test_backend_nccl_becomes_gloo() -> None:
    observed = []
    for name in ("init_process_group", "new_group"):

        def original(*args, **kwargs):
            observed.append((args, kwargs))

        original.__name__ = name
        function = gloo.on_gloo(original)
        function([0, 1], None, "nccl") if name == "new_group" else function("NCCL")
        function(backend="cpu:gloo,cuda:nccl", pg_options=object())
        function(backend="gloo", pg_options=1)
        function()
    unchanged = [((), {"backend": "gloo"}), ((), {"backend": "gloo", "pg_options": 1}), ((), {})]
    assert observed == [(("gloo",), {}), *unchanged, (([0, 1], None, "gloo"), {}), *unchanged]
