"""Every layout's losses and gradient norms equal those of Hugging Face + torch AdamW."""

import pytest

from megascend.testing.parity import Case, case_checkpoint, differences, hf_reference, token_lists, train_case
from support.covering import chosen, first_stack_only
from support.parity_matrix import matrix

pytestmark = pytest.mark.usefixtures("megatron_imported")


@first_stack_only
def test_full_recompute_is_exact(parity_folder):
    cases = {case.name: case for case in matrix() if case.name in ("single", "full recompute")}
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    runs = {name: train_case(case, checkpoint, token_lists()) for name, case in cases.items()}
    assert runs["single"].losses == runs["full recompute"].losses
    assert runs["single"].grad_norms == runs["full recompute"].grad_norms


@pytest.mark.parametrize("case", chosen(matrix()), ids=lambda case: case.name)
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
