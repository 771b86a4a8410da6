"""Calls of the fused attention kernel during training, from the simulated device's log of operator calls."""

from __future__ import annotations

import pytest
import torch

from megascend.config import Batching, Parallel
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, hf_reference, token_lists
from simnpu import call_log
from support.prefix_runs import BRANCHES, common_tokens, trajectory

pytestmark = pytest.mark.usefixtures("npu")

COMPRESSED = (2048, 2048)


def train_once(checkpoint, parallel, packing, lengths):
    """Run a forward and backward pass; return the attention calls."""
    from megascend.backends import MegatronBackend

    backend = MegatronBackend(
        checkpoint,
        parallel,
        "fp32",
        batching=Batching(packing=packing, micro_batch_tokens=10_000),
        platform="npu",
        timeout_s=60,
    )
    samples = causal_samples(token_lists(lengths=lengths))
    with call_log.recording() as calls:
        backend.forward_backward(backend.shard(samples))
    backend.close()
    return [call for call in calls if call.name == "npu_fusion_attention"]


def calls_of(parity_folder, world_size, parallel, packing=True, lengths=(12, 20, 8)):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    ranks = run_distributed(train_once, world_size, checkpoint, parallel, packing, lengths, init=False, timeout_s=120)
    assert all(len(calls) >= 1 for calls in ranks)
    return [call.arguments for calls in ranks for call in calls]


CAUSAL = [
    pytest.param(1, Parallel(), id="single"),
    pytest.param(2, Parallel(tensor=2, sequence=True), id="TP2 + SP"),
]


@pytest.mark.parametrize(("world_size", "parallel"), CAUSAL)
def test_causal_attention_gets_the_compressed_triangle(world_size, parallel, parity_folder):
    for call in calls_of(parity_folder, world_size, parallel, packing=False):
        assert call["input_layout"] == "SBH"
        assert call["sparse_mode"] == 2
        assert call["atten_mask"].shape == COMPRESSED
        assert call["atten_mask"].dtype == "bool"
        assert (call["pre_tockens"], call["next_tockens"], call["keep_prob"]) == (65536, 0, 1.0)


def test_packed_samples_are_separated_by_their_lengths(parity_folder):
    for call in calls_of(parity_folder, 1, Parallel(), packing=True):
        assert call["input_layout"] == "TND"
        assert call["atten_mask"].shape == COMPRESSED
        assert list(call["actual_seq_qlen"]) == [19, 30, 37]  # longest first; a sample is one shorter than its tokens
        assert list(call["actual_seq_qlen"]) == list(call["actual_seq_kvlen"])


def train_on_a_tree(checkpoint):
    """Return losses and norms of three steps whose samples share prefixes, and the attention calls."""
    with call_log.recording() as calls:
        figures = trajectory("megatron", checkpoint, BRANCHES, platform="npu")
    return figures, [call.arguments for call in calls if call.name == "npu_fusion_attention"]


def test_shared_prefixes_are_longer_sequences_of_keys(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    ((figures, calls),) = run_distributed(train_on_a_tree, 1, checkpoint, init=False, timeout_s=120)
    assert figures["shared"] == common_tokens(BRANCHES)
    reference = hf_reference(parity_folder, checkpoint, BRANCHES, 3)
    assert figures["losses"] == pytest.approx(reference.losses, abs=1e-5)
    assert figures["norms"] == pytest.approx(reference.grad_norms, abs=1e-4)
    for call in calls:
        assert (call["input_layout"], call["sparse_mode"]) == ("TND", 3)
        assert call["atten_mask"].shape == COMPRESSED
        # In the order of the tokens, each sample has as many keys as inputs, and fewer queries.
        assert call["actual_seq_qlen"][-1] == sum(map(len, BRANCHES)) - len(BRANCHES) - figures["shared"]
        assert call["actual_seq_kvlen"][-1] == sum(map(len, BRANCHES)) - len(BRANCHES)


def test_context_parallelism_never_gets_a_dense_mask(parity_folder):
    for call in calls_of(parity_folder, 2, Parallel(context=2), packing=False):
        mask = call.get("atten_mask")
        assert mask is None or mask.shape == COMPRESSED
        assert call.get("sparse_mode", 0) == (0 if mask is None else 3)


def pass_a_mask(checkpoint, kind):
    """Call the model with a dense mask, as a trainer that builds masks does."""
    from megascend.backends import MegatronBackend
    from megascend.errors import DataError

    backend = MegatronBackend(checkpoint, Parallel(), "fp32", platform="npu", timeout_s=60)
    (chunk,) = backend.engine.bare_chunks
    ids = torch.arange(2 * 16, device="npu").reshape(2, 16)
    inputs = {"input_ids": ids, "position_ids": torch.arange(16, device="npu").expand(2, 16).contiguous()}
    dense = torch.ones(16, 16, dtype=torch.bool, device="npu").triu(1).expand(2, 1, 16, 16).contiguous()
    if kind == "left padding":
        dense[:, :, :, :4] = True
    chunk.eval()
    with torch.no_grad(), call_log.recording() as calls:
        implicit = chunk(attention_mask=None, **inputs)
        try:
            explicit = chunk(attention_mask=dense, **inputs)
        except DataError as error:
            return str(error)
    backend.close()
    shapes = {call.arguments["atten_mask"].shape for call in calls if call.name == "npu_fusion_attention"}
    return bool(torch.equal(implicit.cpu(), explicit.cpu())), shapes


def test_dense_causal_mask_of_the_caller_is_dropped(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    (result,) = run_distributed(pass_a_mask, 1, checkpoint, "causal", init=False)
    assert result == (True, {COMPRESSED})


def test_other_mask_of_the_caller_is_refused(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    (message,) = run_distributed(pass_a_mask, 1, checkpoint, "left padding", init=False)
    assert "pad on the right with weight 0" in message
