"""Training with MegatronAdaptor's stand-ins: the operators that are called, repatching, arguments, packed context parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascend.config import Parallel
from megascend.errors import DistributedTestError
from megascend.testing import run_distributed
from megascend.testing.parity import (
    Case,
    case_checkpoint,
    causal_samples,
    differences,
    hf_reference,
    token_lists,
    train_case,
)
from simnpu import call_log
from support.ascend_packages import WITHOUT_EXPERTS
from support.model_checks import assert_within

pytestmark = [pytest.mark.usefixtures("npu"), pytest.mark.slow]


def one_step(checkpoint: Path, packing: bool) -> dict[str, Any]:
    """Train a step, configure the process again, and return what was called and set."""
    from megascend.backends import MegatronBackend
    from megascend.config import Batching

    with call_log.recording() as calls:
        backend = MegatronBackend(
            *(checkpoint, Parallel(), "fp32"), batching=Batching(packing=packing), platform="npu", timeout_s=60
        )
        backend.forward_backward(backend.shard(causal_samples(token_lists())))
        backend.optimizer_step()
    engine: Any = backend.engine
    runtime, config = engine.runtime, engine.config
    provider = runtime.provider
    count = provider.repatches
    for _ in range(3):
        runtime.configure_topology(backend.topology)
        runtime.configure_model(config, {})
    from megatron_adaptor.utils.args_utils import get_mindspeed_args

    attention = [call for call in calls if call.name == "npu_fusion_attention"]
    report = {
        "operators": sorted({call.name for call in calls}),
        "attention": sorted({(call.arguments["input_layout"], call.arguments["sparse_mode"]) for call in attention}),
        "repatches": (count, provider.repatches),
        "arguments": vars(get_mindspeed_args()),
        "config": {name: getattr(config, name, "absent") for name in provider._defaults},
    }
    backend.close()
    return report


@pytest.mark.difference  # differs: provider megatron_adaptor: operators, defaults, repatching
@pytest.mark.parametrize(("packing", "layout"), [(True, "TND"), (False, "SBH")])
def test_fused_operators_are_called_and_arguments_follow_the_model(
    packing: bool, layout: str, parity_folder: Path
) -> None:
    (report,) = run_distributed(one_step, 1, case_checkpoint(parity_folder, "qwen3"), packing, init=False)
    assert {"npu_fusion_attention", "npu_rms_norm"} <= set(report["operators"])
    assert report["attention"] == [(layout, 2)]
    # megatron.training is part of megatron-core from 0.17 on: patched once for the model, and not again without a change.
    assert report["repatches"] == (1, 1)
    assert report["arguments"]["use_flash_attn"] is True
    assert "absent" not in report["config"].values()
    shared = report["config"].keys() & report["arguments"].keys()  # MindSpeed, where it is, has arguments of its own
    assert {"transformer_impl", "use_flash_attn", "fp8"} <= shared
    assert all(report["config"][name] == report["arguments"][name] for name in shared)


@pytest.mark.difference_cases("ring")  # differs: packing with context parallelism on NPUs
@pytest.mark.parametrize("algorithm", ["ring", "all_gather"])
def test_packed_samples_over_context_ranks_equal_hugging_face(algorithm: str, parity_folder: Path) -> None:
    case = Case(f"CP2 packed, {algorithm}", 2, Parallel(context=2, context_algorithm=algorithm))
    checkpoint, tokens = case_checkpoint(parity_folder, case.arch), token_lists()
    deviation = differences(train_case(case, checkpoint, tokens), hf_reference(parity_folder, checkpoint, tokens))
    assert_within(deviation, loss=case.loss_bound, grad_norm=case.norm_bound)


@pytest.mark.nightly
def test_padded_samples_by_all_to_all_equal_hugging_face(parity_folder: Path) -> None:
    parallel = Parallel(context=2, context_algorithm="ulysses")
    case = Case("CP2, ulysses", 2, parallel, packing=False, micro_batch_tokens=200)
    checkpoint, tokens = case_checkpoint(parity_folder, case.arch), token_lists()
    deviation = differences(train_case(case, checkpoint, tokens), hf_reference(parity_folder, checkpoint, tokens))
    assert_within(deviation, loss=case.loss_bound, grad_norm=case.norm_bound)


def build(checkpoint: Path, options: dict[str, Any]) -> None:
    from megascend.backends import MegatronBackend

    MegatronBackend(checkpoint, Parallel(), "fp32", platform="npu", timeout_s=60, provider_options=options)


def test_options_and_dropout_are_refused_by_name(parity_folder: Path) -> None:
    with pytest.raises(
        DistributedTestError, match="provider_options: fp8 set, but none of MegatronAdaptor's arguments"
    ):
        run_distributed(build, 1, case_checkpoint(parity_folder, "qwen3"), {"fp8": "e4m3"}, init=False)
    checkpoint = case_checkpoint(parity_folder, "qwen3", attention_dropout=0.1)
    with pytest.raises(DistributedTestError, match=r"attention_dropout: 0\.1 with TransformerEngineNPU"):
        run_distributed(build, 1, checkpoint, {}, init=False)


if WITHOUT_EXPERTS:

    def test_models_with_experts_are_refused_in_mindspeeds_words(parity_folder: Path) -> None:
        message = "ConfigError: .*a package that patches Megatron-Core refuses this model: MindSpeed --moe-grouped-gemm"
        with pytest.raises(DistributedTestError, match=message):
            run_distributed(build, 1, case_checkpoint(parity_folder, "qwen3_moe"), {}, init=False)
