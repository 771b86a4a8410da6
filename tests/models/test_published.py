"""Configurations as their authors published them: read, counted, planned, and saved by transformers.

``published/index.json`` says where each configuration and each count was found. Heads for multi-token prediction are not built;
where the Hub's count has them, they are counted here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascend.huggingface.architectures import transformers_config
from megascend.huggingface.info import ModelInfo, ModelShape, inspect_checkpoint
from megascend.memory.estimate import Estimate
from megascend.models import architecture_of, expert_layers, text_config
from megascend.models.base import LatentAttention, LinearAttention
from megascend.models.registry import BUILT_IN
from megascend.topology.topology import Topology
from support.described import describe_checkpoint, published_plan

FOLDER = Path(__file__).with_name("published")
INDEX: dict[str, dict[str, Any]] = json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))
CARD_BYTES = 64 * 10**9
"""Of the smaller of the devices that the layouts are for: NPUs of 64 GB and GPUs of 80 GB."""
WITH_MTP = {"deepseek-v3": 684_531_386_000 - 41_540_496, "glm-4.5": 358_337_791_296, "glm-4.5-air": 110_468_824_832}
"""The Hub's counts with the layer for multi-token prediction, DeepSeek's without the fp32 scales of its fp8 blocks."""


def configuration(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("described")

    def describe(name: str) -> Path:
        path = folder / name
        return path if path.exists() else describe_checkpoint(path, configuration(name))

    return describe


def test_every_declared_family_has_a_published_configuration() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {"index", *INDEX}
    text_models = {name for name, architecture in BUILT_IN.items() if architecture.inputs is None}
    assert {configuration(name)["model_type"] for name in INDEX} == text_models


@pytest.mark.parametrize("name", INDEX)
def test_parameters_are_the_published_ones(name: str, described: Any) -> None:
    entry = INDEX[name]
    assert inspect_checkpoint(described(name)).parameter_count == pytest.approx(
        entry["parameters"], rel=entry["tolerance"]
    )


@pytest.mark.parametrize("name", WITH_MTP)
def test_difference_from_the_hubs_count_is_the_mtp_layer(name: str, described: Any) -> None:
    info = inspect_checkpoint(described(name))
    hidden, last = info.shape.hidden_size, f"layers.{info.shape.num_layers - 1}."
    layer = sum(_elements(header.shape) for tensor, header in info.tensors.items() if last in tensor)
    # A projection of two hidden states, three norms, and an embedding and an output layer of its own (DeepSeek-V3's report).
    mtp = layer + 2 * hidden * hidden + 3 * hidden + 2 * info.shape.vocab_size * hidden
    assert info.parameter_count + mtp == WITH_MTP[name]


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def test_tensors_are_as_many_as_in_the_published_files(described: Any) -> None:
    # DeepSeek-V3's main model without scales, and OLMoE's, by public audits of their files.
    assert len(inspect_checkpoint(described("deepseek-v3")).tensors) == 45_395
    assert len(inspect_checkpoint(described("olmoe-1b-7b-0924")).tensors) == 3_219


@pytest.mark.parametrize("name", [name for name in INDEX if INDEX[name]["layout"]])
def test_layout_is_accepted_and_fits(name: str, described: Any) -> None:
    topology, memory = published_plan(described(name), INDEX[name]["layout"])
    assert isinstance(topology, Topology)
    assert isinstance(memory, Estimate)
    assert 0.1 * CARD_BYTES < memory.total < CARD_BYTES


@pytest.mark.parametrize("name", INDEX)
def test_megatron_engine_supports_it(name: str, described: Any) -> None:
    config = text_config(transformers_config(described(name)).to_dict())
    assert architecture_of(config).unsupported(config) == []


@pytest.mark.parametrize("name", INDEX)
def test_configuration_that_transformers_saves_means_the_same(name: str, described: Any, tmp_path: Path) -> None:
    transformers_config(described(name)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert _meaning(saved, inspect_checkpoint(described(name))) == _meaning(
        configuration(name), inspect_checkpoint(described(name))
    )


def _meaning(config: dict[str, Any], info: ModelInfo) -> dict[str, Any]:
    architecture = architecture_of(config)
    text = architecture.normalise(text_config(config))
    layers = expert_layers(text)
    return {
        "architecture": architecture,
        "shape": ModelShape.from_hf_config({"tie_word_embeddings": info.shape.tied, **config}),
        "latent": LatentAttention.from_config(text),
        "linear": LinearAttention.from_config(text),
        "expert layers": None if layers is None or all(layers) else layers,
        "experts of a token": text.get("num_experts_per_tok"),
        "attention width": architecture.attention_width(text),
    }
