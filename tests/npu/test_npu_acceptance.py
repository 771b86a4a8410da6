"""``scripts/npu/acceptance.sh`` on the simulated device: passing and failing runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from support.ascend_packages import ON_ADAPTOR

ROOT = Path(__file__).resolve().parents[2]

# Runs at the start of every process; sabotaged functions are patched after the import of their module.
SITECUSTOMIZE = """
import functools, importlib.abc, importlib.util, os, sys

def wrong_swiglu(module):
    real = module.OPERATORS["npu_swiglu"]
    @functools.wraps(real)
    def swiglu(*args, **kwargs):
        return real(*args, **kwargs) * 1.5
    module.OPERATORS["npu_swiglu"] = swiglu

def wrong_norm(module):
    real = module.OPERATORS["npu_rms_norm"]
    @functools.wraps(real)
    def norm(*args, **kwargs):
        result, root = real(*args, **kwargs)
        return result * 1.1, root
    module.OPERATORS["npu_rms_norm"] = norm

def wrong_all_reduce(module):
    real = module.all_reduce
    def all_reduce(tensor, *args, **kwargs):
        work = real(tensor, *args, **kwargs)
        if tensor.device.type == "npu" and tensor.numel() == 1003:
            tensor[7] += 1
        return work
    module.all_reduce = all_reduce

def wrong_load(module):
    real = module.MegatronBackend.load
    def load(self, path):
        progress = real(self, path)
        import torch
        with torch.no_grad():
            for chunk in self.engine.chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(1.05)
        return progress
    module.MegatronBackend.load = load

PATCHES = {
    "operator": ("simnpu.operators", wrong_swiglu),
    "norm": ("simnpu.operators", wrong_norm),
    "collective": ("torch.distributed", wrong_all_reduce),
    "resume": ("megascend.backends", wrong_load),
}
WANTED = dict(PATCHES[name] for name in os.environ.get("TEST_SABOTAGE", "").split(",") if name)

class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        patch = WANTED.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        real = spec.loader.exec_module
        def exec_module(module):
            real(module)
            patch(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())
"""


@pytest.fixture
def accept(tmp_path: Path):
    """Return ``accept(*arguments, sabotage="")``, which runs the script on the simulated device."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    entries = [
        str(tmp_path),
        *(entry for entry in sys.path if entry and "simnpu" not in entry and "doubles" not in entry),
    ]
    private = {"TEST_API_TOKEN": "hush-hush", "HOSTNAME": "cobalt-node17", "USER": "evelyn"}
    variables = private | {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(entries), "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MEGASCEND_", "HCCL_"))}
    double = [] if "MEGASCEND_MINDSPEED" in os.environ else ["--stand-in"]
    inherited |= {name: os.environ[name] for name in ("MEGASCEND_MINDSPEED",) if name in os.environ}

    def run(*arguments: str, sabotage: str = "") -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        bundle = tmp_path / "bundle.tar.gz"
        command = ["bash", str(ROOT / "scripts" / "npu" / "acceptance.sh"), "--simulated", *double, *arguments]
        command += ["--out", str(bundle), "--folder", str(tmp_path / "run")]
        completed = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
            env=inherited | variables | {"TEST_SABOTAGE": sabotage},
        )
        assert bundle.is_file(), completed.stdout + completed.stderr[-3000:]
        with tarfile.open(bundle) as archive:
            report = json.load(archive.extractfile("npu_acceptance/report.json"))  # type: ignore[arg-type]
            texts = [archive.extractfile(member).read().decode() for member in archive]  # type: ignore[union-attr]
        for secret in (str(tmp_path), str(ROOT), sys.prefix, *private.values()):
            assert not any(secret in text for text in texts)
        return completed, report

    return run


def failures(report: dict[str, Any], name: str) -> list[str]:
    """Return the names of a section's failed measurements."""
    (section,) = [section for section in report["sections"] if section["name"] == name]
    return [measurement["name"] for measurement in section["measurements"] if measurement["verdict"] == "failed"]


def assert_all_is_measured(report: dict[str, Any]) -> None:
    assert report["about"]["simulated"] is True
    assert report["about"]["versions"]["torch_npu"].endswith("+simnpu")
    assert report["about"]["versions"]["provider"] == ("megatron_adaptor" if ON_ADAPTOR else "mindspeed")
    (section,) = [section for section in report["sections"] if section["name"] == "collectives"]
    names = [measurement["name"] for measurement in section["measurements"]]
    for verb in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all_uneven", "broadcast", "send and receive"):
        for kind in ("bf16", "fp32", "int64"):
            assert f"{verb}, {kind}" in names
    assert {"all_gather_object", "broadcast_object_list"} <= set(names)


@pytest.mark.nightly  # covered: operators in test_acceptance_operators.py; the script below
@pytest.mark.slow
def test_wrong_operator_and_collective_fail_by_name_and_others_run(accept) -> None:
    """Sabotage an operator and a collective: only their measurements fail."""
    arguments = ("--quick", "--only", "operators,collectives,recipes", "--cards", "2")
    completed, report = accept(*arguments, sabotage="operator,collective")
    assert completed.returncode == 1
    assert completed.stdout.splitlines()[-2] == "FAILED: operators, collectives"
    verdicts = {section["name"]: section["verdict"] for section in report["sections"]}
    assert verdicts == {"operators": "failed", "collectives": "failed", "recipes": "left out"}
    assert_all_is_measured(report)
    assert {name.partition(",")[0] for name in failures(report, "operators")} == {"swiglu"}
    assert {name.partition(",")[0] for name in failures(report, "collectives")} == {
        "all_reduce",
        "all_reduce_maximum",
        "barrier and an all_reduce that is waited for",
    }
    assert "failed  swiglu, fp32, result: 0.5 (<= 0.0002)" in completed.stdout
    assert "failed  all_reduce, int64: 2 (<= 0) wrong elements" in completed.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_different_resume_fails_by_name(accept) -> None:
    completed, report = accept("--only", "resume", "--cards", "1", sabotage="resume")
    assert completed.returncode == 1
    assert failures(report, "resume") == [
        "losses after the resume",
        "gradient norms after the resume",
        "digest of the exported weights",
    ]
    completed, report = accept("--only", "resume", "--cards", "1")
    assert completed.returncode == 0, completed.stdout
    assert failures(report, "resume") == []


def test_section_over_its_deadline_fails_and_options_are_checked(accept, tmp_path: Path) -> None:
    completed, report = accept("--quick", "--only", "speed", "--cards", "1", "--deadline", "1")
    assert completed.returncode == 1
    (section,) = report["sections"]
    assert section["problem"] == "not done after 1 s"
    for arguments, message in (
        (["--stand-in"], "--stand-in needs --simulated"),
        (["--simulated", "--stand-in", "--only", "all"], "ConfigError: unknown section all"),
    ):
        script = ["bash", str(ROOT / "scripts" / "npu" / "acceptance.sh"), *arguments]
        environment = os.environ | {"PYTHON": sys.executable}
        completed = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False, env=environment)
        assert completed.returncode == 2
        assert message in completed.stderr
