"""Every setting of the installed verl has a rule, and its shipped defaults are accepted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megascend.integrations.verl import rollout_settings as rollout
from megascend.integrations.verl import settings_table as table
from megascend.integrations.verl.settings import translate

pytest.importorskip("verl.workers", reason="no verl in this environment: bash scripts/test_integrations.sh verl")
pytestmark = pytest.mark.nightly


def classes() -> list[tuple[Any, dict[str, Any]]]:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        EngineRouterReplayConfig,
        HFModelConfig,
        McoreEngineConfig,
        McoreOptimizerConfig,
        QATEngineConfig,
        RolloutConfig,
        SamplingConfig,
    )
    from verl.workers.config.checkpoint import McoreCheckpointConfig
    from verl.workers.config.model import MtpConfig

    return [
        (McoreEngineConfig, table.ENGINE),
        (McoreOptimizerConfig, table.OPTIMIZER),
        (HFModelConfig, table.MODEL),
        (CheckpointConfig, table.CHECKPOINT),
        (McoreCheckpointConfig, table.CHECKPOINT),
        (EngineRouterReplayConfig, table.ROUTER_REPLAY),
        (QATEngineConfig, table.QAT),
        (MtpConfig, table.MTP),
        (RolloutConfig, rollout.ROLLOUT),
        (SamplingConfig, rollout.VALIDATION),
    ]


def test_every_field_has_a_rule() -> None:
    for config_class, rules in classes():
        missing = [field.name for field in dataclasses.fields(config_class) if field.name not in rules]
        assert not missing, f"{config_class.__name__}: no rule for {missing}"


def test_every_rule_is_of_a_field() -> None:
    """Compare rules with verl's fields, except for attributes that verl sets later."""
    later = {"share_embeddings_and_output_weights"}
    fields: dict[int, set[str]] = {}
    for config_class, rules in classes():
        fields.setdefault(id(rules), set()).update(field.name for field in dataclasses.fields(config_class))
    for _, rules in classes():
        assert not set(rules) - fields[id(rules)] - {"_target_"} - later


@pytest.mark.parametrize(("config", "changes"), [
    ("engine", {}), ("optim", {}), ("model", {"path": "/m"}),
])  # fmt: skip
def test_the_shipped_defaults_are_accepted(config: str, changes: dict[str, Any]) -> None:
    from importlib.resources import files

    from omegaconf import OmegaConf

    name = "hf_model" if config == "model" else "megatron"
    shipped = OmegaConf.load(str(files("verl") / "trainer" / "config" / config / f"{name}.yaml"))
    values: Any = OmegaConf.to_container(shipped) | changes  # type: ignore[operator]
    sections: dict[str, Any] = {"model": {"path": "/m"}, "engine": {}, "optim": {}} | {config: values}
    translate(sections["model"], sections["engine"], sections["optim"], {}, "cpu")


def test_the_rollouts_shipped_defaults_are_accepted() -> None:
    """Accept the defaults except the ranks of a replica, of which the local engine has one."""
    from importlib.resources import files

    from omegaconf import OmegaConf

    shipped = OmegaConf.load(str(files("verl") / "trainer" / "config" / "rollout" / "rollout.yaml"))
    values: Any = OmegaConf.to_container(OmegaConf.merge(shipped, {"name": rollout.ROLLOUT_NAME}), resolve=True)
    settings = rollout.translate_rollout(values | {"tensor_model_parallel_size": 1})
    assert (settings.precision, settings.max_model_len, settings.response_length) == ("bf16", 1024, 512)
