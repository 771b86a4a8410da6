"""Every layout's losses and gradient norms equal those of Hugging Face + torch AdamW."""

import pytest

from megascend.testing.parity import Case, case_checkpoint, differences, matrix, oracle, token_lists, train_case

LOGITS_BOUND = 1e-5
pytestmark = pytest.mark.usefixtures("megatron_imported")


@pytest.mark.parametrize("case", matrix(), ids=lambda case: case.name)
def test_trajectory_equals_hugging_face(case: Case, parity_folder):
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)
    tokens = token_lists()
    found = differences(
        train_case(case, checkpoint, tokens), oracle(parity_folder, checkpoint, tokens, aux_loss=case.aux_loss)
    )
    assert found.loss <= case.loss_bound, found
    assert found.grad_norm <= case.norm_bound, found
    if case.precision == "fp32" and found.logits is not None:
        assert found.logits <= LOGITS_BOUND, found
