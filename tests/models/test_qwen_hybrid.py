"""Linear attention on the Megatron engine: short and long samples of a micro batch, layouts and settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from megascend import Parallel, Recompute, Sample
from megascend.errors import DistributedTestError
from megascend.models.base import LinearAttention
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.models.registry import architecture_named
from megascend.testing import parity, run_distributed, tiny_config
from megascend.testing.parity import (
    Case,
    case_backend,
    case_checkpoint,
    differences,
    hf_reference,
    relative_differences,
    train_case,
)
from support.model_checks import assert_within
from support.stacks import MEGATRON_CORE, first_stack_required

pytestmark = [pytest.mark.usefixtures("megatron_imported"), first_stack_required]

DENSE = "qwen3_5_text"
LINEAR, SOFTMAX = "linear_attention", "full_attention"
UNEVEN = {
    "num_hidden_layers": 8,
    "layer_types": [LINEAR, LINEAR, LINEAR, LINEAR, SOFTMAX, LINEAR, LINEAR, SOFTMAX],
}
"""The first half of the layers has no softmax attention."""
HEADS = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 24,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 3,
}
"""Three value heads for a key head, wider than it, where tiny models have two of equal width."""
TP2 = Parallel(tensor=2, sequence=False)
FULL = Recompute(granularity="full")
SHORT_AND_LONG = (1, 2, 3, 64, 65, 130, 5, 63, 1, 128)
"""Shorter than the convolution, at the ends of the delta rule's chunks, and longer than two of them."""
SHORT_CASES = (
    Case("single", arch=DENSE),
    Case("padded", arch=DENSE, packing=False, micro_batch_tokens=400),
    Case("TP2", 2, TP2, arch=DENSE),
    Case("TP2, recomputed, padded", 2, TP2, arch=DENSE, packing=False, micro_batch_tokens=400, recompute=FULL),
    Case("TP2 + SP, other heads", 2, Parallel(tensor=2), arch=DENSE, overrides=HEADS),
    Case("PP2, a stage without softmax attention", 2, Parallel(pipeline=2), arch=DENSE, overrides=UNEVEN),
    Case("PP2 x VPP2", 2, Parallel(pipeline=2, virtual_pipeline=2), arch=DENSE, overrides=UNEVEN),
    Case("last layers linear", arch=DENSE, overrides={"layer_types": [SOFTMAX, SOFTMAX, LINEAR, LINEAR]}),
    Case("no linear layer", arch=DENSE, overrides={"layer_types": [SOFTMAX] * 4}),
    Case("experts, other heads", arch="qwen3_next", overrides=HEADS),
    Case("experts, TP2 x EP2", 2, Parallel(tensor=2, expert=2, expert_tensor=1), arch="qwen3_5_moe_text"),
)
SHORT_IN_CI = (
    "TP2 + SP, other heads",
    "PP2, a stage without softmax attention",
    "no linear layer",
    "experts, other heads",
)


@pytest.mark.parametrize(
    "case",
    [case if case.name in SHORT_IN_CI else pytest.param(case, marks=pytest.mark.nightly) for case in SHORT_CASES],
    ids=lambda case: case.name,
)
def test_short_and_long_samples_train_like_each_alone(case: Case, parity_folder: Path) -> None:
    case = replace(case, micro_batch_tokens=max(case.micro_batch_tokens, 140))
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(3, 300, (length + 1,), generator=generator).tolist() for length in SHORT_AND_LONG]
    fields = [{"weights": [1.0] * (len(ids) - 1)} for ids in tokens]
    samples = [Sample(ids[:-1], ids[1:], weights=[1.0] * (len(ids) - 1)) for ids in tokens]
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)
    trained = train_case(case, checkpoint, tokens, 2, weights=True, prepared=samples)
    reference = hf_reference(parity_folder, checkpoint, tokens, 2, weights=True, fields=fields)
    difference, relative = differences(trained, reference), relative_differences(trained, reference)
    assert abs(trained.losses[0] - reference.losses[0]) <= 1e-5, difference
    # Adam amplifies rounding, which depends on the processor: 1.07e-5 on an AMD EPYC, below 1e-5 on others.
    assert_within(difference, loss=1.5e-5, grad_norm=1e-4, logits=3e-5)
    assert relative.weights is not None
    assert relative.weights <= 1e-3, relative


