"""The chunked, vocab-parallel projection compared with torch's log-softmax over the full vocabulary."""

import pytest
import torch
import torch.distributed as dist

from megascend.testing import run_distributed
from megascend.training.kernels import linear_logprobs as module
from megascend.training.kernels.linear_logprobs import (
    LowRank,
    VocabShard,
    gather_logits,
    linear_cross_entropy,
    linear_logprobs,
)

TOKENS, HIDDEN, VOCABULARY = 150, 16, 37


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "chunk_size", lambda rows, element_size: 64)  # three chunks, the last one short


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    loss_grad = torch.randn(2, TOKENS, generator=generator)
    return hidden, weight, targets, loss_grad


def reference(hidden, weight, targets, loss_grad):
    """Compute values and gradients by autograd through a plain log-softmax, in float64."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (hidden @ weight.t()).log_softmax(-1)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (loss_grad[0] * logprobs + loss_grad[1] * entropy).sum().backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def test_values_and_gradients_equal_a_plain_log_softmax():
    hidden, weight, targets, loss_grad = inputs()
    expected = reference(hidden, weight, targets, loss_grad)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropy, _ = linear_logprobs(hidden, weight, targets, VocabShard(0, VOCABULARY), entropy=True)
    (loss_grad[0] * logprobs + loss_grad[1] * entropy).sum().backward()
    for result, reference_value in zip((logprobs, entropy, hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(result.double(), reference_value, atol=2e-5, rtol=2e-5)


def test_cross_entropy_forms_the_same_gradient_in_the_forward_pass():
    hidden, weight, targets, loss_grad = inputs()
    coefficients = loss_grad[0].abs()
    _, _, grad_hidden, grad_weight = reference(hidden, weight, targets, torch.stack([-coefficients, coefficients * 0]))
    hidden.requires_grad_()
    weight.requires_grad_()
    total, logprobs = linear_cross_entropy(
        hidden, weight, targets, coefficients, VocabShard(0, VOCABULARY), loss_grad=3.0
    )
    (total * 3).backward()
    expected = torch.nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    torch.testing.assert_close(-logprobs, expected.detach(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(total.detach(), (expected * coefficients).sum().detach(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), 3 * grad_hidden, atol=6e-5, rtol=2e-5)
    torch.testing.assert_close(weight.grad.double(), 3 * grad_weight, atol=6e-5, rtol=2e-5)


@pytest.mark.parametrize("world_size", [2, 4])
def test_vocabulary_shards_with_padding_rows_give_the_same_numbers(world_size):
    """Divide 37 rows over 2 or 4 ranks: the last rank has padding rows, filled with large values that must not count."""
    hidden, weight, targets, loss_grad = inputs()
    expected = reference(hidden, weight, targets, loss_grad)
    per_rank = -(-VOCABULARY // world_size)
    padded = torch.cat([weight, torch.full((per_rank * world_size - VOCABULARY, HIDDEN), 9.0)])

    def on_rank():
        rank = dist.get_rank()
        local_weight = padded[rank * per_rank : (rank + 1) * per_rank].clone().requires_grad_()
        shard = VocabShard.for_rank(VOCABULARY, per_rank, rank, dist.group.WORLD)
        states = hidden.clone().requires_grad_()
        logprobs, entropy, _ = linear_logprobs(states, local_weight, targets, shard, entropy=True)
        (loss_grad[0] * logprobs + loss_grad[1] * entropy).sum().backward()
        fused_weight, fused_states = local_weight.detach().clone().requires_grad_(), hidden.clone().requires_grad_()
        total, fused = linear_cross_entropy(fused_states, fused_weight, targets, loss_grad[0].abs(), shard)
        total.backward()
        assert torch.allclose(fused, logprobs.detach(), atol=1e-5)
        return logprobs.detach(), entropy.detach(), states.grad, local_weight.grad, fused_states.grad, fused_weight.grad

    ranks = run_distributed(on_rank, world_size, timeout_s=180)
    for logprobs, entropy, *_ in ranks:
        torch.testing.assert_close(logprobs.double(), expected[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(entropy.double(), expected[1], atol=2e-5, rtol=2e-5)
    grad_hidden = sum(rank[2].double() for rank in ranks)
    torch.testing.assert_close(grad_hidden, expected[2], atol=2e-5, rtol=2e-5)
    grad_weight = torch.cat([rank[3] for rank in ranks]).double()
    torch.testing.assert_close(grad_weight[:VOCABULARY], expected[3], atol=2e-5, rtol=2e-5)
    assert (grad_weight[VOCABULARY:] == 0).all()
    _, _, fused_hidden, fused_weight = reference(
        hidden, weight, targets, torch.stack([-loss_grad[0].abs(), loss_grad[1] * 0])
    )
    torch.testing.assert_close(sum(rank[4].double() for rank in ranks), fused_hidden, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(
        torch.cat([rank[5] for rank in ranks]).double()[:VOCABULARY], fused_weight, atol=2e-5, rtol=2e-5
    )


def candidates_and_gradients(slots=7):
    """Return ids [TOKENS, slots] of which some are targets and some unused, and gradients of all three outputs."""
    generator = torch.Generator().manual_seed(5)
    *_, targets, loss_grad = inputs()
    ids = torch.rand(TOKENS, VOCABULARY, generator=generator).topk(slots).indices
    ids[::3, 0] = torch.where((ids[::3] == targets[::3, None]).any(1), ids[::3, 0], targets[::3])
    ids[::4, 3:] = -1
    ids[5] = -1
    return ids, loss_grad, torch.randn(TOKENS, slots, generator=generator)


def reference_with_candidates(hidden, weight, targets, ids, grads, grad_candidates):
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (hidden @ weight.t()).log_softmax(-1)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    selected = torch.where(ids >= 0, log_p.gather(1, ids.clamp_min(0)), 0.0)
    (grads[0] * logprobs + grads[1] * entropy + (grad_candidates * selected).sum(1)).sum().backward()
    return logprobs.detach(), entropy.detach(), selected.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_candidates_of_any_shard_have_values_and_gradients_of_a_plain_log_softmax(world_size):
    """Divide 37 rows over the ranks, of four one has padding only; padding rows are large values that must not count."""
    hidden, weight, targets, _ = inputs()
    ids, grads, grad_candidates = candidates_and_gradients()
    assert ((ids == targets[:, None]).any(1)).sum() > TOKENS / 4
    expected = reference_with_candidates(hidden, weight, targets, ids, grads, grad_candidates)
    per_rank = -(-VOCABULARY // world_size) + 3
    padded = torch.cat([weight, torch.full((per_rank * world_size - VOCABULARY, HIDDEN), 9.0)])

    def on_rank():
        rank = dist.get_rank()
        local_weight = padded[rank * per_rank : (rank + 1) * per_rank].clone().requires_grad_()
        shard = VocabShard.for_rank(VOCABULARY, per_rank, rank, dist.group.WORLD)
        states = hidden.clone().requires_grad_()
        outputs = linear_logprobs(states, local_weight, targets, shard, entropy=True, candidates=ids)
        logprobs, entropy, selected = outputs
        (grads[0] * logprobs + grads[1] * entropy + (grad_candidates * selected).sum(1)).sum().backward()
        return *(output.detach() for output in outputs), states.grad, local_weight.grad

    ranks = run_distributed(on_rank, world_size, timeout_s=180)
    for values in zip(*(rank[:3] for rank in ranks), strict=True):
        assert all(torch.equal(value, values[0]) for value in values)
    results = [
        *ranks[0][:3],
        sum(rank[3].double() for rank in ranks),
        torch.cat([rank[4] for rank in ranks])[:VOCABULARY],
    ]
    for result, reference_value in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), reference_value, atol=3e-5, rtol=2e-5)
    assert (torch.cat([rank[4] for rank in ranks])[VOCABULARY:] == 0).all()


def test_gradient_of_a_learned_distribution_vanishes_in_16_bits():
    """p - q is 0 and p is not: the two parts of a column's gradient are subtracted in fp32, and rounded once."""
    hidden, weight, targets, _ = inputs(torch.bfloat16)
    ids = torch.arange(VOCABULARY).expand(TOKENS, -1)
    states = hidden.clone().requires_grad_()
    selected = linear_logprobs(states, weight, targets, VocabShard(0, VOCABULARY), candidates=ids)[2]
    teacher = selected.detach().exp()
    (-teacher * selected).sum().backward()
    assert float(teacher.max()) > 0.5
    assert float(states.grad.abs().max()) < 1e-5


