"""Adapters on the simulated device, one or two in a batch, equal Hugging Face + peft."""

import os

import pytest

from megascend.testing.distributed import run_distributed
from megascend.testing.parity import STEPS, Case, case_checkpoint
from support.ascend_packages import WITHOUT_EXPERTS
from support.lora_parity import (
    adapter_differences,
    case_adapter,
    lora_matrix,
    peft_reference,
    run_mixed,
    share_of,
)
from support.model_checks import assert_within

LOGITS_BOUND, FACTORS_BOUND = 2e-5, 1e-3
pytestmark = [pytest.mark.usefixtures("npu"), pytest.mark.slow]

# Cases that CI runs with the double; more run with the real MindSpeed.
IN_SHORT = ("single", "TP2 + SP", "embedding and head, TP2 + SP")
WITH_MINDSPEED = (
    *IN_SHORT,
    "TP2",
    "PP2",
    "DP2",
    "CP2, ring",
    "CP2, all_gather",
    "full recompute",
    "MoE single",
    "MoE EP2",
    "MoE TP2 x EP2 + SP",
    "embedding and head, single",
    "embedding and head, PP2",
    "embedding and head, CP2, ring",
)
DP2 = Case("DP2", 2)
CASES = [
    case
    for case in [*lora_matrix("npu"), DP2]
    if case.name in (WITH_MINDSPEED if os.environ.get("MEGASCEND_MINDSPEED") else IN_SHORT)
    and not (WITHOUT_EXPERTS and case.arch == "qwen3_moe")
]


def test_bf16_products_use_the_grouped_kernel():
    import torch

    from megascend.training.lora.grouped import Segments, accumulate, product
    from simnpu import call_log

    generator = torch.Generator().manual_seed(0)
    counts = [5, 0, 11, 8]
    rows = torch.randn(24, 32, generator=generator).bfloat16()
    weights = torch.randn(4, 32, 16, generator=generator).bfloat16()
    grads = torch.randn(24, 16, generator=generator).bfloat16()
    segments = Segments.of(counts, torch.device("npu"))
    target = torch.zeros(4, 32, 16).npu()
    with call_log.recording() as calls:
        out = product(rows.npu(), weights.npu(), segments).cpu()
        accumulate(target, rows.npu(), grads.npu(), segments)
    assert [call.name for call in calls] == ["npu_grouped_matmul", "npu_grouped_matmul"]
    start = 0
    for group, count in enumerate(counts):
        run = slice(start, start + count)
        expected = rows[run].double() @ weights[group].double()
        assert torch.allclose(out[run].double(), expected, rtol=1e-2, atol=1e-2)
        gradient = rows[run].double().T @ grads[run].double()
        assert torch.allclose(target[group].cpu().double(), gradient, rtol=1e-2, atol=5e-2)
        start += count


def check(case, trajectory, reference):
    deviation = adapter_differences(trajectory, reference)
    assert_within(deviation, loss=case.loss_bound, grad_norm=case.norm_bound, factors=FACTORS_BOUND)
    assert deviation.logits is None or deviation.logits <= LOGITS_BOUND, deviation


def only(name):
    """Return the cases, all but one of them nightly."""
    return [
        pytest.param(case, marks=[] if case.name == name else [pytest.mark.nightly], id=case.name) for case in CASES
    ]


@pytest.mark.parametrize("case", only("embedding and head, TP2 + SP"))
def test_two_adapters_in_one_batch_equal_two_peft_runs(case: Case, parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)
    adapters = [case_adapter(checkpoint, case, seed) for seed in (7, 8)]
    ranks = run_distributed(
        run_mixed, case.world_size, case, checkpoint, adapters, STEPS, tmp_path, init=False, timeout_s=120
    )
    for number, adapter in enumerate(adapters):
        check(case, ranks[0][number], peft_reference(parity_folder, checkpoint, adapter, share_of(number, 2)))
