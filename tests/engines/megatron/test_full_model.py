"""Steps of a whole model on engine megatron that have no gradients."""

from __future__ import annotations

import pytest
import torch

from megascend import Adam, Batching, Parallel
from megascend.errors import ConfigError
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists

pytestmark = pytest.mark.usefixtures("megatron_imported")


@pytest.mark.parametrize("overlap_grad_reduce", [False, True])
def test_step_without_gradients_raises_on_all_ranks_and_changes_nothing(parity_folder, overlap_grad_reduce):
    checkpoint = case_checkpoint(parity_folder, "qwen3", num_hidden_layers=2)

    def on_rank():
        from megascend.backends import MegatronBackend

        adam = Adam(lr=5e-3, weight_decay=0.1, overlap_grad_reduce=overlap_grad_reduce)
        options = {"precision": "fp32", "timeout_s": 60, "self_check": False, "optimizer": adam}
        backend = MegatronBackend(checkpoint, Parallel(), batching=Batching(micro_batch_tokens=200), **options)
        samples = backend.shard(causal_samples(token_lists()))

        def weights():
            return {name: value.clone() for name, value in backend.named_weights()}

        for accumulated in (False, True):
            if accumulated:
                backend.forward_backward(samples)
                backend.optimizer_step()
            before = weights()
            with pytest.raises(ConfigError, match="the model has no gradients; call forward_backward first"):
                backend.optimizer_step()
            assert all(torch.equal(before[name], value) for name, value in weights().items())
        assert backend.step_count == 1
        backend.forward_backward(samples)
        step = backend.optimizer_step(lr=0.25)
        assert step.grad_norm > 0
        assert step.lr == 0.25  # in place of the schedule's

    run_distributed(on_rank, 2)
