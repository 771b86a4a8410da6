"""The precision of fp32 products, in fresh processes: cuBLAS reads its variable once. Needs a CUDA GPU."""

import os
import subprocess
import sys

import pytest
import torch

from megascend.runtime.platforms.cuda import TF32_ERROR, TF32_VARIABLE

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")

TELL = """
from megascend.runtime.platforms.cuda import relative_error
print("ERROR", relative_error())
rows = torch.randn(512, 512, device="cuda")
print("TORCH", float(((rows @ rows).double() - rows.double() @ rows.double()).norm() / (rows.double() @ rows.double()).norm()))
"""


def errors_of(program):
    """Return relative errors of products by Transformer Engine and by torch after ``program``."""
    environment = {
        name: value for name, value in os.environ.items() if name != TF32_VARIABLE
    }  # a bootstrap here has set it
    command = [sys.executable, "-c", f"import torch, megascend\n{program}\n{TELL}"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert completed.returncode == 0, completed.stderr[-2000:]
    lines = dict(line.split() for line in completed.stdout.splitlines() if line.startswith(("ERROR", "TORCH")))
    return float(lines["ERROR"]), float(lines["TORCH"])


def test_fp32_is_fp32_after_the_bootstrap():
    assert max(errors_of("megascend.bootstrap('cuda')")) < TF32_ERROR / 10


def test_tf32_is_tf32_if_requested():
    assert min(errors_of("megascend.bootstrap('cuda', tf32=True)")) > TF32_ERROR * 3


def test_earlier_use_of_cublas_is_fp32_or_detected():
    transformer_engine, by_torch = errors_of(
        "x = torch.randn(64, 64, device='cuda'); x @ x; torch.cuda.synchronize(); megascend.bootstrap('cuda')"
    )
    print(f"Transformer Engine's relative error {transformer_engine:.1e}, torch's {by_torch:.1e}")
    assert not TF32_ERROR / 10 < transformer_engine < TF32_ERROR * 3  # clearly one of the two
