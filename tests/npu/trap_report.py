"""``python trap_report.py FOLDER``: errors of the bootstrap in environments that are broken in one way each.

A helper of ``test_traps.py``. Every scenario is a fork of this process, which has imported torch and the simulated torch_npu
and nothing else; FOLDER receives the obstructing packages. Prints JSON on the last line of stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
import torch_npu

import megascend
from megascend.runtime.bootstrap.versions import installed_versions, require_supported
from megascend.testing import run_distributed

IS_0_16 = require_supported(installed_versions()).name == "0.16"
CRASHES = "raise OSError('libcudart.so.12: cannot open shared object file')\n"
MEGATRON_0_12 = 'MAJOR = 0\nMINOR = 12\nPATCH = 2\nPRE_RELEASE = ""\n'


class Without:
    """Path finder that hides one package."""

    find_distributions = staticmethod(PathFinder.find_distributions)  # required by importlib.metadata

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] == self.package else PathFinder.find_spec(name, path, target)


def without(package: str) -> None:
    """Hide ``package`` as if it were not installed."""
    for name in [module for module in sys.modules if module.partition(".")[0] == package]:
        del sys.modules[name]
    sys.meta_path[:] = [Without(package) if finder is PathFinder else finder for finder in sys.meta_path]


def put_first(folder: Path, **files: str) -> None:
    """Write ``files`` (dots in a name for slashes) below ``folder``, which comes first on ``sys.path``."""
    for name, text in files.items():
        path = folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def mindspeed_of_another_branch(folder: Path) -> None:
    """Put a checkout on PYTHONPATH, as MindSpeed is used, with the version in ``setup.py``."""
    other = "0.15.3" if IS_0_16 else "0.16.0"
    put_first(folder, **{"mindspeed.__init__": "", "mindspeed.megatron_adaptor": CRASHES})
    (folder / "setup.py").write_text(f"__version__ = '{other}'\n")


def no_toolkit(folder: Path) -> None:
    del os.environ["ASCEND_HOME_PATH"]


def another_megatron(folder: Path) -> None:
    """Put a Megatron-LM tree first, whose ``megatron`` has no ``__init__.py``."""
    put_first(folder, **{"megatron.core.__init__": CRASHES, "megatron.core.package_info": MEGATRON_0_12})


def torch_npu_of(folder: Path, version: str) -> None:
    info = folder / f"torch_npu-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
    put_first(folder)
    torch_npu.__version__ = version


SCENARIOS: dict[str, Any] = {
    "no scipy": lambda folder: without("scipy"),
    "no mindspeed": lambda folder: without("mindspeed"),
    "mindspeed of another branch": mindspeed_of_another_branch,
    "no toolkit": no_toolkit,
    "another megatron": another_megatron,
    "torch_npu of another torch": lambda folder: torch_npu_of(folder, "2.7.1"),
}


def outcome(scenario: str, folder: Path) -> dict[str, Any]:
    """Return the error of the bootstrap, and whether anything was changed before it."""
    SCENARIOS[scenario](folder)
    before = torch.distributed.all_reduce, torch.compile, torch.jit.script, torch.Tensor.cuda
    error: Exception | None = None
    try:
        megascend.bootstrap("npu")
    except megascend.MegascendError as raised:
        error = raised
    touched = [name for name in sys.modules if name.startswith(("megatron.core", "transformer_engine", "mindspeed"))]
    return {
        "error": type(error).__name__,
        "message": str(error),
        "folder": str(folder),
        "imported": touched,
        "untouched": before == (torch.distributed.all_reduce, torch.compile, torch.jit.script, torch.Tensor.cuda),
    }


def main() -> None:
    root = Path(sys.argv[1])
    results = {name: run_distributed(outcome, 1, name, root / name, init=False)[0] for name in SCENARIOS}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
