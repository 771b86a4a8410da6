"""The stand-in for Triton: modules that need it can be imported, and torch goes on believing that there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest

import simnpu

PATHS = [entry for entry in sys.path if entry and "simnpu" not in entry]

CODE = """
import torch, torch_npu
from torch_npu.contrib import transfer_to_npu
import triton, triton.language as tl
from torch.utils._triton import has_triton, has_triton_package
assert not has_triton_package() and not has_triton()
import torch._inductor.runtime.triton_heuristics, torch._inductor.codegen.triton  # break if torch thinks it has triton

@triton.jit
def kernel(x, n: tl.constexpr):
    tl.make_tensor_descriptor(x, [n], [1], [n])

try:
    kernel[(1,)](torch.ones(4, device="npu"), 4)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif("triton" in packages_distributions(), reason="a real Triton is installed here")
def test_kernels_are_imported_not_run_and_torch_has_no_triton() -> None:
    env = simnpu.environment(os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)})
    completed = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert completed.stdout.startswith("NotSimulatedError")
