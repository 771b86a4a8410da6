"""The import-order guard: the error names every package that was imported too early."""

from __future__ import annotations

import contextlib
import subprocess

import pytest

from megascend.errors import ImportOrderError
from megascend.runtime.bootstrap.runtime import PATCHED_FIRST, require_clean
from support.forked_programs import run_forked


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fork of a process that has imported torch, transformers and peft."""
    return run_forked(program)


@pytest.mark.parametrize(
    ("modules", "early"),
    [
        (["sys", "torch", "transformers", "peft", "megascend"], []),
        (["megatron"], []),  # a namespace package; importing it does nothing
        (["megatron.core", "megatron.core.utils"], ["megatron.core"]),
        (["megatron.core_extras", "transformer_engine_torch"], []),
        (["mcore_bridge", "transformer_engine"], ["transformer_engine", "mcore_bridge"]),
        (PATCHED_FIRST, list(PATCHED_FIRST)),
    ],
)
def test_require_clean_ignores_other_packages(modules, early):
    expected = pytest.raises(ImportOrderError, match=f"^{', '.join(early)} w") if early else contextlib.nullcontext()
    with expected:
        require_clean(modules, "cpu")


@pytest.mark.parametrize(
    ("first", "named"),
    [
        # Covered: with mcore_bridge, below.
        pytest.param("import megatron.core", "megatron.core was", marks=pytest.mark.nightly),
        # Neither can be imported fully without CUDA; a failed attempt leaves the same traces in sys.modules.
        ("import sys, types; sys.modules['transformer_engine'] = types.ModuleType('te')", "transformer_engine was"),
        ("import sys, types; sys.modules['mcore_bridge'] = types.ModuleType('mb')", "mcore_bridge was"),
        ("import sys, megatron.core; sys.modules['mcore_bridge'] = sys", "megatron.core, mcore_bridge were"),
    ],
)
def test_import_before_the_bootstrap_raises(first, named):
    completed = run(f"{first}\nimport megascend\nmegascend.bootstrap('cpu')")
    last = completed.stderr.strip().splitlines()[-1]
    assert last.startswith(f"megascend.errors.ImportOrderError: {named} imported before megascend.bootstrap()"), last
    assert "first lines of the program" in last


def test_refused_bootstrap_changes_nothing():
    program = """
import megatron.core, os, sys, torch, megascend
before = dict(os.environ), set(sys.modules), torch.empty, torch.Tensor.to
try:
    megascend.bootstrap('cpu')
except megascend.ImportOrderError:
    pass
assert dict(os.environ) == before[0]
new = set(sys.modules) - before[1]
assert not [name for name in new if name.startswith(('transformer_engine', 'mcore_bridge'))], new
assert (torch.empty, torch.Tensor.to) == before[2:]
print('unchanged')
"""
    completed = run(program)
    assert completed.stdout == "unchanged\n", completed.stderr


def test_megatron_modules_require_the_bootstrap():
    last = run("import megascend.engines.megatron.engine").stderr.strip().splitlines()[-1]
    assert last.startswith("megascend.errors.ImportOrderError: "), last
    assert "megascend.bootstrap()" in last
