"""Supported model settings, compared with Hugging Face, and settings that are refused before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from megascend import MegatronBackend, Parallel, Recompute
from megascend.errors import ConfigError
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_checkpoint, differences, hf_reference, token_lists, train_case

pytestmark = pytest.mark.usefixtures("megatron_imported")
STEPS = 2
EVERY_OTHER, ONE_DENSE = {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}
ONE_EXPERT = {"num_experts_per_tok": 1, "norm_topk_prob": False}


def selective(*modules: str) -> Recompute:
    return Recompute(granularity="selective", modules=modules)


CASES = [
    Case("decoder_sparse_step: 2", arch="qwen3_moe", overrides=EVERY_OTHER),
    Case("mlp_only_layers, TP2 + SP", 2, Parallel(tensor=2), arch="qwen2_moe", overrides=ONE_DENSE),
    Case("one expert by its probability", arch="qwen3_moe", overrides=ONE_EXPERT),
    Case("attention_bias on q, k and v", arch="glm4_moe", overrides={"attention_bias": True}),
    Case("recompute moe", arch="qwen3_moe", recompute=selective("moe")),
    Case("recompute moe_act, layernorm", arch="qwen3_moe", recompute=selective("moe_act", "layernorm")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_honoured_as_in_hugging_face(parity_folder, case):
    """Compare logits, and losses and gradient norms of two steps."""
    checkpoint = case_checkpoint(parity_folder, case.arch, **case.overrides)
    tokens = token_lists()
    difference = differences(
        train_case(case, checkpoint, tokens, steps=STEPS), hf_reference(parity_folder, checkpoint, tokens, steps=STEPS)
    )
    assert difference.loss <= case.loss_bound
    assert difference.grad_norm <= case.norm_bound
    assert difference.logits is not None
    assert difference.logits <= 2e-5


@pytest.mark.parametrize("error", [AssertionError("nheads must be divisible by ngroups"), KeyError("y")])
def test_error_of_megatron_about_a_model_becomes_a_refusal(parity_folder, monkeypatch, error: Exception) -> None:
    """Sizes that no declaration refuses end in an assertion or a KeyError of Megatron-Core or mcore-bridge."""
    from megascend.engines.megatron import build

    def fail(config: Any) -> None:
        raise error

    monkeypatch.setattr(build, "get_mcore_model", fail)
    model = case_checkpoint(parity_folder, "qwen3")

    def on_rank() -> str:
        with pytest.raises(ConfigError) as raised:
            MegatronBackend(model, precision="fp32", platform="cpu", self_check=False)
        return str(raised.value)

    (message,) = run_distributed(on_rank, 1, init=False)
    assert "config.json: Megatron cannot build this model" in message
    assert f"{type(error).__name__}: {error}" in message
