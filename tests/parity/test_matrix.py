"""Every layout's losses and gradient norms equal those of Hugging Face + torch AdamW."""

import pytest

from megascend.testing.parity import Case, case_checkpoint, differences, hf_reference, token_lists, train_case
from support.parity_matrix import matrix

IN_CI = (
    "Llama",
    "Qwen2 tied",
    "TP2 + SP, padded",
    "odd vocabulary",
    "DP2, plain optimizer",
    "saved and loaded",
    "full recompute",
    "selective recompute",
    "CP2 x DP2, overlapped",
    "TP2 x PP2 x VPP2 + SP",
    "TP2 x CP2 + SP",
    "MoE, auxiliary loss",
    "MoE CP2 x EP2",
    "MoE TP2 x EP2, ETP2",
    "bf16",
    "fp16",
)
"""Every setting of the matrix at least once, and layouts that combine in one code path. The other cases are nightly.

Covered elsewhere on every commit: tied embeddings over tensor and pipeline ranks by every gradient (models/test_gradients.py),
more stages by virtual ones, and experts in stages by their auxiliary loss (engines/megatron/test_routers.py) and their exports
(test_named_weights.py there).
"""
CASES = [case if case.name in IN_CI else pytest.param(case, marks=pytest.mark.nightly) for case in matrix()]
pytestmark = pytest.mark.usefixtures("megatron_imported")


def test_full_recompute_is_exact(parity_folder):
    cases = {case.name: case for case in matrix() if case.name in ("single", "full recompute")}
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    runs = {name: train_case(case, checkpoint, token_lists()) for name, case in cases.items()}
    assert runs["single"].losses == runs["full recompute"].losses
    assert runs["single"].grad_norms == runs["full recompute"].grad_norms


@pytest.mark.core_cases("TP2 x PP2 x VPP2 + SP", "MoE TP2 x EP2, ETP2")
@pytest.mark.difference_cases(
    "saved and loaded",  # differs: checkpoints of the stack itself
    "selective recompute",  # differs: recomputed core attention
    "TP2 x PP2 x VPP2 + SP",  # differs: schedule of virtual stages, names of the norms' sizes
    "fp16",  # differs: main parameters, loss scale
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trajectory_equals_hugging_face(case: Case, parity_folder):
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)
    tokens = token_lists()
    difference = differences(
        train_case(case, checkpoint, tokens),
        hf_reference(parity_folder, checkpoint, tokens, aux_loss=case.aux_loss, aux_formula=case.aux_formula),
    )
    assert difference.loss <= case.loss_bound, difference
    assert difference.grad_norm <= case.norm_bound, difference
    if case.precision == "fp32" and difference.logits is not None:
        assert difference.logits <= case.logits_bound, difference
