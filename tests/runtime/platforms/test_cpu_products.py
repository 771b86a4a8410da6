"""bf16 products on a processor that reports AMX: tried in a child process, and AMX is disabled if they fail with it.

The trial's program simulates oneDNN on a machine without working AMX: it fails unless the variable is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascend import PlatformError
from megascend.runtime.platforms import cpu_products
from megascend.runtime.platforms.cpu_products import VARIABLE, WITHOUT_AMX, avoid_broken_amx

ILLEGAL = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the cpuinfo of a processor that reports AMX, and set an empty cache."""
    monkeypatch.setenv("MEGASCEND_CACHE", str(tmp_path / "cache"))
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n")
    return cpuinfo


def surroundings() -> dict[str, str]:
    """Return the environment of this process without the variable."""
    return {name: value for name, value in os.environ.items() if name != VARIABLE}


def test_a_processor_without_amx_is_not_tried(processor: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_products, "TRIAL", ILLEGAL)
    processor.write_text("flags\t\t: fpu avx512_bf16\n")
    environment = surroundings()
    assert avoid_broken_amx(environment, processor) == []
    assert avoid_broken_amx(environment, processor.with_name("absent")) == []
    assert VARIABLE not in environment


def test_a_users_choice_stays(processor: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_products, "TRIAL", ILLEGAL)
    environment = {**surroundings(), VARIABLE: "AVX2"}
    assert avoid_broken_amx(environment, processor) == []
    assert environment[VARIABLE] == "AVX2"


@pytest.mark.parametrize(
    ("failing", "reason"), [(ILLEGAL, "signal 4"), ("raise RuntimeError('no primitive')", "no primitive")]
)
def test_amx_that_fails_is_avoided_and_tried_once(
    processor: Path, monkeypatch: pytest.MonkeyPatch, failing: str, reason: str
):
    monkeypatch.setattr(cpu_products, "TRIAL", f"import os\nif {VARIABLE!r} not in os.environ: {failing}")
    first, second = surroundings(), surroundings()
    (change,) = avoid_broken_amx(first, processor)
    assert first[VARIABLE] == WITHOUT_AMX
    assert reason in change
    monkeypatch.setattr(subprocess, "run", None)  # the verdict is kept
    assert avoid_broken_amx(second, processor) == [change]


def test_a_cache_that_cannot_be_written_costs_a_trial_each_time(
    processor: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (processor.parent / "cache").write_text("a file in place of the folder")
    monkeypatch.setattr(cpu_products, "TRIAL", f"import os\nif {VARIABLE!r} not in os.environ: {ILLEGAL}")
    environment = surroundings()
    assert "signal 4" in avoid_broken_amx(environment, processor)[0]
    assert environment[VARIABLE] == WITHOUT_AMX
    assert "set MEGASCEND_CACHE to another folder" in caplog.text


def test_working_amx_stays_enabled(processor: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_products, "TRIAL", "")
    environment = surroundings()
    assert avoid_broken_amx(environment, processor) == []
    assert VARIABLE not in environment


def test_products_that_fail_without_amx_as_well_are_an_error(processor: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_products, "TRIAL", "raise ArithmeticError('off by nan')")
    with pytest.raises(PlatformError, match="off by nan"):
        avoid_broken_amx(surroundings(), processor)


def test_bf16_products_are_right_after_the_bootstrap():
    program = f"import megascend; megascend.bootstrap('cpu', engine='single')\n{cpu_products.TRIAL}"
    completed = subprocess.run(
        [sys.executable, "-c", program], env=surroundings(), capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stderr
