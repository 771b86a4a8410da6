"""An architecture that an external package registers (tests/outside/parrot) trains as in Hugging Face and peft."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import megascend
from megascend.config import Parallel
from megascend.errors import CheckpointError, ConfigError
from megascend.models import Architecture, registry
from megascend.testing import run_distributed, tiny_config
from megascend.testing.parity import (
    Case,
    case_backend,
    case_checkpoint,
    differences,
    hf_reference,
    token_lists,
    train_case,
)
from support.lora_parity import adapter_differences, case_adapter, peft_reference, train_adapter

OUTSIDE = str(Path(__file__).parents[2] / "outside")
pytestmark = pytest.mark.usefixtures("megatron_imported")


@pytest.fixture(scope="module", autouse=True)
def outside() -> Any:
    """Put the package on the search path of this process and of those that it starts, and import it."""
    sys.path.insert(0, OUTSIDE)
    import parrot  # noqa: F401

    yield
    sys.path.remove(OUTSIDE)


@pytest.fixture(scope="module")
def checkpoint(parity_folder: Path) -> Path:
    return case_checkpoint(parity_folder, "parrot", num_hidden_layers=2)


@pytest.mark.nightly  # covered: models/test_outside_family.py; its adapters, below, on its layers
def test_registered_architecture_trains_like_hugging_face(parity_folder: Path, checkpoint: Path) -> None:
    case = Case("parrot TP2 + SP", 2, Parallel(tensor=2, sequence=True), arch="parrot")
    tokens = token_lists()
    difference = differences(train_case(case, checkpoint, tokens), hf_reference(parity_folder, checkpoint, tokens))
    assert difference.loss <= case.loss_bound, difference
    assert difference.grad_norm <= case.norm_bound, difference
    assert difference.logits is not None
    assert difference.logits <= case.logits_bound, difference


def test_its_adapters_are_those_of_peft(parity_folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    case = Case("parrot TP2", 2, Parallel(tensor=2), arch="parrot")
    adapter = case_adapter(checkpoint, case)
    names = {name.split(".")[-4] for name in load_file(adapter / "adapter_model.safetensors")}
    assert names == {"attn", "ff"}
    trajectory = train_adapter(case, checkpoint, adapter, tmp_path / "out")
    difference = adapter_differences(trajectory, peft_reference(parity_folder, checkpoint, adapter, token_lists()))
    assert difference.loss <= case.loss_bound, difference
    assert difference.grad_norm <= case.norm_bound, difference
    assert difference.factors <= 1e-3, difference


def test_without_its_package_it_is_refused_and_a_package_is_named_that_fails(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_of(**settings: Any) -> str:
        def on_rank() -> str:
            registry._from_outside.clear()
            if settings:
                megascend.register_architecture("parrot", **settings)
            try:
                case_backend(Case("parrot", arch="parrot"), checkpoint).close()
            except (CheckpointError, ConfigError) as error:
                return str(error)
            return ""

        return run_distributed(on_rank, 1, init=False)[0]

    assert "transformers" in error_of()
    assert "importing 'parrot.nothing' failed" in error_of(transformers="parrot.nothing")
    hugging_face = "parrot.hugging_face"
    assert "has no model for model_type 'parrot'" in error_of(transformers=hugging_face)
    assert "'json' has registered no model" in error_of(transformers=hugging_face, megatron="json")

    monkeypatch.setattr(registry, "_from_outside", {})
    with pytest.raises(ConfigError, match="'parrot'; known: llama"):
        tiny_config("parrot")
    megascend.register_architecture("parrot", tiny={"attention_scale": 0.5})
    megascend.register_architecture("parrot", tiny={"attention_scale": 0.5})
    assert tiny_config("parrot")["attention_scale"] == 0.5
    with pytest.raises(ConfigError, match="another architecture is registered for model_type 'parrot'"):
        megascend.register_architecture("parrot", megatron="parrot.megatron")


def test_architecture_cache_key_depends_on_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "model.py").write_text("one = 1\n")
    (tmp_path / "a_module.py").write_text("two = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    architecture = Architecture(("any",), "a_package.model", "a_module")
    first = architecture.code_digest()
    assert architecture.code_digest() == first
    (package / "model.py").write_text("one = 3\n")
    second = architecture.code_digest()
    (tmp_path / "a_module.py").write_text("two = 4\n")
    assert len({first, second, architecture.code_digest()}) == 3
    with pytest.raises(ConfigError, match="package 'absent' is not installed"):
        Architecture(("any",), "absent.model").code_digest()
