#!/usr/bin/env python3
"""Which of torch_npu's public names the simulated device has: writes the names behind docs/simnpu.md.

    python scripts/npu/simnpu_names.py CHECKOUT     # of torch_npu (github.com/Ascend/pytorch), or MEGASCEND_TORCH_NPU

Run it with megascend's Python and torch. The names are those of `__all__` in the checkout's packages. Nothing of
the checkout is imported. Operators are compared with torch_npu's library: scripts/npu/real_torch_npu.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from importlib import import_module
from pathlib import Path

NAMES = Path(__file__).resolve().parents[2] / "benchmarks" / "integrations" / "torch_npu-names.json"
PACKAGES = {
    "torch_npu.npu": "torch_npu/npu/__init__.py",
    "torch_npu.npu.amp": "torch_npu/npu/amp/__init__.py",
    "torch_npu.profiler": "torch_npu/profiler/__init__.py",
    "torch_npu.optim": "torch_npu/optim/__init__.py",
    "torch_npu.utils": "torch_npu/utils/__init__.py",
    "torch_npu.distributed": "torch_npu/distributed/__init__.py",
}
RAISES_WHEN_CALLED = {"torch_npu.npu": {"NPUGraph"}}


def published(path: Path) -> list[str]:
    """Return the names in a file's ``__all__`` without running it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return sorted(ast.literal_eval(node.value))
    raise SystemExit(f"{path} has no __all__")


def states(module: str, names: list[str]) -> dict[str, list[str]]:
    """Divide the names of one package by what its stand-in does with them."""
    package = import_module(module)
    calls = RAISES_WHEN_CALLED.get(module, set())
    return {
        "there": [name for name in names if hasattr(package, name) and name not in calls],
        "raises when called": [name for name in names if name in calls],
        "raises when looked up": [name for name in names if not hasattr(package, name)],
    }


def main() -> None:
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("MEGASCEND_TORCH_NPU", ""))
    if not (checkout / "torch_npu" / "npu" / "__init__.py").is_file():
        raise SystemExit(f"no checkout of torch_npu at {str(checkout)!r}: name one, or set MEGASCEND_TORCH_NPU")
    import simnpu

    simnpu.activate()
    found = {module: states(module, published(checkout / file)) for module, file in PACKAGES.items()}
    lines = ",\n".join(f" {json.dumps(module)}: {json.dumps(names)}" for module, names in found.items())
    NAMES.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{NAMES}: written", file=sys.stderr)


if __name__ == "__main__":
    main()
