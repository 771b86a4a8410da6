"""Two adapters in every batch, in every declared architecture: each trains as peft trains it alone on its own samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascend.models import architecture_named, expert_count
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_checkpoint
from support.lora_parity import adapter_differences, case_adapter, peft_reference, run_mixed, share_of
from support.model_checks import assert_within
from support.parity_matrix import family_matrix
from support.stacks import family_params

pytestmark = pytest.mark.usefixtures("megatron_imported")

STEPS = 3
SEEDS = {"deepseek_v32": (8, 9)}
"""Of adapters, in place of 7 and 8: with 7, peft's losses in fp32 differ by 2e-5 from those in fp64, by a choice of tokens."""
GRADIENTS_BOUND = 1e-4
"""Of any factor's gradient, relative."""
IN_CI = ("glm4_moe_lite: TP2 x EP2 + SP", "gpt_oss: EP2")
"""Latent attention, shared and divided experts; interleaved experts with biases, sinks."""
LAYOUTS = ("single", "TP2 + SP", "EP2", "TP2 x EP2 + SP")
"""The layouts that divide a layer, and with it an adapter; pipelines and data parallelism divide neither."""
CASES = [case for case in family_matrix() if case.name.partition(": ")[2] in LAYOUTS]


@pytest.mark.parametrize("case", family_params(CASES, IN_CI))
def test_tenants_of_a_batch_equal_peft_on_each_alone(case: Case, parity_folder: Path, tmp_path: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, case.arch)
    adapters = [case_adapter(checkpoint, Case("single", arch=case.arch), seed) for seed in SEEDS.get(case.arch, (7, 8))]
    arguments = (case, checkpoint, adapters, STEPS, tmp_path)
    ranks = run_distributed(run_mixed, case.world_size, *arguments, init=False, timeout_s=120)
    for number, adapter in enumerate(adapters):
        trajectory = ranks[0][number]
        assert all(rank[number].losses == trajectory.losses for rank in ranks)
        assert all(rank[number].grad_norms == trajectory.grad_norms for rank in ranks)
        fixed = architecture_named(case.arch).without_adapters
        if expert_count(architecture_named(case.arch).tiny) and ".experts.down_proj" not in fixed:
            assert any(".experts." in name for name in trajectory.factors)
        tokens = share_of(number, len(adapters))
        difference = adapter_differences(
            trajectory, peft_reference(parity_folder, checkpoint, adapter, tokens, steps=STEPS)
        )
        assert_within(difference, loss=1e-5, grad_norm=1e-4, gradients=GRADIENTS_BOUND, factors=5e-3)
