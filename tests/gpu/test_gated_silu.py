"""SwiGLU kernels in place of Megatron's against float64 and against torch.compile. Needs a CUDA GPU."""

from __future__ import annotations

import pytest
import torch

import megascend

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")


def exact(y: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = y.detach().double().requires_grad_()
    gate, up = y.chunk(2, -1)
    out = torch.nn.functional.silu(gate) * up
    out.backward(grad.double())
    assert y.grad is not None
    return out.detach(), y.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (37, 3000), (5, 4, 2 * 6144)])
def test_installed_kernels_match_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    megascend.bootstrap("cuda").load_megatron()
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    from megascend.training.kernels import gated_silu

    gated_silu.install()
    gated_silu.install()
    generator = torch.Generator("cuda").manual_seed(0)
    y = torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(*shape[:-1], shape[-1] // 2, device="cuda", generator=generator).to(dtype)
    out = bias_swiglu_impl(y, None)
    (dy,) = torch.autograd.grad(out, y, grad)
    for result, right in zip((out, dy), exact(y, grad), strict=True):
        assert result.dtype == dtype
        error = (result.double() - right).norm() / right.norm()
        assert error < (1e-6 if dtype == torch.float32 else 3e-3), float(error)
