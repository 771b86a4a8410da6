"""Traps of an Ascend host's environment: refused with a remedy before anything is changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megascend.runtime.bootstrap.versions import installed_versions, require_supported

FOLDER = Path(__file__).resolve().parent
IS_0_16 = require_supported(installed_versions()).name == "0.16"
BRANCH = "core_r0.16.0" if IS_0_16 else "core_r0.15.3"


@pytest.fixture(scope="module")
def refused(run_python, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Return the report of ``trap_report.py``: one process for all scenarios."""
    code = "import runpy, sys; sys.argv[0] = sys.argv.pop(1); runpy.run_path(sys.argv[0], run_name='__main__')"
    completed = run_python(code, str(FOLDER / "trap_report.py"), str(tmp_path_factory.mktemp("traps")))
    return json.loads(completed.stdout.splitlines()[-1])


REFUSED = [
    ("no scipy", "PlatformError", ["MindSpeed needs scipy without declaring it", "pip install scipy"]),
    (
        "no mindspeed",
        "PlatformError",
        [f"git clone -b {BRANCH} https://", "/MindSpeed.git, and pip install --no-deps -e MindSpeed", "PYTHONPATH"],
    ),
    (
        "mindspeed of another branch",
        "VersionError",
        [f"MindSpeed {'0.15.3' if IS_0_16 else '0.16.0'} is on the path ({{folder}}/", f"needs branch {BRANCH}"],
    ),
    ("no toolkit", "PlatformError", ["ASCEND_HOME_PATH is not set", "set_env.sh"]),
    ("another megatron", "VersionError", ["from {folder}/megatron/core, which is version 0.12.2", "PYTHONPATH"]),
    ("torch_npu of another torch", "VersionError", ["torch_npu 2.7.1 is built for torch of the same version"]),
]


@pytest.mark.parametrize(("scenario", "error", "messages"), REFUSED)
def test_broken_environment_is_refused_with_a_remedy(
    scenario: str, error: str, messages: list[str], refused: dict[str, dict[str, Any]]
) -> None:
    report = refused[scenario]
    assert report["error"] == error, report["message"]
    for message in messages:
        assert message.format(folder=report["folder"]) in report["message"]
    assert report["imported"] == []
    assert report["untouched"]


WITHOUT_CANN = """
import json, sys, megascend
from megascend.runtime.platforms import choose
answers = {}
for platform in sys.argv[1:]:
    try:
        answers[platform] = choose(platform).name
    except megascend.PlatformError as error:
        answers[platform] = f"PlatformError: {error}"
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def without_cann(tmp_path_factory) -> dict[tuple[str, str], str]:
    """Choose platforms with the real wheel on a machine without CANN; return results by platform and auto-loading."""
    folder = tmp_path_factory.mktemp("without_cann")
    info = folder / "torch_npu-2.6.0.dist-info"
    for path in (folder / "torch_npu", info):
        path.mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(
        'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")\n'
    )
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.6.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    path = [str(folder), *(entry for entry in sys.path if entry and "simnpu" not in entry)]
    environment = {name: value for name, value in os.environ.items() if name != "SIMNPU"}
    environment |= {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
    jobs = (("1", ["npu"]), ("1", ["auto"]), ("0", ["npu", "auto"]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_CANN, *platforms],
            env=environment | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for autoload, platforms in jobs
    ]
    answers = {}
    try:
        for (autoload, _), process in zip(jobs, processes, strict=True):
            output, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-4000:]
            answers |= {(name, autoload): answer for name, answer in json.loads(output.splitlines()[-1]).items()}
    finally:
        for process in processes:
            process.kill()
    return answers


@pytest.mark.parametrize("platform", ["npu", "auto"])
def test_failed_torch_import_without_cann_is_explained(platform, without_cann) -> None:
    """``import torch`` itself fails here, so no platform is available, not even the CPU."""
    message = without_cann[platform, "1"]
    assert message.startswith("PlatformError: torch cannot be imported: torch_npu cannot load Ascend's libraries")
    for part in ("libhccl.so", "set_env.sh", "pip uninstall torch_npu", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert part in message


def test_without_autoload_npu_is_refused_and_auto_chooses_cpu(without_cann) -> None:
    message = without_cann["npu", "0"]
    assert message.startswith("PlatformError: platform 'npu' cannot be used here: torch_npu cannot load Ascend's")
    assert "set_env.sh" in message
    assert without_cann["auto", "0"] == "cpu"


@pytest.mark.skipif(
    not os.environ.get("MEGASCEND_MINDSPEED"), reason="MEGASCEND_MINDSPEED names no MindSpeed checkout of the stack"
)
def test_real_mindspeed_patches_megatron_on_the_simulated_device(run_python) -> None:
    """Import MindSpeed without megascend's bootstrap."""
    run_python("""
from mindspeed import args_utils
args_utils._MINDSPEED_ARGS = args_utils.get_mindspeed_args(get_defaults=True)
import mindspeed.megatron_adaptor
import megatron.core, mcore_bridge
from megatron.core.extensions import transformer_engine
assert transformer_engine.HAVE_TE
assert transformer_engine.TEDotProductAttention.__module__.startswith("mindspeed.")
""")
