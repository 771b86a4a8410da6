"""``megascend doctor``: its findings, and its robustness to broken installations."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path

import pytest

import simnpu
from megascend.apps.cli import checks
from megascend.apps.cli.checks import (
    Check,
    HelperError,
    explain_import_failure,
    run_python,
)
from megascend.apps.cli.doctor import verdict
from megascend.runtime.bootstrap.versions import STACKS, installed_versions, nearest_stack
from support.ascend_packages import ON_ADAPTOR, package_folders

BROKEN = 'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")\n'


@pytest.mark.nightly  # covered: what it reports of simulated machines, in the same file
def test_doctor_on_this_machine(megascend) -> None:
    completed = megascend("doctor", "--json")
    report = json.loads(completed.stdout)
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert not failed
    assert report["ok"] is True
    results = {check["name"]: check for check in report["checks"]}
    assert results["megatron-core"]["found"].startswith("0.1")
    assert results["platform"]["chosen"] in ("cpu", "cuda", "npu")
    assert results["bootstrap"]["stack"] in [stack.name for stack in STACKS]
    assert results["collectives"]["latency_us"] > 0
    assert results["collectives"]["bandwidth_gb_s"] > 0
    assert results["threads"]["omp_num_threads"] == "1"
    assert report["host"].startswith(f"{platform.node()} (")
    assert f"{len(os.sched_getaffinity(0))} core" in report["host"]
    assert (
        f"stack {results['bootstrap']['stack']} (megatron-core {results['megatron-core']['found']}, " in report["host"]
    )


def install(folder: Path, name: str, version: str, code: str = "", entry_points: str = "") -> None:
    """Write a package with its metadata, as pip does."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def broken_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a fake torch_npu that fails as on a machine without CANN; torch autoloads it."""
    install(tmp_path, "torch_npu", "2.0.0", BROKEN, "[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    return tmp_path


def npu_checks() -> dict[str, Check]:
    return {check.name: check for check in checks.check_npu(60)}


def test_failed_autoload_of_torch_npu_is_explained(broken_torch_npu: Path) -> None:
    check = checks.check_torch(60)
    assert check.status == "fail"
    assert "Failed to load the backend extension: torch_npu" in check.result
    assert "(ImportError: libhccl.so" in check.result
    for remedy in ("set_env.sh", "pip uninstall torch_npu", "megascend simnpu", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert remedy in check.hint


def test_all_missing_npu_prerequisites_are_listed(broken_torch_npu: Path) -> None:
    results = npu_checks()
    packages = ("MegatronAdaptor", "TransformerEngineNPU") if ON_ADAPTOR else ("MindSpeed",)
    assert all(results[name].status == "fail" for name in ("torch_npu", "CANN", "torch pair", *packages))
    assert "cannot load Ascend's libraries (libhccl.so" in results["torch_npu"].hint
    assert "ASCEND_HOME_PATH is not set" in results["CANN"].hint
    assert "torch_npu 2.0.0 is installed; stack" in results["torch pair"].hint
    assert results["Megatron tree"].status == "ok"
    if ON_ADAPTOR:
        assert "git clone -b core_r0." in results["MegatronAdaptor"].hint
        assert results["MindSpeed"].status == "ok"
        assert "optional" in results["MindSpeed"].result
    else:
        assert "needs MindSpeed (core_r0." in results["MindSpeed"].hint
        assert "torchair" in results["MindSpeed's imports"].hint
        assert results["Transformer Engine"].status == "ok"


def test_wrong_packages_on_the_path_are_named(broken_torch_npu: Path) -> None:
    install(broken_torch_npu, "transformer_engine", "2.8.0")
    install(broken_torch_npu, "mindspeed", "0.12.1", "__version__ = '0.12.1'\n")
    core = broken_torch_npu / "megatron" / "core"
    core.mkdir(parents=True)
    (core.parent / "__init__.py").touch()  # a namespace package would follow the installed one
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 1\n")
    results = npu_checks()
    engine = "TransformerEngineNPU" if ON_ADAPTOR else "Transformer Engine"
    assert "CUDA's Transformer Engine is installed" in results[engine].hint
    assert "MindSpeed 0.12.1 is on the path" in results["MindSpeed"].hint
    assert f"stack {nearest_stack(installed_versions()).name}" in results["MindSpeed"].hint
    assert f"would be imported from {core}, which is version 0.12.1" in results["Megatron tree"].hint
    assert "remove it from PYTHONPATH" in results["Megatron tree"].hint


def test_npu_checks_are_skipped_without_torch_npu() -> None:
    if "torch_npu" in sys.modules:
        pytest.skip("this process has one")
    assert [check.status for check in checks.check_npu(60)] == ["skip"]


@pytest.mark.nightly
@pytest.mark.slow
def test_host_without_cann_fails_without_a_traceback(megascend, broken_torch_npu: Path) -> None:
    completed = megascend("doctor", code=1)
    assert "FAIL  torch import" in completed.stdout
    assert "SKIP  bootstrap" in completed.stdout
    assert "failed: torch import, torch_npu, CANN" in completed.stdout
    assert "Traceback" not in completed.stdout + completed.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_simulated_device_is_ready_and_marked_as_simulated(megascend) -> None:
    path = os.pathsep.join([*package_folders(), *(entry for entry in sys.path if entry)])
    environment = simnpu.environment(os.environ | {"PYTHONPATH": path})
    completed = megascend("doctor", "--json", **environment)
    results = {check["name"]: check for check in json.loads(completed.stdout)["checks"]}
    assert results["simulated device"]["status"] == "warn"
    assert "SIMULATED" in results["simulated device"]["found"]
    assert "+simnpu, 8 x Simulated Ascend" in results["torch_npu"]["found"]
    assert ("adaptor_packages" if ON_ADAPTOR else "+double") in results[
        "MegatronAdaptor" if ON_ADAPTOR else "MindSpeed"
    ]["found"]
    assert results["platform"]["chosen"] == results["bootstrap"]["platform"] == "npu"


def test_hanging_helper_times_out() -> None:
    start = time.monotonic()
    with pytest.raises(HelperError, match="no answer within 1 s"):
        run_python(["-c", "import time; time.sleep(60)"], timeout=1)
    assert time.monotonic() - start < 50  # the program sleeps for 60 s


def test_crashed_helper_is_reported() -> None:
    with pytest.raises(HelperError) as caught:
        run_python(["-c", "import no_such_module_at_all"], timeout=30)
    last, hint = explain_import_failure(str(caught.value))
    assert last == "ModuleNotFoundError: No module named 'no_such_module_at_all'"
    assert "pip install" in hint
    with pytest.raises(HelperError, match="exit code -9"):
        run_python(["-c", "import os; os.kill(os.getpid(), 9)"], timeout=30)


CPU = Check("platform", "ok", "cpu", values={"chosen": "cpu"})
NO_BRIDGE = Check("mcore-bridge", "fail", "")


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (
            [NO_BRIDGE, CPU, Check("bootstrap", "fail", "")],
            "engine megatron cannot train here, and single and fsdp can",
        ),
        ([NO_BRIDGE, CPU, Check("collectives", "fail", "")], "2 failed: mcore-bridge, collectives"),
    ],
)
def test_verdict_names_the_engines_that_can_train(results: list[Check], words: str) -> None:
    assert words in verdict(results)
