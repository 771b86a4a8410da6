"""verl's settings become megascend's, or are refused by name. Plain data; verl/test_verl_fields.py has verl's own fields."""

from __future__ import annotations

from typing import Any

import pytest

from megascend.errors import ConfigError
from megascend.integrations.verl.settings import EngineSettings, translate


def translated(
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    platform: str = "cpu",
) -> EngineSettings:
    return translate({"path": "/m"} | (model or {}), engine or {}, optimizer or {}, checkpoint or {}, platform)


def test_the_layout_the_optimizer_and_recomputation_are_taken_over() -> None:
    settings = translated(
        engine={
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": 3,
            "context_parallel_size": 5,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
            "use_distributed_optimizer": False,
            "use_remove_padding": False,
            "seed": 7,
            "override_ddp_config": {"overlap_grad_reduce": True},
            "override_transformer_config": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "pipeline_model_parallel_layout": "Et|(tt|)*10tL",
                "recompute_num_layers": 3,
                "moe_aux_loss_coeff": 0.5,
            },
        },
        optimizer={
            "lr": 3e-4,
            "betas": [0.8, 0.9],
            "weight_decay": 0.2,
            "clip_grad": 0.7,
            "override_optimizer_config": {"adam_eps": 1e-6},
        },
    )
    parallel, adam = settings.parallel, settings.adam
    assert (parallel.tensor, parallel.pipeline, parallel.virtual_pipeline, parallel.context) == (2, 4, 3, 5)
    assert parallel.pipeline_layout == "Et|(tt|)*10tL"
    assert (parallel.expert, parallel.expert_tensor, parallel.sequence) == (8, 1, True)
    assert (adam.lr, adam.betas, adam.weight_decay, adam.max_grad_norm, adam.eps) == (3e-4, (0.8, 0.9), 0.2, 0.7, 1e-6)
    assert (adam.distributed, adam.overlap_grad_reduce, adam.overlap_param_gather) == (False, True, False)
    assert (settings.recompute.granularity, settings.recompute.layers) == ("full", 3)
    assert (settings.moe.aux_loss, settings.moe.aux_loss_coefficient) == ("megatron", 0.5)
    assert (settings.packing, settings.seed, settings.precision, settings.lora) == (False, 7, "bf16", None)


@pytest.mark.parametrize(("dtype", "params", "precision"), [
    ("bfloat16", None, "bf16"), ("float16", None, "fp16"), ("bfloat16", "float32", "fp32"), ("bfloat16", "torch.float32", "fp32"),
])  # fmt: skip
def test_precision(dtype: str, params: str | None, precision: str) -> None:
    override = {"params_dtype": params} if params else {}
    assert translated(engine={"dtype": dtype, "override_transformer_config": override}).precision == precision


def test_lora_targets_are_hugging_faces_layers() -> None:
    lora = {"rank": 4, "alpha": 8, "target_modules": ["linear_qkv", "linear_fc2", "o_proj"], "merge": True}
    settings = translated(model={"lora": lora})
    assert settings.lora is not None
    assert settings.lora.targets == ("q_proj", "k_proj", "v_proj", "down_proj", "o_proj")
    assert (settings.lora.rank, settings.lora.alpha, settings.merge) == (4, 8.0, True)
    assert translated(model={"lora": {"rank": 0}}).lora is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"engine": {"a_new_setting": 1}}, "engine.a_new_setting=1: megascend has no rule for it"),
    ({"engine": {"router_replay": {"mode": "R2"}}}, "engine.router_replay.mode='R2': R2, which replays"),
    ({"engine": {"qat": {"enable": True}}}, "engine.qat.enable=True"),
    ({"engine": {"override_transformer_config": {"num_layers": 3}}}, "engine.override_transformer_config.num_layers=3"),
    ({"engine": {"override_transformer_config": {"recompute_method": "block"}}}, "recompute_method='block'"),
    ({"engine": {"override_transformer_config": {"params_dtype": "int8"}}}, "params_dtype='int8'"),
    ({"engine": {"param_offload": True}, "platform": "cuda"}, "engine.param_offload=True: on cuda"),
    ({"optimizer": {"optimizer": "muon"}}, "optim.optimizer='muon'"),
    ({"optimizer": {"exp_avg_dtype": "bf16"}}, "optim.exp_avg_dtype='bf16'"),
    ({"optimizer": {"override_optimizer_config": {"sgd_momentum": 1}}}, "optim.override_optimizer_config.sgd_momentum"),
    ({"model": {"model_type": "reward_model"}}, "model.model_type='reward_model'"),
    ({"model": {"model_type": "value_model", "lora": {"rank": 8}}}, "model.lora.rank=8: a critic's head is trained"),
    (
        {"model": {"model_type": "value_model"}, "engine": {"forward_only": True}},
        "engine.forward_only=True: a critic is trained",
    ),
    ({"model": {"lora_rank": 8}}, "model.lora_rank=8: of verl's FSDP engines; below engine=megatron it is model.lora"),
    ({"model": {"lora": {"rank": 8, "type": "dora"}}}, "model.lora.type='dora'"),
    ({"model": {"hf_config_path": "/other"}}, "model.hf_config_path='/other'"),
    ({"checkpoint": {"save_contents": ["model"]}}, "checkpoint.save_contents=['model']"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_unsupported_settings_raise_config_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translated(**settings)
    assert message in str(caught.value)


def test_all_unsupported_settings_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        translated(engine={"use_megatron_fsdp": True, "vanilla_mbridge": True}, optimizer={"optimizer": "sgd"})
    assert str(caught.value).count("\n- ") == 3
