"""Many adapters in mixed batches: each ends as in separate training."""

import pytest

from megascend.testing.distributed import run_distributed
from megascend.testing.parity import STEPS, Case, case_checkpoint
from support.lora_parity import ISOLATED_EMBEDDING_AND_HEAD, differences_from_alone, isolation_cases

VALUE, MOVEMENT = 1e-6, 5e-5
NIGHTLY = dict.fromkeys(("single", "TP2", "DP2"), pytest.mark.nightly)
"""``TP2 + SP`` covers TP2; the others divide nothing that an adapter has."""
pytestmark = pytest.mark.usefixtures("megatron_imported")


@pytest.mark.nightly_cases(
    "TP2 + SP-4",  # covered: embedding and head on TP2 + SP
    "CP2-4",  # covered: embedding and head on TP2 + SP, experts on EP2, PP2
)
@pytest.mark.parametrize(
    ("case", "tenants"),
    [
        *(pytest.param(case, 4, marks=NIGHTLY.get(case.name, ())) for case in isolation_cases()),
        *(pytest.param(case, n, marks=pytest.mark.nightly) for case in isolation_cases() for n in (2, 8)),
        (ISOLATED_EMBEDDING_AND_HEAD, 4),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_mixed_training_equals_separate_training(case: Case, tenants, parity_folder):
    checkpoint = case_checkpoint(parity_folder, case.arch)
    differences = run_distributed(
        differences_from_alone, case.world_size, case, checkpoint, tenants, STEPS, init=False, timeout_s=200
    )
    print(*differences, sep="\n")
    assert max(difference.value for difference in differences) <= VALUE, differences
    assert max(difference.movement for difference in differences) <= MOVEMENT, differences
