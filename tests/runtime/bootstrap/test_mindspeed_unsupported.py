"""Refusals of models and options that MindSpeed computes wrongly without an error."""

from __future__ import annotations

from typing import Any

import pytest

from megascend.config.rules import enforce
from megascend.errors import ConfigError
from megascend.runtime.bootstrap.mindspeed import arguments

FINE = {
    "context_parallel_size": 1,
    "context_parallel_algo": "megatron_cp_algo",
    "attention_dropout": 0.0,
    "window_size": None,
    "softmax_type": "vanilla",
    "schedules_method": None,
    "swap_attention": False,
}
ALL_GATHER = {"context_parallel_size": 2, "context_parallel_algo": "kvallgather_cp_algo"}


CONTEXT = {"context_parallel_size": 2}
REFUSED: dict[str, dict[str, Any]] = {
    "window_size: 128, 0 with MindSpeed: its attention ignores the window": {"window_size": (128, 0)},
    "softmax_type: learnable with MindSpeed: its attention computes": {"softmax_type": "learnable"},
    "multi_latent_attention: true with MindSpeed": {"multi_latent_attention": True},
    "experimental_attention_variant: gated_delta_net with": {"experimental_attention_variant": "gated_delta_net"},
    "hf_model_type: glm4 with MindSpeed: mcore-bridge": {"hf_model_type": "glm4"},
    "context_parallel_algo: ulysses_cp_algo with": CONTEXT | {"context_parallel_algo": "ulysses_cp_algo"},
    "context_parallel_algo: hybrid_cp_algo with": CONTEXT | {"context_parallel_algo": "hybrid_cp_algo"},
    "attention_dropout: 0.1 with parallel.context_algorithm=all_gather": ALL_GATHER | {"attention_dropout": 0.1},
    "use_cp_send_recv_overlap: true with": CONTEXT | {"use_cp_send_recv_overlap": True},
    "cp_window_size: 2 with MindSpeed: its process groups": {"context_parallel_size": 4, "cp_window_size": 2},
    "recompute_modules: mlp, layernorm with": {"recompute_modules": ["mlp", "layernorm"]},
    **{f"{name}: true with MindSpeed: it imports": {name: True} for name in arguments.NEEDS_MEGATRON_TRAINING},
}
ACCEPTED = (
    FINE,
    FINE | CONTEXT,
    FINE | ALL_GATHER,
    FINE | {"attention_dropout": 0.1, "cp_window_size": 2, "context_parallel_algo": "ulysses_cp_algo"},
    FINE | {"recompute_modules": ["mlp", "moe"]},
)


@pytest.mark.parametrize("message", REFUSED)
def test_rule_refuses_arguments_with_a_reason(message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        enforce(arguments.RULES, arguments.Arguments(FINE | REFUSED[message]))
    assert str(raised.value).startswith(message)
    assert len(str(raised.value)) <= 160


def test_every_rule_refuses_a_case_and_accepts_plain_models() -> None:
    cases = [arguments.Arguments(FINE | case) for case in REFUSED.values()]
    assert [rule.text for rule in arguments.RULES if not any(rule.when(case) for case in cases)] == []
    for accepted in ACCEPTED:
        enforce(arguments.RULES, arguments.Arguments(accepted))


def test_packing_under_context_parallelism_is_refused_with_the_setting():
    arguments.check_batching(1, packing=True)
    arguments.check_batching(2, packing=False)
    with pytest.raises(ConfigError, match=r"batching\.packing: true with parallel\.context=2.*set false"):
        arguments.check_batching(2, packing=True)
