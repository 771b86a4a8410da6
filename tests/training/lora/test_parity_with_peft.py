"""One adapter: losses, gradient norms, trained factors and logits equal those of Hugging Face + peft in every layout."""

import pytest

from megascend.testing.parity import Case, case_checkpoint, token_lists
from support.lora_parity import (
    adapter_differences,
    case_adapter,
    lora_matrix,
    peft_reference,
    train_adapter,
)

LOGITS_BOUND, FACTORS_BOUND = 2e-5, 1e-3
# Every way in which a layer's factors are divided, exchanged or recomputed; scripts/parity.py --lora runs the full matrix.
IN_SHORT = (
    "single",
    "TP2",
    "TP2 + SP",
    "TP2 + SP, padded",
    "PP2 x VPP2",
    "CP2 packed",
    "CP2, full recompute",
    "TP2 x PP2",
    "MoE single",
    "MoE TP2 + SP (ETP2)",
    "MoE EP2",
    "MoE TP2 x EP2 + SP",
    "MoE TP2 x EP2, ETP2",
    "MoE, full recompute",
    "bf16",
    "fp16",
    "embedding and head, single",
    "embedding and head, TP2 + SP",
    "embedding and head, TP2, odd vocabulary",
    "embedding and head, PP2",
    "embedding and head, DP2, distributed optimizer",
    "embedding and head, CP2 packed",
)
CASES = [case for case in lora_matrix() if case.name in IN_SHORT]
pytestmark = pytest.mark.usefixtures("megatron_imported")


@pytest.mark.core_cases("TP2 + SP, padded")
@pytest.mark.nightly_cases(
    "TP2 + SP",  # covered: TP2 + SP, padded
    "CP2 packed",  # covered: embedding and head, CP2 packed
    "TP2 x PP2",  # covered: TP2 + SP, padded; PP2 x VPP2
    "MoE TP2 + SP (ETP2)",  # covered: MoE TP2 x EP2, ETP2
    "MoE TP2 x EP2 + SP",  # covered: MoE TP2 x EP2, ETP2; npu/test_lora.py
    "MoE, full recompute",  # covered: CP2, full recompute; MoE TP2 x EP2, ETP2
    "embedding and head, PP2",  # covered: embedding and head: TP2, DP2, CP2
    "TP2",  # covered, as those below: what they have another case has, too, or npu/test_lora.py
    "MoE single",
    "MoE EP2",
    "embedding and head, single",
    "embedding and head, TP2 + SP",
    "bf16",
)
@pytest.mark.difference_cases("TP2 + SP")  # differs: layers on which adapters act
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trajectory_equals_peft(case: Case, parity_folder, tmp_path):
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)
    adapter = case_adapter(checkpoint, case)
    run = train_adapter(case, checkpoint, adapter, tmp_path / "trained")
    difference = adapter_differences(run, peft_reference(parity_folder, checkpoint, adapter, token_lists()))
    assert difference.loss <= case.loss_bound, difference
    assert difference.grad_norm <= case.norm_bound, difference
    if case.precision == "fp32":
        assert difference.factors <= FACTORS_BOUND, difference
        assert difference.logits is None or difference.logits <= LOGITS_BOUND, difference
