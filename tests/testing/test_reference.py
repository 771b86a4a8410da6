"""Reference programs run like separate processes, although their packages are imported once."""

from __future__ import annotations

import torch

from megascend.testing import hf_reference


def test_fp64_reference_turns_fp32_casts_into_fp64() -> None:
    """Intercept every form of cast to fp32 that norms and routers use."""
    x = torch.rand(3, dtype=torch.float64)
    with hf_reference.InDouble():
        tensors = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), torch.softmax(x, -1, dtype=torch.float32)]
    assert all(tensor.dtype == torch.float64 for tensor in tensors)
    assert torch.equal(tensors[0], x)
    assert x.float().dtype == torch.float32
