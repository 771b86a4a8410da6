"""What calls of operators come to, on the simulated device and in torch_npu's own library: refused, or shapes and dtypes.

    python -m real_torch_npu.outcomes PACKAGE    # reads a call a line, writes its outcome as JSON; real library, see library.py

A call is a Python expression over ``npu`` (``torch.ops.npu``), ``torch``, and ``t(*sizes, dtype="bfloat16", ...)``, a tensor.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch

from real_torch_npu.library import build_cann, unpack

NUMBERED_TYPES = {
    "int4": 285, "hifloat8": 290, "float8_e5m2": 291, "float8_e4m3fn": 292, "float8_e8m0fnu": 293, "float4_e2m1fn_x2": 296,
    "float4_e1m2fn_x2": 297,
}  # fmt: skip
CODES = ("PARAM", "TYPE", "VALUE", "PTR", "INTERNAL", "MEMORY", "NOT_SUPPORT", "NOT_FOUND", "UNAVAIL")


def tensor(
    *sizes: int,
    dtype: str = "bfloat16",
    fill: int | None = None,
    strides: list[int] | None = None,
    device: str = "npu:0",
) -> torch.Tensor:
    """Make a tensor of zeros, of one number, or of 0, 1, 2, ... (``fill=-1``), with the strides that are given."""
    kind = getattr(torch, dtype)
    if strides is not None:
        extent = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1
        return torch.zeros(extent, dtype=kind).to(device).as_strided(sizes, strides)
    if fill == -1:
        return torch.arange(torch.Size(sizes).numel()).view(sizes).to(kind).to(device)
    return torch.full(sizes, fill or 0, dtype=kind).to(device)


def outcome(call: str, device: str = "npu:0") -> dict[str, Any]:
    """Evaluate a call. An exception is a refusal, with the first line of its message."""
    names = {"npu": torch.ops.npu, "torch": torch, "t": functools.partial(tensor, device=device)}
    try:
        result = eval(call.replace("npu:0", device), names)
    except Exception as error:  # noqa: BLE001  # torch_npu's meta functions stumble over anything
        return {"refused": f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"}
    return {"results": [described(item) for item in (result if isinstance(result, (tuple, list)) else [result])]}


def described(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return [list(item.shape), str(item.dtype).removeprefix("torch.")]
    return None if item is None else type(item).__name__


class RealLibrary:
    """A process with torch_npu's own library, which answers one call at a time."""

    def __init__(self, version: str, folder: Path) -> None:
        package = unpack(version, folder)
        variables = build_cann(package, folder / version / "cann")
        variables["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SIMNPU")} | variables
        self.process = subprocess.Popen(
            [sys.executable, "-m", "real_torch_npu.outcomes", str(package)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip

    def __call__(self, call: str, device: str = "npu:0") -> Any:
        """Return the outcome of a call; with the device ``meta`` that of torch_npu's meta registrations."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{device} {call}\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(
                f"the process with torch_npu's library ended (exit code {self.process.wait()}) at {call}"
            )
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=60)


def load(package: Path) -> None:
    """Load the library and its Python binding in this process, and name its device ``npu``; no Python of torch_npu runs."""
    torch.utils.rename_privateuse1_backend("npu")
    ctypes.CDLL(str(package / "lib" / "libtorch_npu.so"), mode=ctypes.RTLD_GLOBAL)
    (binding,) = package.glob("_C*.so")
    shell, device = types.ModuleType("torch_npu"), types.ModuleType("torch_npu.npu")
    shell.__path__ = [str(package)]
    spec: Any = importlib.util.spec_from_file_location("torch_npu._C", binding)
    sys.modules["torch_npu"], sys.modules["torch_npu.npu"] = shell, device
    sys.modules["torch_npu._C"] = shell._C = extension = importlib.util.module_from_spec(spec)  # type: ignore[attr-defined]
    spec.loader.exec_module(extension)
    started: list[bool] = []

    def start() -> None:  # what torch_npu's own _lazy_init does before the first use of the device
        if not started:
            started.append(True)
            extension._npu_init()

    vars(device).update(
        _lazy_init=start, is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
    )  # fmt: skip
    torch._register_device_module("npu", device)
    vars(shell).update(npu=device, **NUMBERED_TYPES)
    run_meta_registrations(package)


def run_meta_registrations(package: Path) -> None:
    """Run torch_npu's file of shapes on the meta device, which imports three names of its Python package."""
    names = {
        "utils._error_code": {"ErrCode": types.SimpleNamespace(**dict.fromkeys(CODES)), "ops_error": lambda code: ""},
        "npu.utils": {"get_cann_version": lambda: "9.0.0"},
        "npu._backends": {"get_soc_version": lambda: 223},
    }
    for name, content in names.items():
        sys.modules[f"torch_npu.{name}"] = module = types.ModuleType(f"torch_npu.{name}")
        vars(module).update(content)
    file = package / "op_plugin" / "meta" / "_meta_registrations.py"
    exec(compile(file.read_text(), str(file), "exec"), {"__name__": "torch_npu.op_plugin.meta"})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints, too
    load(Path(sys.argv[1]))
    for line in sys.stdin:
        device, _, call = line.strip().partition(" ")
        if call == "schemas":
            answer: Any = [str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("npu::")]
        else:
            answer = outcome(call, device)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
