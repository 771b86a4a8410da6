"""Several configurations after each other in one process; repatching leaves no trace."""

from __future__ import annotations

import pytest

from megascend.config import Batching, Parallel
from megascend.testing import run_distributed
from megascend.testing.parity import case_checkpoint, causal_samples, token_lists

pytestmark = pytest.mark.usefixtures("npu")


def train(checkpoint, parallel, packing):
    from megascend.backends import MegatronBackend

    backend = MegatronBackend(
        checkpoint, parallel, "fp32", batching=Batching(packing=packing), platform="npu", timeout_s=60
    )
    samples = backend.shard(causal_samples(token_lists()))
    figures = []
    for _ in range(2):
        loss = backend.forward_backward(samples).loss
        figures += [loss, backend.optimizer_step().grad_norm]
    backend.close()
    return figures


def one_after_the_other(dense, experts):
    """Train with configurations that switch patches on and off: two algorithms of context parallelism, experts."""
    return {
        "TP2": train(dense, Parallel(tensor=2), False),
        "ring": train(dense, Parallel(context=2), False),
        "all_gather": train(dense, Parallel(context=2, context_algorithm="all_gather"), False),
        "EP2": train(experts, Parallel(expert=2), True),
        "TP2 again": train(dense, Parallel(tensor=2), False),
        "ring again": train(dense, Parallel(context=2), False),
    }


def test_configurations_follow_each_other_without_a_trace(parity_folder):
    dense, experts = (case_checkpoint(parity_folder, arch) for arch in ("qwen3", "qwen3_moe"))
    figures, _ = run_distributed(one_after_the_other, 2, dense, experts, init=False, timeout_s=240)
    assert figures["TP2 again"] == figures["TP2"]
    assert figures["ring again"] == figures["ring"]
    for algorithm in ("ring", "all_gather"):
        assert figures[algorithm] == pytest.approx(figures["TP2"], rel=1e-5)
    assert figures["EP2"][0] != pytest.approx(figures["TP2"][0], rel=1e-3)  # another model


def configure_again(checkpoint):
    from megascend.backends import MegatronBackend

    backend = MegatronBackend(checkpoint, Parallel(), "fp32", platform="npu", timeout_s=60)
    runtime, config = backend.engine.runtime, backend.engine.config
    provider = runtime.provider
    count = provider.repatches
    for _ in range(3):
        runtime.configure_topology(backend.topology)
        runtime.configure_model(config, {})
    backend.close()
    return provider.repatches - count


def test_unchanged_configuration_is_not_patched_again(parity_folder):
    assert run_distributed(configure_again, 1, case_checkpoint(parity_folder, "qwen3"), init=False) == [0]


def refused(checkpoint, parallel, batching):
    from megascend.backends import MegatronBackend
    from megascend.errors import ConfigError

    try:
        MegatronBackend(checkpoint, parallel, "fp32", batching=batching, platform="npu", self_check=False).close()
    except ConfigError as error:
        return str(error)


def test_packing_with_context_parallelism_is_refused(parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    for message in run_distributed(refused, 2, checkpoint, Parallel(context=2), Batching(), init=False):
        assert "batching.packing: true with parallel.context=2" in message
