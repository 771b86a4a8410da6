"""The embedding's gradient on a GPU: exact, deterministic, without synchronization, and in a CUDA graph. Needs a CUDA GPU."""

import pytest
import torch

import megascend

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")


@pytest.fixture
def look_up():
    pytest.importorskip("megatron.core")
    megascend.bootstrap("cuda")
    from megascend.engines.megatron.embedding_gradient import _LookUp

    return _LookUp.apply


def work(tokens=4096, vocabulary=30_000, width=512):
    """Return (ids, gradient of the looked-up rows, table), with tokens that occur hundreds of times."""
    generator = torch.Generator().manual_seed(0)
    ids = (vocabulary * torch.rand(2, tokens // 2, generator=generator, dtype=torch.float64) ** 6).long().cuda()
    grad = torch.randn(*ids.shape, width, generator=generator).bfloat16().cuda()
    weight = torch.nn.Parameter(torch.randn(vocabulary, width, generator=generator).bfloat16().cuda())
    weight.main_grad = torch.zeros(vocabulary, width, device="cuda")
    return ids, grad, weight


def test_embedding_gradient_is_exact_and_deterministic(look_up):
    ids, grad, weight = work()
    exact = torch.zeros_like(weight.main_grad, dtype=torch.float64).index_add_(
        0, ids.flatten(), grad.flatten(0, 1).double()
    )
    gradients = []
    for _ in range(3):
        weight.main_grad.zero_()
        rows = look_up(ids, weight)
        torch.cuda.set_sync_debug_mode("error")
        try:
            rows.backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        gradients.append(weight.main_grad.clone())
    assert weight.grad is None
    torch.testing.assert_close(gradients[0].double(), exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_embedding_gradient_can_be_captured(look_up):
    ids, grad, weight = work()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        look_up(ids, weight).backward(grad)
    torch.cuda.current_stream().wait_stream(stream)
    once = weight.main_grad.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        look_up(ids, weight).backward(grad)
    weight.main_grad.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(weight.main_grad, once)
