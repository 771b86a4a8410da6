"""MindSpeed's arguments follow from the model and the layout, and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megascend.bootstrap.mindspeed import arguments
from megascend.errors import ConfigError

DEFAULTS = {
    "optimization_level": 2,
    "context_parallel_algo": "megatron_cp_algo",
    "attention_mask_type": "causal",
    "use_fused_rmsnorm": False,
    "transformer_impl": "local",
    "alibi_fusion_attn_type": None,
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
    """MindSpeed adds its arguments to the class, and its layers change them; a second look must find the same."""

    @dataclass
    class Grown(Config):
        use_fused_rmsnorm: bool = True
        grad_scale_func: Any = None

    built = arguments.from_config(DEFAULTS, Grown(), "ring", {})
    assert built["use_fused_rmsnorm"] is False
    assert "grad_scale_func" not in built


def test_options_come_last():
    assert arguments.from_config(DEFAULTS, Config(), "ring", {"use_fused_rmsnorm": True})["use_fused_rmsnorm"] is True


def test_options_that_do_not_exist_or_belong_elsewhere_are_refused():
    with pytest.raises(ConfigError, match="no argument of MindSpeed is called use_fuzed_rmsnorm"):
        arguments.check_options({"use_fuzed_rmsnorm": True}, DEFAULTS)
    with pytest.raises(ConfigError, match=r"context_parallel_algo is decided by parallel\.context_algorithm"):
        arguments.check_options({"context_parallel_algo": "ulysses_cp_algo"}, DEFAULTS)


def test_signatures_differ_exactly_where_arguments_do():
    one = arguments.from_config(DEFAULTS, Config(), "ring", {})
    same = arguments.from_config(DEFAULTS, Config(), "ring", {})
    other = arguments.from_config(DEFAULTS, Config(hidden_size=65), "ring", {})
    assert arguments.signature(one) == arguments.signature(same)
    assert arguments.signature(one) != arguments.signature(other)