@pytest.mark.parametrize(
    ("parallel", "ranks", "message"),
    [
        pytest.param(
            Parallel(context=2),
            2,
            r"parallel\.context=2: Megatron-Core divides its linear attention from 0\.18 on",
            marks=pytest.mark.skipif(Version("0.18") <= MEGATRON_CORE, reason="megatron-core 0.18 exchanges heads"),
        ),
        (Parallel(tensor=4), 4, r"parallel\.tensor: 4 with parallel\.context=1 and 2 key heads of linear attention"),
    ],
    ids=["CP2", "TP4"],
)
def test_layouts_that_cannot_divide_linear_attention_are_refused(
    parallel: Parallel, ranks: int, message: str, parity_folder: Path
) -> None:
    case = Case("refused", ranks, parallel, arch=DENSE, overrides={"num_key_value_heads": 4})
    checkpoint = case_checkpoint(parity_folder, DENSE, **case.overrides)
    with pytest.raises(DistributedTestError, match=rf"TopologyError: {DENSE}: {message}"):
        run_distributed(case_backend, ranks, case, checkpoint, init=False, timeout_s=120)


CONTEXT: dict[str, Any] = {"arch": DENSE, "overrides": {"linear_num_key_heads": 4, "linear_num_value_heads": 8}}


@pytest.mark.skipif(Version("0.18") > MEGATRON_CORE, reason="context parallelism of it needs megatron-core 0.18")
@pytest.mark.parametrize(
    "case",
    [
        Case("CP2, padded", 2, Parallel(context=2), packing=False, micro_batch_tokens=200, **CONTEXT),
        Case("CP2, full recompute", 2, Parallel(context=2), recompute=Recompute(granularity="full"), **CONTEXT),
        Case("TP2 x CP2", 4, Parallel(tensor=2, context=2), **CONTEXT),
        # differs: linear attention that exchanges heads (context_core)
        pytest.param(
            Case("TP2 x CP2 + SP", 4, Parallel(tensor=2, context=2, sequence=True), **CONTEXT),
            marks=pytest.mark.difference,
        ),
    ],
    ids=lambda case: case.name,
)
def test_context_parallel_training_equals_transformers(case: Case, parity_folder: Path) -> None:
    checkpoint, tokens = case_checkpoint(parity_folder, case.arch, **case.overrides), parity.token_lists()
    difference = differences(
        train_case(case, checkpoint, tokens, steps=3), hf_reference(parity_folder, checkpoint, tokens, steps=3)
    )
    assert_within(difference, loss=1e-5, grad_norm=1e-4, logits=2e-5)


def test_layers_are_read_from_either_spelling() -> None:
    config = tiny_config("qwen3_next")
    older = {name: value for name, value in config.items() if name != "layer_types"} | {"full_attention_interval": 4}
    sizes = LinearAttention.from_config(config)
    assert sizes == LinearAttention.from_config(older) == LinearAttention((True, True, True, False), 2, 4, 16, 16, 4)
    family = architecture_named("qwen3_next")
    assert family.megatron_settings(config)["linear_attention_freq"] == "[1,1,1,0]"
    assert family.megatron_settings(older) == family.megatron_settings(config)


def test_flops_count_states_and_softmax_layers(parity_folder: Path) -> None:
    info = inspect_checkpoint(case_checkpoint(parity_folder, DENSE))
    hidden, ffn, vocabulary = 64, 128, 320
    keys, values, heads, key, value = 2 * 16, 4 * 16, 4, 16, 16
    linear = hidden * (2 * keys + 2 * values + 2 * heads) + 4 * (2 * keys + values) + values * hidden
    softmax = hidden * (2 * 64 + 2 * 32) + 64 * hidden
    matrices = 3 * linear + softmax + 4 * 3 * hidden * ffn + hidden * vocabulary
    states, scores = 3 * heads * key * value, 64 * 100
    assert info.flops_per_token(100) == 6 * matrices + 18 * states + 6 * scores
