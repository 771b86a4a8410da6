"""Reference programs run like separate processes, although their packages are imported once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from megascend.testing import hf_reference, run_distributed
from megascend.testing.reference import run_reference

SPOIL = """
import sys, transformers
print(getattr(transformers, "spoilt", "clean"), __name__, sys.argv, "megascend" in sys.modules)
transformers.spoilt = "spoilt"
"""


def test_program_gets_its_arguments_and_a_clean_state(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPOIL)
    first, second = run_reference(SPOIL, 1, "two words"), run_reference(script, 1, "two words")
    for completed, name in ((first, "-c"), (second, str(script))):
        assert completed.returncode == 0, completed.stderr
        state, module, rest = completed.stdout.split(maxsplit=2)
        assert (state, module) == ("clean", "__main__")
        assert rest == f"{[name, '1', 'two words']} False\n"


def test_timed_out_program_is_killed_and_the_next_one_runs(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    for timeout_s in (2, 60):  # on a busy machine it may not start within the first timeout
        with pytest.raises(subprocess.TimeoutExpired):
            run_reference(program, timeout_s=timeout_s)
        if note.exists() and note.read_text():
            break
    pid = int(note.read_text())
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
    assert alive == []
    assert run_reference("print('here')").stdout == "here\n"


def test_forked_process_has_a_separate_program_server(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = "import os; print(os.getppid())"
    parent_pid = run_reference(parent).stdout
    (forked_pid,) = run_distributed(lambda: run_reference(parent).stdout, 1, init=False)
    assert forked_pid != parent_pid
    assert run_reference(parent).stdout == parent_pid
    monkeypatch.setenv("MEGASCEND_A_TEST", "1")
    assert run_reference("import os; print(os.environ['MEGASCEND_A_TEST'])").stdout == "1\n"


def test_fp64_reference_turns_fp32_casts_into_fp64() -> None:
    """Intercept every form of cast to fp32 that norms and routers use."""
    x = torch.rand(3, dtype=torch.float64)
    with hf_reference.InDouble():
        tensors = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), torch.softmax(x, -1, dtype=torch.float32)]
    assert all(tensor.dtype == torch.float64 for tensor in tensors)
    assert torch.equal(tensors[0], x)
    assert x.float().dtype == torch.float32
