"""MindSpeed's arguments are derived from the model and the layout only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megascend.errors import ConfigError
from megascend.runtime.bootstrap.mindspeed import arguments

DEFAULTS = {
    "optimization_level": 2,
    "context_parallel_algo": "megatron_cp_algo",
    "attention_mask_type": "causal",
    "use_fused_rmsnorm": False,
    "transformer_impl": "local",
    "alibi_fusion_attn_type": None,
    "use_fused_ring_attention_update": False,
    "megatron_cp_in_bnsd": False,
    "optimizer_selection": "fused_adamw",
    "swap_attention": False,
    "cp_window_size": 1,
}


@dataclass
class Config:
    context_parallel_size: int = 1
    hidden_size: int = 64
    num_moe_experts: int | None = None
    moe_grouped_gemm: bool = True
    multi_latent_attention: bool = False
    params_dtype: torch.dtype = torch.bfloat16
    bridge: Any = field(default_factory=object)


def test_the_seed_holds_the_layout_and_nothing_from_a_command_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--optimization-level", "3", "--hidden-dropout", "0.5"])
    seeded = arguments.seed(DEFAULTS, 4, "all_gather")
    assert seeded["context_parallel_size"] == 4
    assert seeded["context_parallel_algo"] == "kvallgather_cp_algo"
    assert seeded["optimization_level"] == 2
    assert "hidden_dropout" not in seeded
    assert arguments.seed(DEFAULTS, 1, "ring")["optimization_level"] == 0


@pytest.mark.parametrize(
    ("config", "level"),
    [
        (Config(), 0),
        (Config(context_parallel_size=2), 2),
        (Config(num_moe_experts=8), 2),
        (Config(num_moe_experts=8, moe_grouped_gemm=False), 0),
        (Config(multi_latent_attention=True), 2),
    ],
)
def test_the_optimization_level_follows_from_what_the_model_needs(config, level):
    assert arguments.optimization_level(config) == level
    assert arguments.from_config(DEFAULTS, config, "ring", {})["optimization_level"] == level


def test_the_model_overrides_defaults_but_an_unset_field_hides_none():
    built = arguments.from_config(DEFAULTS, Config(hidden_size=96), "ring", {})
    assert built["hidden_size"] == 96
    assert built["attention_mask_type"] == "causal"
    assert built["params_dtype"] is torch.bfloat16
    assert built["transformer_impl"] == "transformer_engine"
    assert built["use_flash_attn"] is True
    assert "bridge" not in built


def test_mindspeeds_own_fields_and_callbacks_do_not_come_from_the_model():
    """Ignore arguments that MindSpeed added to the class: its layers change them while the model is built."""

    @dataclass
    class Grown(Config):
        use_fused_rmsnorm: bool = True
        grad_scale_func: Any = None

    built = arguments.from_config(DEFAULTS, Grown(), "ring", {})
    assert built["use_fused_rmsnorm"] is False
    assert "grad_scale_func" not in built


def test_options_come_last():
    built = arguments.from_config(DEFAULTS, Config(context_parallel_size=2), "ring", {"megatron_cp_in_bnsd": True})
    assert built["megatron_cp_in_bnsd"] is True


def test_an_option_raises_the_level_to_its_features():
    config, options = Config(), {"optimizer_selection": "fused_torch_adamw"}
    built = arguments.from_config(DEFAULTS, config, "ring", options, {"optimizer_selection": 2})
    assert built["optimization_level"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_fuzed_rmsnorm": True}, "no argument of MindSpeed is called use_fuzed_rmsnorm"),
        (
            {"context_parallel_algo": "ulysses_cp_algo"},
            r"context_parallel_algo is decided by parallel\.context_algorithm",
        ),
        ({"transformer_impl": "local"}, "transformer_impl is decided by megascend"),
        ({"swap_attention": True}, r"swap_attention: true with MindSpeed: it imports megatron\.training"),
        ({"swap_attention": False}, "provider_options.swap_attention is not among the options that were tested"),
        ({"cp_window_size": 2}, "its process groups are created before"),
        ({"use_fused_rmsnorm": True}, r"not among the options that were tested with megascend \(use_fused_ring"),
        ({"optimizer_selection": "fused_torch_adamw"}, "not among the options that were tested"),
        ({"megatron_cp_in_bnsd": "yes"}, "'yes': tested with megascend: True, False"),
        ({"megatron_cp_in_bnsd": 1}, "1: tested with megascend: True, False"),
    ],
    ids=str,
)
def test_untested_options_are_refused_with_the_most_specific_reason(options, message):
    with pytest.raises(ConfigError, match=message):
        arguments.check_options(options, DEFAULTS)


@pytest.mark.parametrize(
    ("context", "algorithm", "fine"), [(1, "ring", False), (2, "all_gather", False), (2, "ring", True)]
)
def test_ring_only_option_requires_a_ring(context, algorithm, fine):
    config, options = Config(context_parallel_size=context), {"megatron_cp_in_bnsd": True}
    if fine:
        assert arguments.from_config(DEFAULTS, config, algorithm, options)["megatron_cp_in_bnsd"] is True
    else:
        with pytest.raises(ConfigError, match="context_algorithm: ring only"):
            arguments.from_config(DEFAULTS, config, algorithm, options)
    arguments.from_config(DEFAULTS, config, algorithm, {"megatron_cp_in_bnsd": False})
