"""Reference programs run like separate processes, although their packages are imported once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascend.testing import hf_reference
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


def test_what_packages_set_starts_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os; print(os.getppid())"
    server = run_reference(program).stdout
    for name in ("TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_CACHE_DIR", "NVTE_FLASH_ATTN"):
        monkeypatch.setenv(name, "changed")
    monkeypatch.syspath_prepend("/elsewhere/setuptools/_vendor")
    assert run_reference(program).stdout == server


def test_fp64_reference_turns_fp32_casts_into_fp64() -> None:
    """Intercept every form of cast to fp32 that norms and routers use."""
    x = torch.rand(3, dtype=torch.float64)
    with hf_reference.InDouble():
        tensors = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), torch.softmax(x, -1, dtype=torch.float32)]
    assert all(tensor.dtype == torch.float64 for tensor in tensors)
    assert torch.equal(tensors[0], x)
    assert x.float().dtype == torch.float32
