"""A head for multi-token prediction trains on the simulated device as a plain one of transformers' layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascend.config import Parallel, Recompute
from megascend.errors import DistributedTestError
from megascend.testing import run_distributed
from megascend.testing.parity import Case, first_of_equals
from support.ascend_packages import ON_ADAPTOR
from support.prediction_head import checkpoint_with_head, compare, head_backend, train_head
from support.stacks import first_stack_required

pytestmark = [pytest.mark.usefixtures("npu"), pytest.mark.slow, first_stack_required]
PADDED = {"packing": False, "micro_batch_tokens": 200}
CASES = {
    "single": Case("single"),
    "full recompute": Case("full recompute", recompute=Recompute(granularity="full")),
    "CP2": Case("CP2", 2, Parallel(context=2), **PADDED),
    "PP2": Case("PP2", 2, Parallel(pipeline=2)),
    "TP2 x EP2 + SP": Case("TP2 x EP2 + SP", 2, Parallel(tensor=2, expert=2, expert_tensor=1)),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "single" else pytest.mark.nightly) for name in CASES]
)
def test_head_trains_like_a_plain_one(layout: str, parity_folder: Path, tmp_path: Path) -> None:
    case, checkpoint = CASES[layout], checkpoint_with_head(parity_folder, "glm4_moe")
    ranks = run_distributed(train_head, case.world_size, case, checkpoint, tmp_path, init=False, timeout_s=120)
    compare(first_of_equals(layout, ranks), parity_folder, checkpoint)


LATENT = pytest.mark.parametrize("arch", ["deepseek_v3", "glm4_moe_lite"])

if ON_ADAPTOR:

    @LATENT
    def test_head_over_latent_attention_trains_like_a_plain_one(arch: str, parity_folder: Path, tmp_path: Path) -> None:
        case, checkpoint = CASES["single"], checkpoint_with_head(parity_folder, arch)
        ranks = run_distributed(train_head, 1, case, checkpoint, tmp_path, init=False, timeout_s=120)
        compare(first_of_equals(arch, ranks), parity_folder, checkpoint)

else:

    @LATENT
    def test_latent_attention_is_refused(arch: str, parity_folder: Path) -> None:
        with pytest.raises(DistributedTestError, match="ConfigError: multi_latent_attention: true with MindSpeed"):
            run_distributed(head_backend, 1, Case("single"), checkpoint_with_head(parity_folder, arch), init=False)
