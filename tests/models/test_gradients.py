"""Every parameter's gradient in every layout, and their norm, against transformers' gradients.

A norm hides what cancels, and trained weights hide factors that Adam divides by: here the gradient of every parameter is
compared, after its reduction over ranks, by its name in the checkpoint. A parameter that is replicated over tensor parallel ranks
and whose gradient is a rank's part (norms, routers and latent projections under sequence parallelism) shows here, and one that
the norm counts twice or not at all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megascend import Parallel, Recompute
from megascend.models import expert_count, text_config
from megascend.models.registry import proven
from megascend.testing.parity import Case
from megascend.testing.tiny_models import tiny_config
from support.gradients import compare, compare_adapter, errors_in_bf16
from support.lora_parity import ALL
from support.stacks import family_params, stack_marks

pytestmark = pytest.mark.usefixtures("megatron_imported")

PLAIN: dict[str, Any] = {"optimizer": {"distributed": False}}
"""The distributed optimizer leaves each data parallel rank a part of the reduced gradients."""
LAYOUTS = (
    Case("single"),
    Case("TP2", 2, Parallel(tensor=2)),
    Case("TP2 + SP", 2, Parallel(tensor=2, sequence=True)),
    Case("PP2", 2, Parallel(pipeline=2)),
    Case("CP2", 2, Parallel(context=2), **PLAIN),
    Case("DP2", 2, **PLAIN),
    Case(
        "TP2 x DP2 + SP, overlapped",
        4,
        Parallel(tensor=2, sequence=True),
        optimizer={"distributed": False, "overlap_grad_reduce": True},
    ),
)
EXPERT_LAYOUTS = (
    Case("EP2", 2, Parallel(expert=2), **PLAIN),
    Case("TP2 x EP2 + SP", 2, Parallel(tensor=2, expert=2, expert_tensor=1)),
    Case(
        "TP2 x EP2 + SP, full recompute",
        2,
        Parallel(tensor=2, expert=2, expert_tensor=1),
        recompute=Recompute(granularity="full"),
    ),
    Case("TP2 x EP2 + SP, ETP2", 4, Parallel(tensor=2, expert=2, expert_tensor=2), **PLAIN),
)
TIED = {"tie_word_embeddings": True}
TIED_LAYOUTS = (
    Case("PP2 tied", 2, Parallel(pipeline=2), overrides=TIED),
    Case("PP2 x VPP2 tied", 2, Parallel(pipeline=2, virtual_pipeline=2), overrides=TIED),
    Case("TP2 x PP2 + SP tied", 4, Parallel(tensor=2, pipeline=2, sequence=True), overrides=TIED),
)
ADAPTER_LAYOUTS = ("TP2 + SP", "TP2 x EP2 + SP", "EP2", "PP2", "CP2")
ADAPTERS_IN_CI = ("deepseek_v3: TP2 x EP2 + SP",)
"""Adapters of projections that are replicated over tensor parallel ranks, and of ones that are not."""
ADAPTER_SEED = {"ernie4_5_moe": 8, "nemotron_h": 8}
"""With the usual adapter, two experts of a token are closer than rounding, and peft chooses the other one."""
IN_CI = ("deepseek_v3: TP2 x EP2 + SP", "gpt_oss: TP2 x EP2 + SP", "qwen3: TP2 x PP2 + SP tied")
"""Latent attention, shared experts and a router; sinks and biases of experts; norms of heads, and tied embeddings."""


def cases() -> list[Case]:
    selected = []
    for architecture in proven():
        has_experts = expert_count(architecture.tiny) > 0
        for case in LAYOUTS + (EXPERT_LAYOUTS if has_experts else ()) + TIED_LAYOUTS:
            if has_experts and case.parallel.tensor > 1 and case.parallel.sequence is None and case.name == "TP2":
                continue  # sequence parallelism is the default with experts
            divided = case.parallel.tensor > 1 and case.parallel.expert_tensor != 1
            if has_experts and divided and architecture.biases == "all":
                continue  # Megatron-Core does not divide experts that have biases
            if architecture.unsupported_layout(
                architecture.tiny, tensor=case.parallel.tensor, context=case.parallel.context
            ):
                continue  # refused, as test_unsupported.py checks
            tiny = text_config(tiny_config(architecture.model_type))
            chunks = case.parallel.pipeline * case.parallel.virtual_pipeline
            if tiny["num_hidden_layers"] % chunks:
                continue  # refused: no equal stages
            if architecture.unsupported_stages(tiny, [tiny["num_hidden_layers"] // chunks] * chunks):
                continue  # refused, as test_unsupported.py checks
            if case.parallel.context > 1 and architecture.context_algorithms is not None:
                algorithm = {"context_algorithm": architecture.context_algorithms[0]}
                case = replace(case, parallel=case.parallel.model_copy(update=algorithm))
            name = f"{architecture.model_type}: {case.name}"
            selected.append(replace(case, name=name, arch=architecture.model_type))
    return selected


CASES = cases()


def with_adapters() -> list[Case]:
    return [case for case in CASES if case.name.partition(": ")[2] in ADAPTER_LAYOUTS] + [
        replace(case, name=f"{case.arch}: embedding and head, {case.name}", arch="qwen3", targets=ALL)
        for case in LAYOUTS
        if case.name in ("TP2", "TP2 + SP", "PP2", "CP2")
    ]


@pytest.mark.parametrize("case", family_params(CASES, IN_CI))
def test_gradients_equal_transformers(case: Case, parity_folder: Path) -> None:
    assert compare(case, parity_folder) == {}


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(
            architecture.model_type,
            marks=([] if architecture.model_type in ("qwen3", "deepseek_v3") else [pytest.mark.nightly])
            + stack_marks(architecture.model_type, 1),
        )
        for architecture in proven()
    ],
)
def test_gradients_in_bf16_are_as_near_as_transformers(arch: str, parity_folder: Path) -> None:
    """Dense models measured 0.88 to 0.98 of transformers' error, ones with experts 0.4 to 2.2: tokens that other experts get.

    Most of it is what rounding is amplified to, and both errors are one draw of it: see errors_in_bf16.
    """
    error, transformers_error = errors_in_bf16(arch, parity_folder)
    assert error <= (3 if expert_count(text_config(tiny_config(arch))) else 1.05) * transformers_error


@pytest.mark.parametrize("case", family_params(with_adapters(), ADAPTERS_IN_CI))
def test_gradients_of_adapters_equal_peft(case: Case, parity_folder: Path, tmp_path: Path) -> None:
    assert compare_adapter(case, parity_folder, tmp_path / "gradients", ADAPTER_SEED.get(case.arch, 7)) == {}
