"""``megascend doctor``: what it finds, and that it outlives what is broken."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megascend.cli import checks
from megascend.cli.checks import Check, check_shared_memory, check_threads, explain_import_failure, run_python
from megascend.cli.doctor import render_json, render_table

BROKEN = 'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")\n'


def test_doctor_on_this_machine(megascend) -> None:
    done = megascend("doctor", "--json")
    report = json.loads(done.stdout)
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert not failed
    assert report["ok"] is True
    assert done.returncode == 0
    found = {check["name"]: check for check in report["checks"]}
    assert found["megatron-core"]["found"].startswith("0.1")
    assert found["platform"]["chosen"] in ("cpu", "cuda", "npu")
    assert found["bootstrap"]["stack"] in ("0.15", "0.16")
    assert found["collectives"]["latency_us"] > 0
    assert found["collectives"]["bandwidth_gb_s"] > 0
    assert found["threads"]["omp_num_threads"] == "1"


@pytest.fixture
def broken_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real wheel on a machine without CANN, as far as importing it goes."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_torch_npu_without_cann_is_explained(broken_torch_npu: Path) -> None:
    check = checks.check_torch_npu(60)
    assert check.status == "fail"
    assert "libhccl" in check.found
    assert "set_env.sh" in check.hint
    assert "pip uninstall torch_npu" in check.hint


def test_a_torch_npu_that_torch_loads_by_itself_is_explained(broken_torch_npu: Path) -> None:
    info = broken_torch_npu / "torch_npu-2.6.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.6.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    check = checks.check_torch(60)
    assert check.status == "fail"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in check.hint


def test_a_helper_that_hangs_is_given_up() -> None:
    start = time.monotonic()
    outcome = run_python(["-c", "import time; time.sleep(60)"], timeout=1)
    assert outcome.answer is None
    assert outcome.problem == "no answer within 1 s"
    assert time.monotonic() - start < 10


def test_a_helper_that_crashes_is_reported() -> None:
    outcome = run_python(["-c", "import no_such_module_at_all"], timeout=30)
    assert outcome.answer is None
    last, hint = explain_import_failure(outcome.problem)
    assert last == "ModuleNotFoundError: No module named 'no_such_module_at_all'"
    assert "pip install" in hint


def test_small_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 64 * 1024**2, "total": 64 * 1024**2})
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage)
    check = check_shared_memory(tmp_path)
    assert check.status == "warn"
    assert "--shm-size" in check.hint
    assert check_shared_memory(tmp_path / "missing").status == "warn"


def test_more_threads_than_cores_is_a_warning() -> None:
    assert check_threads({"OMP_NUM_THREADS": "100000"}).status == "warn"
    assert check_threads({"OMP_NUM_THREADS": "1"}).status == "ok"
    assert check_threads({}).status == "ok"


def test_rendering() -> None:
    results = [Check("disk", "ok", "9 GiB"), Check("torch", "fail", "none", "install it", {"wanted": ">=2.6"})]
    table = render_table(results)
    assert "9 GiB" in table
    assert "-> install it" in table
    assert table.endswith("1 failed: torch")
    assert render_table(results[:1]).endswith("ready to train")
    report = json.loads(render_json(results))
    assert report["ok"] is False
    assert report["checks"][1] == {
        "name": "torch",
        "status": "fail",
        "found": "none",
        "hint": "install it",
        "wanted": ">=2.6",
    }
