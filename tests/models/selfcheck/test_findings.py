"""Results of the check with the real packages: settings that Megatron-Core ignores are named, others cause no difference.

All models of a test are built in one process, as in the check's worker.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.train import self_check_worker
from megascend.models.selfcheck import process
from megascend.models.selfcheck.process import BOUND, Trial, TrialResult
from megascend.testing import run_distributed, tiny_config
from megascend.testing.self_checks import slice_of

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
PROVEN = ("llama", "qwen2", "qwen3", "qwen3_moe")


def moe(model_type: str, **settings: Any) -> dict[str, Any]:
    """Return the configuration of a small model of an architecture with DeepSeek's experts."""
    base = {name: value for name, value in tiny_config("qwen3").items() if name != "architectures"}
    experts = {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
    }
    return base | {"model_type": model_type, "num_hidden_layers": 4} | experts | settings


def deepseek_v2(**settings: Any) -> dict[str, Any]:
    latent = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    return moe("deepseek_v2", **latent, num_key_value_heads=4, head_dim=8, norm_topk_prob=False, **settings)


def long_positions(**settings: Any) -> dict[str, Any]:
    return tiny_config("llama", max_position_embeddings=16384) | settings


HONOURED = {
    "partial_rotary_factor in Llama": tiny_config("llama", partial_rotary_factor=0.5),
    "dots1": moe("dots1", norm_topk_prob=True),
    "glm4_moe": moe("glm4_moe", norm_topk_prob=True, partial_rotary_factor=0.5),
    "deepseek_v2 without groups": deepseek_v2(topk_method="greedy"),
    **{
        f"{act} in {arch}": tiny_config(arch, hidden_act=act)
        for arch in PROVEN
        for act in ("gelu", "gelu_pytorch_tanh")
    },
    "relu in qwen3": tiny_config("qwen3", hidden_act="relu"),
    "relu2 in llama": tiny_config("llama", hidden_act="relu2"),
    "128 experts": tiny_config("qwen3_moe", num_experts=128, num_experts_per_tok=8),
    "norm_topk_prob: false in qwen3_moe": tiny_config("qwen3_moe", norm_topk_prob=False),
    "experts of 120 bytes": tiny_config("qwen3_moe", moe_intermediate_size=30),
    "gpt_oss at its limit": tiny_config("gpt_oss"),
    "linear attention": tiny_config("qwen3_5_text"),
    **{f"{arch} with an image": tiny_config(arch) for arch in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")},
}


MORE = (
    *(f"{act} in {arch}" for arch in PROVEN for act in ("gelu", "gelu_pytorch_tanh")),
    "relu in qwen3",
    "norm_topk_prob: false in qwen3_moe",
    "qwen3_vl with an image",
    "qwen3_5 with an image",
)
"""Of these, nightly tests check all; in CI, ``IN_CI`` and what is not here."""
IN_CI = ("gelu in llama", "gelu_pytorch_tanh in qwen3_moe")


@pytest.fixture
def kernels_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install kernels of linear attention that fail, as they do without a GPU."""
    package = tmp_path / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    call = 'def {}(*args, **options):\n    raise RuntimeError("0 active drivers ([]). There should only be one.")\n'
    functions = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    (package / "__init__.py").write_text("".join(map(call.format, functions)), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # of this process: that of the worker is made from it


@pytest.mark.usefixtures("megatron_imported", "kernels_of_gpus")
def test_unbuildable_models_do_not_agree_and_honoured_settings_do() -> None:
    """Run in one process: a model that cannot be built must not affect the models after it. No kernel of a GPU is called."""
    honoured = {name: config for name, config in HONOURED.items() if name in IN_CI or name not in MORE}
    unknown, odd = (
        tiny_config("qwen3") | {"model_type": "phi3"},
        tiny_config("qwen3", rope_scaling={"rope_type": "spiral"}),
    )
    parts = [slice_of(config) for config in honoured.values()]
    # Longrope with no sample beyond its switch, as the error's advice recommends.
    parts.append(slice_of(long_positions(rope_scaling=LONGROPE, original_max_position_embeddings=4096), longest=4096))
    trials = [Trial(config, (3, 8)) for config in (unknown, odd)] + [Trial(part.config, part.lengths) for part in parts]
    results = process.run(trials).findings
    assert "mcore-bridge" in results[0].megatron_problem
    assert "spiral" in results[1].problem
    assert not results[0].agrees
    assert_agree([*honoured, "short longrope"], results[2:])


@pytest.mark.nightly
@pytest.mark.usefixtures("megatron_imported")
def test_more_honoured_settings_agree() -> None:
    parts = [slice_of(HONOURED[name]) for name in MORE]
    assert_agree(MORE, process.run([Trial(part.config, part.lengths) for part in parts]).findings)


WRONG = {
    "gpt_oss": ({"swiglu_limit": 12.0}, {"swiglu_limit": 7.0}),
    "olmoe": ({"clip_qkv": 8.0}, {"clip_qkv": None}),
}
"""By architecture, settings of its model, and those that a stack computes in their place."""


@pytest.mark.usefixtures("megatron_imported")
@pytest.mark.parametrize("arch", WRONG)
def test_stack_with_another_limit_differs(arch: str, tmp_path: Path) -> None:
    settings, wrong = WRONG[arch]
    part = slice_of(tiny_config(arch, **settings))
    trial = {"config": part.config, "lengths": part.lengths, "seed": 1}
    (reference,) = run_distributed(lambda: self_check_worker.reference(trial, tmp_path / "model"), 1, init=False)
    assert list(reference["models"]) == ["plain", "at limits"]
    for name in reference["models"]:
        (tmp_path / "model" / name / "config.json").write_text(json.dumps(part.config | wrong))
    (values,) = run_distributed(lambda: self_check_worker.compare(reference, tmp_path / "model"), 1, init=False)
    assert not TrialResult(**values).problem
    assert TrialResult(**values).largest > 100 * BOUND


# --- random shapes ---


def assert_agree(names: Sequence[str], findings: Sequence[TrialResult]) -> None:
    wrong = {
        name: result.problem or result.largest
        for name, result in zip(names, findings, strict=True)
        if result.problem or result.largest > BOUND / 2  # room for other processors
    }
    assert not wrong
