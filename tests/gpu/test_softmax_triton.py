"""The Triton kernels against the plain implementation. Needs a CUDA GPU."""

import pytest
import torch

from megascend.training.kernels.linear_logprobs import linear_cross_entropy, linear_logprobs
from megascend.training.kernels.softmax import VocabShard, _gradient_, _shard_statistics

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("columns", [7, 8192, 20001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_the_plain_implementation(dtype, columns):
    from megascend.training.kernels import softmax_triton

    generator = torch.Generator("cuda").manual_seed(1)
    logits = (3 * torch.randn(33, columns, device="cuda", generator=generator)).to(dtype)
    targets = torch.randint(0, columns, (33,), device="cuda", generator=generator)
    targets[::4] = -1
    expected = _shard_statistics(logits, targets, True)
    for computed, plain in zip(softmax_triton.shard_statistics(logits, targets, True), expected, strict=True):
        torch.testing.assert_close(computed, plain, atol=1e-4, rtol=1e-5)
    maximum, total, _, weighted = expected
    log_sum, entropy = maximum + total.log(), total.log() - weighted / total
    scale, entropy_scale = torch.randn(2, 33, device="cuda", generator=generator)
    for extra in (None, entropy_scale):
        result, plain = logits.clone(), logits.clone()
        softmax_triton.gradient_(result, targets, log_sum, scale, entropy, extra)
        _gradient_(plain, targets, log_sum, scale, entropy, extra)
        torch.testing.assert_close(result, plain, atol=TOLERANCE[dtype] / 10, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direct", [True, False])
def test_loss_and_gradients_equal_autograd(dtype, direct):
    generator = torch.Generator("cuda").manual_seed(2)
    hidden = torch.randn(300, 64, device="cuda", generator=generator).to(dtype).requires_grad_()
    weight = (0.2 * torch.randn(1000, 64, device="cuda", generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, 1000, (300,), device="cuda", generator=generator)
    coefficients = torch.rand(300, device="cuda", generator=generator)
    wide_hidden, wide_weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    nll = torch.nn.functional.cross_entropy(wide_hidden @ wide_weight.t(), targets, reduction="none")
    (nll * coefficients).sum().backward()
    for form in (
        lambda: linear_cross_entropy(hidden, weight, targets, coefficients, VocabShard(0, 1000), 1.0, direct)[0],
        lambda: (linear_logprobs(hidden, weight, targets, VocabShard(0, 1000), False, direct)[0] * -coefficients).sum(),
    ):
        hidden.grad = weight.grad = None
        if direct:
            weight.main_grad = torch.zeros(1000, 64, device="cuda")
        loss = form()
        loss.backward()
        assert float(loss) == pytest.approx(float((nll * coefficients).sum()), rel=1e-3)
        gradient = weight.main_grad if direct else weight.grad
        for result, exact in ((hidden.grad, wide_hidden.grad), (gradient, wide_weight.grad)):
            error = (result.double() - exact).norm() / exact.norm()
            assert error < (1e-5 if dtype == torch.float32 else 1e-2)
