"""Samples whose common prefixes are computed once have the gradients, losses and outputs of separate samples, on engine megatron.

Gradients are compared with transformers', which computes each sample by itself; what depends on a sample's own fields (losses,
masks, candidates, experts) is compared with the same engine without sharing. tests/engines/fsdp has the same of engine fsdp.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megascend import Parallel, Recompute, Sample
from megascend.errors import ConfigError
from megascend.models.registry import proven
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_checkpoint
from support.gradients import compare
from support.prefix_checks import (
    assert_fields_stay_their_own,
    assert_others_keep_every_bit,
    assert_tenants_share_alone,
    assert_texts_share_beside_images,
)
from support.prefix_runs import BRANCHES, GROUP, SHARED, build, on_ranks
from support.stacks import family_params, stack_marks

pytestmark = pytest.mark.usefixtures("megatron_imported")

UNSHARED = {
    **dict.fromkeys(
        ("nemotron_h", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "layers without softmax attention"
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "layers without softmax attention"),
    **dict.fromkeys(("gemma4", "gemma4_unified"), "kinds of layers with rotary embeddings of their own"),
}
"""Families whose samples share nothing on engine megatron, with the reason."""


LAYOUTS = (
    Case("single"),
    Case("full recompute", recompute=Recompute(granularity="full")),
    Case("attention recomputed", recompute=Recompute(granularity="selective")),
    Case("TP2", 2, Parallel(tensor=2)),
    Case("TP2 + SP", 2, Parallel(tensor=2, sequence=True)),
    Case("PP2, full recompute", 2, Parallel(pipeline=2), recompute=Recompute(granularity="full")),
    Case("PP2 x VPP2", 2, Parallel(pipeline=2, virtual_pipeline=2)),
    Case("DP2", 2, optimizer={"distributed": False}),
    Case("TP2 x EP2 + SP", 2, Parallel(tensor=2, expert=2, expert_tensor=1), arch="qwen3_moe"),
    Case("EP2", 2, Parallel(expert=2), optimizer={"distributed": False}, arch="qwen3_moe"),
)
CASES = [
    *(replace(case, name=f"{case.arch}: {case.name}") for case in LAYOUTS),
    *(
        Case(f"{architecture.model_type}: family", arch=architecture.model_type)
        for architecture in proven()
        if architecture.model_type not in {"qwen3", *UNSHARED}
    ),
]
IN_CI = ("qwen3: PP2, full recompute", "qwen3_moe: TP2 x EP2 + SP", "deepseek_v3: family", "gpt_oss: family")
"""Several micro batches in flight, experts and sequence parallelism; latent attention; sinks and windows."""


@pytest.mark.parametrize("case", family_params(CASES, IN_CI))
def test_gradients_equal_transformers_of_separate_samples(case: Case, parity_folder: Path) -> None:
    assert compare(case, parity_folder, BRANCHES if case.arch == "qwen3" else GROUP, batching=SHARED) == {}


def refusal(checkpoint: Path, parallel: Parallel) -> str:
    with pytest.raises(ConfigError) as caught:
        build("megatron", checkpoint, SHARED, parallel=parallel)
    return str(caught.value)


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=stack_marks(arch)) for arch in sorted(UNSHARED)])
@pytest.mark.nightly
def test_families_whose_layers_cannot_share_refuse_a_prefix_length(arch: str, parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, arch)
    (message,) = run_distributed(refusal, 1, checkpoint, Parallel(), init=False, timeout_s=120)
    assert UNSHARED[arch] in message


@pytest.mark.nightly
def test_stages_with_attention_only_do_not_share_either(parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3_next")
    messages = run_distributed(refusal, 4, checkpoint, Parallel(pipeline=4), init=False, timeout_s=180)
    # The last of its four layers, and so of its stages, is the only one with softmax attention.
    assert all(UNSHARED["qwen3_next"] in message for message in messages)


def test_fields_of_each_sample_stay_its_own(parity_folder: Path) -> None:
    assert_fields_stay_their_own(on_ranks, "megatron", case_checkpoint(parity_folder, "qwen3_moe"), experts=4)


def test_a_branch_changes_no_bit_of_the_others(parity_folder: Path) -> None:
    assert_others_keep_every_bit(on_ranks, "megatron", case_checkpoint(parity_folder, "qwen3"))


def test_tenants_share_with_themselves_only(parity_folder: Path) -> None:
    assert_tenants_share_alone(on_ranks, "megatron", case_checkpoint(parity_folder, "qwen3"))


def test_texts_share_beside_samples_with_images(parity_folder: Path) -> None:
    assert_texts_share_beside_images(on_ranks, "megatron", case_checkpoint(parity_folder, "qwen3_vl"))


def test_measurements_compute_repeated_samples_each(parity_folder: Path) -> None:
    checkpoint = case_checkpoint(parity_folder, "qwen3")
    samples = [Sample.causal(GROUP[0])] * 5

    def micro_batches() -> list[int]:
        batching = SHARED.with_budget(len(samples[0]))
        with build("megatron", checkpoint, batching) as backend:
            run, counts = backend.engine.run, []

            def counted(batches: Any, *arguments: Any, **options: Any) -> Any:
                counts.append(len(batches))
                return run(batches, *arguments, **options)

            backend.engine.run = counted
            backend.try_step(samples)
            backend.forward_backward(samples)
            return counts

    assert run_distributed(micro_batches, 1, init=False, timeout_s=120) == [[5, 1]]
