"""Reference programs run like separate processes, although their packages are imported once."""

from __future__ import annotations

import signal
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


@pytest.mark.nightly  # covered: every program of a reference
def test_modules_are_imported_for_one_program_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_model.py").write_text("import transformers\ntransformers.custom = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    look = "import transformers; print(hasattr(transformers, 'custom'))"
    assert run_reference(look, modules=["custom_model"]).stdout == "True\n"
    assert run_reference(look).stdout == "False\n"
    missing = run_reference(look, modules=["missing_model"])
    assert missing.returncode == 1
    assert "missing_model" in missing.stderr


@pytest.mark.parametrize(
    ("program", "code", "stderr"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('why not')", 1, "why not\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import sys; print(len(sys.stdin.read()), file=sys.stderr); print('x' * 500_000)", 0, "200000\n"),
    ],
)
def test_exit_code_and_stderr_are_returned(program: str, code: int, stderr: str) -> None:
    completed = run_reference(program, stdin="y" * 200_000)
    assert completed.returncode == code
    assert completed.stderr.endswith(stderr)
    assert completed.stdout == ("x" * 500_000 + "\n" if code == 0 else "")


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


def test_process_is_kept_while_programs_have_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = "import os; print(os.getppid(), os.environ.get('TORCH_A_TEST'))"
    first = run_reference(parent).stdout
    monkeypatch.setenv("TORCH_A_TEST", "1")
    second = run_reference(parent).stdout
    assert second.split() == [second.split()[0], "1"]
    assert second.split()[0] != first.split()[0]
    monkeypatch.delenv("TORCH_A_TEST")
    assert run_reference(parent).stdout == first
    for value in ("2", "3"):
        monkeypatch.setenv("TORCH_A_TEST", value)
        assert run_reference(parent).stdout.split()[1] == value
    # Two are kept: the others have ended.
    assert not any(psutil.pid_exists(int(output.split()[0])) for output in (first, second))


def test_fp64_reference_turns_fp32_casts_into_fp64() -> None:
    """Intercept every form of cast to fp32 that norms and routers use."""
    x = torch.rand(3, dtype=torch.float64)
    with hf_reference.InDouble():
        tensors = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), torch.softmax(x, -1, dtype=torch.float32)]
    assert all(tensor.dtype == torch.float64 for tensor in tensors)
    assert torch.equal(tensors[0], x)
    assert x.float().dtype == torch.float32
