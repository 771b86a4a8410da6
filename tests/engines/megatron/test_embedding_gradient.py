"""The embedding's gradient, added to Megatron's buffer row by row, equals autograd's through DDP."""

import pytest
import torch

from megascend import Adam, Batching, Sample
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint

pytestmark = pytest.mark.usefixtures("megatron_imported")


def samples_of(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = (40, 9, 33, 70)
    # Few different tokens: rows of the table are hit many times.
    return [Sample.causal(torch.randint(0, 20, (n + 1,), generator=generator)) for n in lengths]


def figures(checkpoint, *, installed, precision):
    from megascend.backends import MegatronBackend
    from megascend.engines.megatron import embedding_gradient

    backend = MegatronBackend(
        checkpoint,
        precision=precision,
        optimizer=Adam(lr=1e-3, eps=1e-6),
        batching=Batching(micro_batch_tokens=80),
        self_check=False,
        timeout_s=60,
    )
    tables = embedding_gradient.install(backend.engine.bare_chunks) if installed else 0
    results = []
    for step in range(3):
        backend.forward_backward(backend.shard(samples_of(step)))
        backend.forward_backward(backend.shard(samples_of(step + 10)))
        table = backend.engine.bare_chunks[0].embedding.word_embeddings.weight
        assert table.grad is None
        results.append(table.main_grad.clone())
        results.append(torch.tensor(backend.optimizer_step().grad_norm))
    results += [weight.clone() for _, weight in backend.named_weights()]
    backend.close()
    return tables, results


@pytest.mark.nightly_cases("1-True", "2-False")  # covered: 2-True; 1-False
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_and_weights_are_the_same(parity_folder, world_size, tied):
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2, tie_word_embeddings=tied)

    def pair():
        return [figures(checkpoint, installed=installed, precision="fp32") for installed in (False, True)]

    for (none, expected), (tables, actual) in run_distributed(pair, world_size, init=False, timeout_s=200):
        assert (none, tables) == (0, 1)
        for tensor, reference in zip(actual, expected, strict=True):
            torch.testing.assert_close(tensor, reference, rtol=2e-5, atol=1e-6)


def test_in_bf16_it_is_the_more_exact_one(parity_folder):
    """Compare with the fp32 gradient of the same hidden states: rows that occur often are not rounded to bf16 in between."""
    from megascend.engines.megatron.embedding_gradient import _LookUp

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (1, 64), generator=generator)
    grad = torch.randn(1, 64, 8, generator=generator).bfloat16()
    exact = torch.zeros(5, 8, dtype=torch.float64).index_add_(0, ids[0], grad[0].double())
    weight = torch.nn.Parameter(torch.randn(5, 8, generator=generator).bfloat16())
    weight.main_grad = torch.zeros(5, 8)
    looked_up = _LookUp.apply(ids, weight)
    assert torch.equal(looked_up, torch.nn.functional.embedding(ids, weight))
    looked_up.backward(grad)
    assert weight.grad is None
    assert float((weight.main_grad - exact).abs().max()) < 1e-5
    plain = weight.detach().clone().requires_grad_()
    torch.nn.functional.embedding(ids, plain).backward(grad)
    assert float((plain.grad - exact).abs().max()) > 1e-3


def test_replaced_embedding_forward_is_called(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)

    def calls():
        from megatron.core.tensor_parallel import VocabParallelEmbedding

        from megascend.backends import MegatronBackend
        from megascend.changes import patched
        from megascend.engines.megatron import embedding_gradient

        backend = MegatronBackend(checkpoint, precision="fp32", self_check=False, timeout_s=60)
        embedding_gradient.install(backend.engine.bare_chunks)
        observed, upstream = [], VocabParallelEmbedding.forward

        def other(module, input_):
            observed.append(input_.shape)
            return upstream(module, input_)

        with patched(VocabParallelEmbedding, "forward", other, "a multimodal model does so"):
            inside = backend.forward(samples_of(0)).logprobs
        after = backend.forward(samples_of(0)).logprobs
        backend.close()
        return len(observed), [torch.equal(first, second) for first, second in zip(inside, after, strict=True)]

    call_count, same = run_distributed(calls, 1, init=False)[0]
    assert call_count == 1
    assert all(same)
