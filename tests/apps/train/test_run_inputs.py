"""What a resumed run compares with its checkpoint: every setting, the weights of other models, and the code of rewards."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import BaseModel
from safetensors.torch import load_file, save_file

from megascend.apps.rl.learner import input_names as rl_input_names
from megascend.apps.train.resume import differences
from megascend.apps.train.run_inputs import InputNames, Inputs, compare_inputs, fingerprint, read_inputs
from megascend.apps.train.supervised import input_names
from megascend.config import Lora, RunConfig
from megascend.config.rl import RlConfig
from megascend.errors import CheckpointError, ConfigError
from megascend.testing.tiny_models import write_tiny_checkpoint

RL: dict[str, Any] = {
    "model": "model",
    "output": "output",
    "objective": {"preset": "gspo"},
    "reference": {"model": "reference", "penalty": "reward"},
    "teacher": {"model": "teacher", "rewards": True},
    "evaluation": {"prompts": "held_out.jsonl"},
    "rollout": {"prompts": "prompts.jsonl", "environment": {"name": "game.py:Game", "options": {"level": 1}}},
    "sync": {"sharded": True},
}
SUPERVISED: dict[str, Any] = {
    "model": "model",
    "output": "output",
    "data": {"path": "data.jsonl"},
    "distillation": {"teacher": "teacher", "loss": "jsd"},
    "validation": {"path": "held_out.jsonl"},
}
PREFERENCES: dict[str, Any] = {"model": "model", "output": "output", "data": {"path": "pairs.jsonl"}, "dpo": {}}


def leaves(section: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield the keys of all settings that are no sections."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(RlConfig, RL), (RunConfig, SUPERVISED), (RunConfig, PREFERENCES)],
    ids=["rl", "train", "preferences"],
)
def test_every_setting_that_changes_is_reported(kind: type[RlConfig | RunConfig], settings: dict[str, Any]) -> None:
    config = kind(**settings)
    saved = config.model_dump(mode="json")
    assert differences(saved, config) == []
    keys = list(leaves(config))
    assert len(keys) > 80
    for key in keys:
        changed = config.model_dump(mode="json")
        *path, name = key.split(".")
        section = changed
        for part in path:
            section = section[part]
        # A value that no setting has: it is compared as it is.
        section[name] = {"another": 1} if isinstance(section[name], dict) else "another"
        reported = differences(changed, config)
        assert any(line.startswith((f"{key}:", f"{key}.")) for line in reported), key


class OneRank:
    """Stands for the backend of one process."""

    rank = 0

    def from_rank_0(self, make: Any) -> Any:
        return make()


def inputs(weights: dict[str, Path] | None = None, code: dict[str, str] | None = None, **packages: str) -> Inputs:
    return read_inputs(cast("Any", OneRank()), InputNames(weights or {}, code or {}, packages))


def compare(before: Inputs, weights: dict[str, Path] | None = None, code: dict[str, str] | None = None) -> None:
    names = InputNames(weights or {}, code or {})
    compare_inputs(names, read_inputs(cast("Any", OneRank()), names), before, rank=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("inputs") / "model", "llama")


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (RlConfig(**RL), {"reference.model": "reference", "teacher.model": "teacher"}),
        (RlConfig(**RL | {"reference": {}, "teacher": None}), {"reference.model": "model"}),
        (
            RlConfig(**RL | {"reference": None, "teacher": {"engine": "http://host:1"}, "lora": Lora(), "sync": {}}),
            {"model": "model"},
        ),
        (RunConfig(**SUPERVISED), {"distillation.teacher": "teacher"}),
        (RunConfig(**PREFERENCES), {"model": "model"}),
        (RunConfig(**SUPERVISED | {"distillation": None}), {}),
    ],
    ids=["reference and teacher", "base model", "adapter", "distillation", "preferences", "model alone"],
)
def test_other_models_of_a_run_are_compared(config: Any, settings: dict[str, str]) -> None:
    if isinstance(config, RlConfig):
        names = rl_input_names(config)
    else:
        names = input_names(config, has_reference=config.dpo is not None)
    assert names.weights == {name: Path(path) for name, path in settings.items()}


def test_other_weights_are_refused_wherever_they_differ_at_an_end(checkpoint: Path, tmp_path: Path) -> None:
    saved = inputs({"teacher.model": checkpoint})
    with pytest.raises(CheckpointError):
        inputs({"teacher.model": tmp_path})
    compare(saved, {"teacher.model": checkpoint})
    tensors = load_file(checkpoint / "model.safetensors")
    (tmp_path / "other").mkdir()
    for name in tensors:
        other = {key: value.clone() for key, value in tensors.items()}
        other[name].view(-1)[-1] += 1
        save_file(other, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
        assert fingerprint(tmp_path / "other") != fingerprint(checkpoint), name
    with pytest.raises(
        ConfigError, match=r"teacher\.model: the weights in .*other are not those that the run began with"
    ):
        compare(saved, {"teacher.model": tmp_path / "other"})
    # A teacher that the checkpoint does not have is a setting that changed.
    compare(saved, {"reference.model": tmp_path / "other"})


def test_other_code_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {"reward": tmp_path / "rewards.py", "game": tmp_path / "a_game_of_this_test.py"}
    for path in files.values():
        path.write_text("x = 1\n", encoding="utf-8")
    code = {
        "rollout.reward": f"{files['reward']}:reward",
        "rollout.environment": "a_game_of_this_test:Game",
        "plugins: a_game_of_this_test": "a_game_of_this_test",
    }
    saved = inputs(code=code, verifiers="pytest")
    assert saved["code"]["verifiers"] == importlib.metadata.version("pytest")
    with caplog.at_level(logging.WARNING, "megascend"):
        compare(saved, code=code)
        assert caplog.records == []
        for name, path in files.items():
            path.write_text("x = 2\n", encoding="utf-8")
            caplog.clear()
            compare(saved, code=code)
            warned = {record.getMessage().partition(": the code")[0] for record in caplog.records}
            assert warned == ({"rollout.reward"} if name == "reward" else set(code))
