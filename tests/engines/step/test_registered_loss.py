"""A loss registered by an external package is known by name on the ranks that have imported the package."""

import importlib
import sys
import textwrap

import pytest
import torch

from megascend import Adam, Batching
from megascend.errors import OutOfStepError
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists

OUTSIDE = """
    import torch
    import megascend


    def focal(logprobs, inputs):
        \"\"\"Lin et al. 2017, eq. 4 with gamma 2: tokens that are predicted well count less.\"\"\"
        factor = (1 - torch.exp(logprobs)) ** 2
        return -factor * logprobs, {"factor": factor.detach()}


    megascend.register_loss(megascend.Loss("focal", focal))
"""


@pytest.fixture
def outside(tmp_path):
    """Create a package ``outside_losses``, which registers a loss when it is imported; return its parent folder."""
    package = tmp_path / "outside_losses"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(OUTSIDE), encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("megatron_imported")
def test_a_loss_from_outside_the_package_trains_by_name(parity_folder, outside):
    checkpoint = case_checkpoint(parity_folder, "qwen3")

    def on_rank():
        from megascend.backends import MegatronBackend

        backend = MegatronBackend(
            model=checkpoint,
            precision="fp32",
            optimizer=Adam(lr=1e-3),
            batching=Batching(micro_batch_tokens=64),
            timeout_s=60,
        )
        sys.path.insert(0, str(outside))
        samples = backend.shard(causal_samples(token_lists()))
        if backend.rank == 0:
            importlib.import_module("outside_losses")
        with pytest.raises(OutOfStepError, match="unknown loss 'focal'; known: cross_entropy,"):
            backend.forward_backward(samples, "focal")  # an error on both ranks, though one of them knows it
        importlib.import_module("outside_losses")
        logprobs = backend.forward(samples).logprobs
        values = [(-((1 - x.exp()) ** 2) * x * s.weights).sum() for x, s in zip(logprobs, samples, strict=True)]
        factors = [((1 - x.exp()) ** 2 * s.weights).sum() for x, s in zip(logprobs, samples, strict=True)]
        sums = torch.stack([sum(values), sum(factors), sum(s.weights.sum() for s in samples)])
        result = backend.forward_backward(samples, "focal")
        return result.loss, result.metrics, backend.optimizer_step().grad_norm, sums

    ranks = run_distributed(on_rank, 2, init=False)
    loss, factor, weight = sum(sums for *_, sums in ranks)
    for value, metrics, norm, _ in ranks:
        assert value == pytest.approx(float(loss / weight), rel=1e-5)
        assert metrics == {"factor": pytest.approx(float(factor / weight), rel=1e-5)}
        assert norm > 0
