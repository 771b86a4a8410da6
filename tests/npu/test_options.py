"""MindSpeed's options that megascend supports: each has an effect, and results equal Hugging Face's."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from megascend.config import Batching, Parallel
from megascend.testing import run_distributed
from megascend.testing.parity import (
    Case,
    TrainingCurve,
    case_checkpoint,
    causal_samples,
    differences,
    hf_reference,
    token_lists,
)
from support.model_checks import assert_within
from support.parity_matrix import matrix

pytestmark = pytest.mark.usefixtures("npu")
REAL = pytest.mark.skipif(
    not os.environ.get("MEGASCEND_MINDSPEED"), reason="the double has no optional features; name a real checkout"
)
STEPS = 3
LOGITS_BOUND = 1e-5
CASES = {case.name: case for case in matrix("npu")}


@dataclass(frozen=True)
class Run:
    """Results of a rank: trajectory, call counts of attention layouts and of all operators."""

    trajectory: TrainingCurve
    layouts: Counter[str]
    operators: Counter[str]


def train(case: Case, checkpoint, options: dict[str, Any]) -> Run:
    def on_rank() -> Run:
        from megascend.backends import MegatronBackend
        from simnpu import call_log

        with call_log.recording() as calls:
            backend = MegatronBackend(
                checkpoint,
                parallel=case.parallel,
                precision=case.precision,
                optimizer=case.adam,
                batching=Batching(packing=case.packing, micro_batch_tokens=case.micro_batch_tokens),
                provider_options=options,
                platform="npu",
                timeout_s=60,
            )
            samples = causal_samples(token_lists())
            logits = backend.forward(samples, logits=True).logits
            losses, norms = [], []
            for _ in range(STEPS):
                losses.append(backend.forward_backward(samples).loss)
                norms.append(backend.optimizer_step().grad_norm)
        backend.close()
        return Run(
            TrainingCurve(losses, norms, logits),
            Counter(str(call.arguments["input_layout"]) for call in calls if call.name == "npu_fusion_attention"),
            Counter(call.name for call in calls),
        )

    return run_distributed(on_rank, case.world_size, init=False, timeout_s=120)[0]


def fused_update(plain: Run, with_option: Run) -> None:
    assert plain.operators["npu_ring_attention_update"] == 0
    assert with_option.operators["npu_ring_attention_update"] > 0


def heads_first(plain: Run, with_option: Run) -> None:
    assert set(plain.layouts) == {"SBH"}
    assert set(with_option.layouts) == {"BNSD"}


EFFECTS = {
    ("use_fused_ring_attention_update", True): ("CP2, ring", fused_update),
    ("megatron_cp_in_bnsd", True): ("CP2, ring", heads_first),
}


@REAL
@pytest.mark.parametrize(("name", "value"), EFFECTS)
def test_supported_option_has_an_effect_and_equal_results(name, value, parity_folder):
    case, effect = CASES[EFFECTS[name, value][0]], EFFECTS[name, value][1]
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)
    plain, with_option = train(case, checkpoint, {}), train(case, checkpoint, {name: value})
    effect(plain, with_option)
    deviation = differences(with_option.trajectory, hf_reference(parity_folder, checkpoint, token_lists(), steps=STEPS))
    assert_within(deviation, loss=case.loss_bound, grad_norm=case.norm_bound, logits=LOGITS_BOUND)


def refusal(checkpoint, options: dict[str, Any], parallel: Parallel) -> str | None:
    from megascend.backends import MegatronBackend
    from megascend.errors import ConfigError

    batching = Batching(packing=parallel.context == 1)
    try:
        MegatronBackend(
            checkpoint, parallel, "fp32", provider_options=options, platform="npu", batching=batching, timeout_s=60
        ).close()
    except ConfigError as error:
        return str(error)
    return None


def test_ring_option_is_refused_with_all_gather(parity_folder):
    parallel = Parallel(context=2, context_algorithm="all_gather")
    options = {"use_fused_ring_attention_update": True}
    for message in run_distributed(refusal, 2, case_checkpoint(parity_folder, "qwen3"), options, parallel, init=False):
        assert "parallel.context_algorithm: ring only" in message