def test_the_expected_upstream_gradient_is_checked():
    hidden, weight, targets, loss_grad = inputs()
    hidden.requires_grad_()
    total, _ = linear_cross_entropy(
        hidden, weight, targets, loss_grad[0].abs(), VocabShard(0, VOCABULARY), loss_grad=1.0
    )
    with pytest.raises(RuntimeError, match=r"called with loss_grad=1\.0, but received gradient 2\.0"):
        (2 * total).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_gradient_is_added_to_the_main_buffer(dtype):
    """Check that main_grad is added to, padding rows are unchanged, and autograd gets no gradient."""
    hidden, weight, targets, loss_grad = inputs(dtype)
    weight = torch.cat([weight, torch.full((3, HIDDEN), 9.0, dtype=dtype)]).requires_grad_()
    weight.main_grad = torch.ones(len(weight), HIDDEN)
    coefficients = loss_grad[0].abs()
    zeros = coefficients * 0
    _, _, _, expected = reference(hidden, weight.detach()[:VOCABULARY], targets, torch.stack([-coefficients, zeros]))
    total, _ = linear_cross_entropy(
        hidden.requires_grad_(), weight, targets, coefficients, VocabShard(0, VOCABULARY), direct_weight_gradient=True
    )
    total.backward()
    assert weight.grad is None
    tolerance = 2e-5 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(weight.main_grad[:VOCABULARY].double() - 1, expected, atol=tolerance, rtol=tolerance)
    assert (weight.main_grad[VOCABULARY:] == 1).all()


