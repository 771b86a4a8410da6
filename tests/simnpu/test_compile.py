"""``torch.compile`` on the simulated device, and what ends a process: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.environ.get("SIMNPU") != "1", reason="registers a device: set SIMNPU=1")

BEGIN = """
import torch
from simnpu import device
from simnpu import npu as torch_npu_module
device.register(torch_npu_module)
"""

COMPILE = """
def f(x, w):
    y = torch.nn.functional.gelu(x @ w) + torch.zeros(4, device=x.device) + torch.arange(4, device=x.device)
    return (y * y).sum()

for where in ("npu:0", "npu:1"):
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        x, w = torch.randn(4, 4, device=where), torch.randn(4, 4, device=where, requires_grad=True)
        loss = torch.compile(f, backend=backend, fullgraph=True)(x, w)
        loss.backward()
        c = w.detach().cpu().requires_grad_()
        expected = f(x.cpu(), c)
        expected.backward()
        torch.testing.assert_close(loss.cpu(), expected)
        torch.testing.assert_close(w.grad.cpu(), c.grad)
        assert w.grad.device == torch.device(where)
try:
    torch.compile(f)(x, w)
except RuntimeError as error:
    assert "torch.compile with Inductor: the simulated npu has no compiler" in str(error), error
    assert "aot_eager" in str(error)
else:
    raise SystemExit("Inductor ran")
"""

PROFILE = """
profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
profile.start()
torch.ones(3, device="npu").add(1)
"""


@pytest.mark.parametrize("code", [COMPILE, PROFILE], ids=["compile", "a profile that nobody stops"])
def test_in_a_process(code: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{BEGIN}{code}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
