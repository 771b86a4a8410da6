"""Several configurations after each other in one process; repatching leaves no trace."""

from __future__ import annotations

import sys

import pytest

from megascend.config import Batching, Parallel, Recompute
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


def layers(function):
    """Describe a callable, wrapper by wrapper: every patch creates new wrappers, so identity is useless."""
    chain = []
    while function is not None and len(chain) < 50:
        chain.append((getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(type(function)))))
        function = getattr(function, "__wrapped__", None)
    return tuple(chain)


def holders():
    """Describe every callable in the modules of Megatron, mcore-bridge and torch.distributed, and in their classes.

    A class is examined once, where it is defined, without inherited methods.
    """
    prefixes = ("megatron.", "mcore_bridge.", "torch.distributed", "torch.cuda", "transformer_engine", "apex")
    contents = {}
    for name, module in sys.modules.copy().items():
        if not name.startswith(prefixes):
            continue
        for attribute, value in vars(module).copy().items():
            if callable(value):
                contents[name, attribute] = layers(value)
            if isinstance(value, type) and (value.__module__ == name or name.startswith("megatron.")):
                for method, function in vars(value).copy().items():
                    function = getattr(function, "__func__", getattr(function, "fget", function))
                    if callable(function) and not isinstance(function, type):
                        contents[name, f"{attribute}.{method}"] = layers(function)
    return contents


WATCHED = (
    ("megatron.core.transformer.transformer_config", "TransformerConfig.__init__"),
    ("megatron.core.transformer.transformer_config", "TransformerConfig.__post_init__"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.load_state_dict"),
    ("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup.start_grad_sync"),
    ("megatron.core.transformer.attention", "Attention.forward"),
    ("megatron.core.transformer.attention", "SelfAttention.get_query_key_value_tensors"),
    ("megatron.core.transformer.moe.experts", "GroupedMLP.forward"),
)


def repatch_ten_times(experts):
    from megascend.engines.megatron.build import build_config
    from megascend.engines.megatron.groups import MegatronGroups
    from megascend.runtime.bootstrap import current_runtime
    from megascend.runtime.distributed.process_groups import initialize
    from megascend.runtime.topology.topology import plan

    runtime = current_runtime("a test")
    provider = runtime.provider
    single, ring = plan(Parallel(), 1), plan(Parallel(context=2), 2)
    runtime.configure_topology(ring)
    runtime.configure_topology(single)
    groups = initialize(single, runtime.platform, 30, factory=MegatronGroups())
    config = build_config(experts, single, "fp32", Recompute(), runtime.platform)
    levels = []

    def around():
        runtime.configure_topology(single)
        levels.append(provider._patched["optimization_level"])
        runtime.configure_model(config, {})  # level 2, for the experts
        levels.append(provider._patched["optimization_level"])
        runtime.configure_topology(ring)
        runtime.configure_topology(single)

    around()  # the first one imports what MindSpeed's modules for experts need
    before, count = holders(), provider.repatches
    for _ in range(4):
        around()
    after = holders()
    changed = {key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)}
    groups.destroy()
    return provider.repatches - count, changed, len(after), levels, [key for key in WATCHED if key not in after]


@pytest.mark.nightly  # covered: configurations follow each other; npu/test_contract.py: repatching
def test_ten_repatches_leave_no_trace(parity_folder):
    experts = case_checkpoint(parity_folder, "qwen3_moe")
    ((repatches, changed, compared, levels, missing),) = run_distributed(
        repatch_ten_times, 1, experts, init=False, timeout_s=120
    )
    assert repatches >= 10
    assert levels == [0, 2] * 5
    assert compared > 5000
    assert missing == []
    assert changed == {}


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


@pytest.mark.nightly_cases("ring")  # covered: all_gather; npu/test_dropout.py
@pytest.mark.parametrize(
    ("algorithm", "message"), [("all_gather", "draws another mask"), ("ring", None)], ids=["all_gather", "ring"]
)
def test_dropout_is_refused_with_all_gather_only(algorithm, message, parity_folder):
    checkpoint = case_checkpoint(parity_folder, "qwen3", attention_dropout=0.1)
    parallel = Parallel(context=2, context_algorithm=algorithm)
    for message_of_rank in run_distributed(refused, 2, checkpoint, parallel, Batching(packing=False), init=False):
        assert (message_of_rank is None) if message is None else (message in message_of_rank)
