"""Is a real torch_npu installed here, and does it work?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.machinery import PathFinder

from simnpu.errors import PlatformError

PROBE_S = 120.0


def refuse_beside_real_torch_npu(search_path: Iterable[str]) -> None:
    """Raise if a real torch_npu that can be imported lies on ``search_path``.

    A wheel whose import fails (without CANN: ``libhccl.so: cannot open shared object file``) is shadowed instead, with
    a line on stderr.
    """
    paths = list(search_path)
    spec = PathFinder.find_spec("torch_npu", paths)
    if spec is None or spec.origin is None:
        return
    failure = import_failure(tuple(paths))
    if failure is None:
        raise PlatformError(
            f"a real torch_npu is installed and works ({spec.origin}): simnpu does not replace it. Run the "
            "program without simnpu, or use an environment without torch_npu"
        )
    message = f"simnpu: the installed torch_npu ({spec.origin}) cannot be imported and is shadowed: {failure}"
    print(message, file=sys.stderr)


@cache  # a probe is a whole `import torch`
def import_failure(search_path: tuple[str, ...]) -> str | None:
    """Why ``import torch_npu`` fails in a process of its own with this search path, or None if it works."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": os.pathsep.join(search_path)}
    try:
        probe = subprocess.run(
            [sys.executable, "-c", "import torch_npu"],
            env=env,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise PlatformError(
            f"a torch_npu is installed and its import did not end within {PROBE_S:.0f} s, so whether it works is not "
            "known; simnpu needs an environment without it"
        ) from None
    if probe.returncode == 0:
        return None
    return (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
