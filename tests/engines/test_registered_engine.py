"""An engine that a package outside megascend registers (tests/outside/bigram): by make_backend, and by ``megascend train``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from bigram_ranks import LR, STEPS, TOKENS
from safetensors.torch import load_file, save_file

from megascend import (
    Backend,
    Fsdp,
    FsdpBackend,
    MegatronBackend,
    Recompute,
    RunConfig,
    SingleBackend,
    backends,
    register_engine,
)
from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.apps.train import run_backend
from megascend.config.plugins import check_plugins, import_plugins
from megascend.config.registry import ENGINES
from megascend.errors import ConfigError
from megascend.runtime.bootstrap import engines
from support.forked_programs import run_forked

VOCABULARY, HIDDEN = 320, 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a bigram model's directory, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("bigram")
    generator = torch.Generator().manual_seed(1)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    save_file(
        {name: torch.randn(VOCABULARY, HIDDEN, generator=generator) for name in names}, folder / "model.safetensors"
    )
    sizes = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_attention_heads": 1, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({"model_type": "bigram", "vocab_size": VOCABULARY} | sizes))
    byte_tokenizer(64).save_pretrained(folder)
    return folder


def by_hand(checkpoint: Path, tokens: list[list[int]], steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Compute losses and gradient norms in plain torch."""
    weights = load_file(checkpoint / "model.safetensors")
    embedding, head = (weights[name].requires_grad_() for name in ("model.embed_tokens.weight", "lm_head.weight"))
    optimizer = torch.optim.AdamW([embedding, head], lr=LR, weight_decay=0.0)
    losses, norms = [], []
    inputs = torch.tensor([token for ids in tokens for token in ids[:-1]])
    targets = torch.tensor([token for ids in tokens for token in ids[1:]])
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(embedding[inputs] @ head.T, targets)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_([embedding, head], float("inf")).item())
        optimizer.step()
    return losses, norms


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.nightly_cases("1")  # covered: 2
def test_registered_engine_trains_saves_loads_and_exports(world_size: int, checkpoint: Path, tmp_path: Path) -> None:
    completed = run_forked(Path(__file__).with_name("bigram_ranks.py"), checkpoint, tmp_path, world_size)
    assert completed.returncode == 0, completed.stderr
    wanted_losses, wanted_norms = by_hand(checkpoint, TOKENS)
    for losses, norms, kinds, trained, foreign in torch.load(tmp_path / "ranks.pt"):
        assert losses == pytest.approx(wanted_losses, rel=1e-5)
        assert norms == pytest.approx(wanted_norms, rel=1e-5)
        assert kinds == ("bigram", world_size, "cpu")
        assert foreign == []
        exported = load_file(tmp_path / "out" / "model.safetensors")
        assert exported.keys() == trained.keys() == load_file(checkpoint / "model.safetensors").keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in trained.items())


@mock.patch.dict(ENGINES)
def test_engine_names_are_unique_and_unknown_names_raise() -> None:

    class RegisteredBackend(Backend):
        def __init__(self, model: str) -> None: ...

    register_engine("mine", RegisteredBackend)
    register_engine("mine", RegisteredBackend)
    assert backends.accepted_settings("mine") == {"model"}
    assert not engines.needs("mine").megatron
    for name in ("mine", "megatron"):
        with pytest.raises(
            ConfigError, match=f"another engine is called '{name}'; names in use: megatron, single, fsdp, mine"
        ):
            register_engine(name, lambda model: None)
    with pytest.raises(ConfigError, match="unknown engine 'theirs'; known: megatron, single, fsdp, mine"):
        backends.make_backend("theirs")
    with pytest.raises(ConfigError, match="version table has no scipy"):
        register_engine("other", RegisteredBackend, packages=["scipy"])
    assert "other" not in ENGINES


@pytest.mark.parametrize(
    ("backend", "setting"),
    [
        (SingleBackend, {"provider": "mindspeed"}),
        (SingleBackend, {"fsdp": Fsdp(offload=True)}),
        (FsdpBackend, {"provider": "mindspeed"}),
        (MegatronBackend, {"fsdp": Fsdp(offload=True)}),
    ],
)
def test_constructor_refuses_settings_of_other_engines(backend: Any, setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"engine '{backend.engine_name}' has no setting {name}; leave it out"):
        backend("no/model", **setting)
    assert name not in backends.accepted_settings(backend.engine_name)


@mock.patch.dict(ENGINES)
def test_settings_of_a_run_file_reach_engines_that_know_them_and_others_refuse() -> None:
    received: dict[str, Any] = {}

    def make(model: Path, seed: int, recompute: Any = None) -> Any:
        received.update(model=model, seed=seed, recompute=recompute)

    register_engine("few", make)
    settings = {"model": "m", "output": "o", "data": {"path": "d"}, "engine": "few", "seed": 5, "provider": None}
    run_backend.make_backend(RunConfig.model_validate(settings))
    assert received == {"model": Path("m"), "seed": 5, "recompute": Recompute()}
    for setting in ({"precision": "fp32"}, {"parallel": {"tensor": 2}}, {"lora": {}}, {"checkpoint": {"timeout_s": 9}}):
        with pytest.raises(
            ConfigError, match=r"engine 'few' has no setting (precision|parallel|adapters|save_timeout_s);"
        ):
            run_backend.make_backend(RunConfig.model_validate(settings | setting))


def test_a_plug_in_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plugin.py").write_text("import no_such_module_of_anybody\n")
    (tmp_path / "failing_plugin.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, reason in (
        ("broken_plugin", "no_such_module_of_anybody"),
        ("failing_plugin", "ZeroDivisionError"),
        ("absent_plugin.part", "absent_plugin"),
    ):
        with pytest.raises(ConfigError, match=f"{module}.*{reason}"):
            import_plugins([module])
    check_plugins(["failing_plugin", "json.decoder"])  # nothing is imported
    assert "failing_plugin" not in sys.modules
    with pytest.raises(ConfigError, match="absent_plugin"):
        check_plugins(["json", "absent_plugin.part"])
    with pytest.raises(ConfigError, match="plugins"):
        RunConfig(model="m", output="o", data={"path": "d"}, plugins=["not/a/module"])