SEGMENTS = ((2, slice(10, 70)), (0, slice(100, 150)))
"""Matrix and tokens; some tokens have no segment, one matrix has no tokens, and segments cross the borders of chunks."""


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("cap", [None, 4.0])
def test_adapters_add_to_the_logits_of_their_segments(fused, temperature, cap):
    """Freeze a weight with padding rows; compare gradients with autograd through the full logits."""
    hidden, weight, targets, _ = inputs()
    generator = torch.Generator().manual_seed(4)
    down = torch.randn(TOKENS, 3, generator=generator)
    up = torch.randn(3, 3, VOCABULARY, generator=generator)
    coefficients = torch.rand(TOKENS, generator=generator)

    leaves = [tensor.double().requires_grad_() for tensor in (hidden, down, up)]
    logits = leaves[0] @ weight.double().t()
    for number, segment in SEGMENTS:
        mask = torch.zeros(TOKENS, 1, dtype=torch.float64)
        mask[segment] = 1
        logits = logits + mask * (leaves[1] @ leaves[2][number])
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    ((logits / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0] * -coefficients).sum().backward()

    padded = torch.cat([weight, torch.full((3, HIDDEN), 9.0)])
    grads = torch.ones_like(up)  # of an earlier micro batch
    lora_delta = LowRank(up, grads, SEGMENTS)
    inputs_with_grad = [tensor.clone().requires_grad_() for tensor in (hidden, down)]
    shard = VocabShard(0, VOCABULARY, cap=cap)
    if fused:
        total, _ = linear_cross_entropy(
            inputs_with_grad[0],
            padded,
            targets,
            coefficients,
            shard,
            down=inputs_with_grad[1],
            lora_delta=lora_delta,
            temperature=temperature,
        )
    else:
        logprobs, *_ = linear_logprobs(
            inputs_with_grad[0],
            padded,
            targets,
            shard,
            down=inputs_with_grad[1],
            lora_delta=lora_delta,
            temperature=temperature,
        )
        total = (logprobs * -coefficients).sum()
    total.backward()
    results = (
        inputs_with_grad[0].grad,
        inputs_with_grad[1].grad,
        grads - 1,
        gather_logits(hidden, padded, shard, down, lora_delta)[:, :VOCABULARY],
    )
    expected = (*(leaf.grad for leaf in leaves), logits.detach())
    for result, reference_value in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), reference_value, atol=2e-5, rtol=2e-5)
