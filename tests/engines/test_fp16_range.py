"""Numbers beyond 65,504 are refused by name and value where fp16 would overflow."""

from __future__ import annotations

from pathlib import Path

import fp16_runs
import pytest
import torch
from fp16_runs import LARGE, PROJECTION, build, results

from megascend.errors import CheckpointError
from megascend.reference.reductions import out_of_range, to_dtype
from megascend.testing import run_distributed
from support.forked_programs import run_forked


@pytest.mark.parametrize(
    ("value", "dtype", "refused"),
    [
        (65504.0, torch.float16, False),
        (65519.0, torch.float16, False),  # rounds down
        (-65520.0, torch.float16, True),
        (float("inf"), torch.float16, True),
        (1e30, torch.bfloat16, False),
        (1e30, torch.float32, False),
    ],
)
def test_to_dtype_raises_on_overflow(value, dtype, refused):
    tensor = torch.tensor([1.0, value, 2.0])
    if not refused:
        assert to_dtype("w", tensor, dtype).isfinite().all()
        return
    with pytest.raises(CheckpointError, match=r"w holds -?(65520|inf), and fp16 ends at 65,504: set precision"):
        to_dtype("w", tensor, dtype)


def test_out_of_range_ignores_empty_meta_and_integer_tensors():
    assert out_of_range("w", torch.empty(0), torch.float16) is None
    assert out_of_range("w", torch.empty(3, device="meta"), torch.float16) is None
    assert out_of_range("w", torch.tensor([70_000]), torch.float16) is None


@pytest.mark.parametrize("engine", ["single", pytest.param("megatron", marks=pytest.mark.nightly)])
def test_engine_names_the_tensor_and_writes_nothing(request, tmp_path, engine):
    build(tmp_path)
    if engine == "megatron":
        request.getfixturevalue("megatron_imported")
        [messages] = run_distributed(results, 1, engine, tmp_path, init=False)
    else:
        completed = run_forked(Path(fp16_runs.__file__), engine, tmp_path, tmp_path / "result")
        assert completed.returncode == 0, completed.stderr[-6000:]
        messages = torch.load(tmp_path / "result")
    assert f"{LARGE} holds -100000, and fp16 ends at 65,504" in messages["load"]
    for kind in ("merge", "stream"):
        assert f"{PROJECTION}.weight holds " in messages[kind], kind
        assert "65,504" in messages[kind]
    assert messages["base"] == ""
    assert messages["dtypes"] == "['torch.float16'] float16"  # of a fp32 checkpoint
    assert " holds inf, and fp16 ends at 65,504" in messages["trained"]
    assert messages["written"] == str([f"{engine}-base"])
