"""The QK-norm kernels against torch's RMSNorm. Needs a CUDA GPU."""

import pytest
import torch

import megascend

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")


def reference(x, weight, grad, eps):
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    out = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    out.backward(grad.double())
    return out.detach(), x.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "inside the fused projection", "transposed"])
def test_values_and_gradients(dtype, layout):
    megascend.bootstrap("cuda")
    from megascend.training.kernels.head_norm import head_norm

    generator = torch.Generator("cuda").manual_seed(0)
    mixed = torch.randn(37, 3, 8, 4 * 128, device="cuda", generator=generator).to(dtype)
    x = {
        "contiguous": mixed[..., 256:384].contiguous(),
        "inside the fused projection": mixed[..., 256:384],
        "transposed": mixed[..., 256:384].transpose(0, 1),
    }[layout].requires_grad_()
    weight = (1 + 0.3 * torch.randn(128, device="cuda", generator=generator)).to(dtype).requires_grad_()
    grad = torch.randn(x.shape, device="cuda", generator=generator).to(dtype)
    out = head_norm(x, weight, 1e-6)
    (dx, dw) = torch.autograd.grad(out, (x, weight), grad)
    for result, exact in zip((out, dx, dw), reference(x, weight, grad, 1e-6), strict=True):
        error = (result.double() - exact).norm() / exact.norm()
        assert error < (1e-5 if dtype == torch.float32 else 5e-3), (layout, float(error))
