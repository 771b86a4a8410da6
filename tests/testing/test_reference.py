"""Reference programs run as processes of their own would, though their packages are imported once."""

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


def test_a_program_has_its_arguments_and_finds_nothing_of_another(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPOIL)
    first, second = run_reference(SPOIL, 1, "two words"), run_reference(script, 1, "two words")
    for done, name in ((first, "-c"), (second, str(script))):
        assert done.returncode == 0, done.stderr
        state, module, rest = done.stdout.split(maxsplit=2)
        assert (state, module) == ("clean", "__main__")
        assert rest == f"{[name, '1', 'two words']} False\n"


def test_modules_are_imported_for_one_program_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_model_of_mine.py").write_text("import transformers\ntransformers.mine = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    look = "import transformers; print(hasattr(transformers, 'mine'))"
    assert run_reference(look, modules=["a_model_of_mine"]).stdout == "True\n"
    assert run_reference(look).stdout == "False\n"
    missing = run_reference(look, modules=["no_model_of_anybody"])
    assert missing.returncode == 1
    assert "no_model_of_anybody" in missing.stderr


@pytest.mark.parametrize(
    ("program", "code", "told"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('why not')", 1, "why not\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import sys; print(len(sys.stdin.read()), file=sys.stderr); print('x' * 500_000)", 0, "200000\n"),
    ],
)
def test_how_a_program_ends_is_told(program: str, code: int, told: str) -> None:
    done = run_reference(program, stdin="y" * 200_000)
    assert done.returncode == code
    assert done.stderr.endswith(told)
    assert done.stdout == ("x" * 500_000 + "\n" if code == 0 else "")


def test_what_takes_too_long_is_killed_and_the_next_one_runs(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    for timeout_s in (2, 60):  # on a busy machine it may not have begun within the first
        with pytest.raises(subprocess.TimeoutExpired):
            run_reference(program, timeout_s=timeout_s)
        if note.exists() and note.read_text():
            break
    pid = int(note.read_text())
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
    assert alive == []
    assert run_reference("print('here')").stdout == "here\n"


def test_a_forked_process_has_programs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = "import os; print(os.getppid())"
    ours = run_reference(parent).stdout
    (theirs,) = run_distributed(lambda: run_reference(parent).stdout, 1, init=False)
    assert theirs != ours
    assert run_reference(parent).stdout == ours
    monkeypatch.setenv("MEGASCEND_A_TEST", "1")
    assert run_reference("import os; print(os.environ['MEGASCEND_A_TEST'])").stdout == "1\n"


def test_what_models_ask_to_be_fp32_is_fp64_in_the_reference_of_fp64() -> None:
    """Norms and routers ask for it in each of these ways."""
    x = torch.rand(3, dtype=torch.float64)
    with hf_reference.InDouble():
        found = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), torch.softmax(x, -1, dtype=torch.float32)]
    assert all(each.dtype == torch.float64 for each in found)
    assert torch.equal(found[0], x)
    assert x.float().dtype == torch.float32
