"""Configurations as their authors published them: read, counted, planned, and saved by transformers.

``published/index.json`` says where each configuration and each count was found. Heads for multi-token prediction are not built;
where the Hub's count has them, they are counted here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import docs_tables
from megascend.models import architecture_of, expert_layers, text_config
from megascend.models.base import LatentAttention, LinearAttention, StateSpace, single_mixers
from megascend.models.checkpoint_files.architectures import transformers_config
from megascend.models.checkpoint_files.info import ModelInfo, linear_layers, shape_of
from megascend.models.memory.estimate import Estimate
from megascend.models.memory.parameters import elements, stages
from megascend.models.registry import BUILT_IN
from megascend.runtime.topology.topology import Topology
from support.described import FOLDER, PublishedModel, describe_published, published_plan
from support.described import PUBLISHED as INDEX
from support.described import published_config as configuration

CARD_BYTES = 64 * 10**9
"""Of the smaller of the devices that the layouts are for: NPUs of 64 GB and GPUs of 80 GB."""
WITH_MTP = {"deepseek-v3": 684_531_386_000 - 41_540_496, "glm-4.5": 358_337_791_296, "glm-4.5-air": 110_468_824_832}
"""The Hub's counts with the layer for multi-token prediction, DeepSeek's without the fp32 scales of its fp8 blocks."""
WITH_MTP_BESIDE = {"qwen3.5-4b": 4_659_865_088, "qwen3.5-35b-a3b": 35_951_822_704}
"""The Hub's counts of models whose head for multi-token prediction shares the embedding."""


def is_smallest_of_its_type(name: str) -> bool:
    """Check that no smaller published model has the family; one with a layout goes before those without."""
    model_type = configuration(name)["model_type"]
    others = [other for other in INDEX if configuration(other)["model_type"] == model_type]
    return name == min(others, key=lambda other: (not INDEX[other]["layout"], INDEX[other]["parameters"]))


def marked(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters: two sizes of a family share all code, so the larger are nightly."""
    return [name if is_smallest_of_its_type(name) else pytest.param(name, marks=pytest.mark.nightly) for name in names]


NAMES = marked(INDEX)
"""benchmarks/families/published.json has the counts of all."""


@pytest.fixture(scope="module")
def describe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PublishedModel]:
    """Describe each model once: building it and reading its headers takes seconds."""
    folder = tmp_path_factory.mktemp("described")
    return functools.cache(lambda name: describe_published(name, folder / name))


@pytest.mark.parametrize("name", NAMES)
def test_committed_counts_are_current(name: str, describe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = json.loads(docs_tables.PUBLISHED_COUNTS.read_text(encoding="utf-8"))
    assert committed == sorted(committed)
    assert len(committed) == len(INDEX)
    monkeypatch.setattr(docs_tables, "PUBLISHED", {name: INDEX[name]})
    (row,) = docs_tables.published_rows(describe)
    assert committed.count(row) == 1, "run: python scripts/docs_tables.py"


def test_every_declared_family_has_a_published_configuration() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {"index", *INDEX}
    assert {configuration(name)["model_type"] for name in INDEX} == set(BUILT_IN)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_published_ones(name: str, describe: Any) -> None:
    entry = INDEX[name]
    assert describe(name).info.parameter_count == pytest.approx(entry["parameters"], rel=entry["tolerance"])


@pytest.mark.parametrize("name", WITH_MTP_BESIDE)
def test_difference_from_the_hubs_count_is_qwens_mtp_layer(name: str, describe: Any) -> None:
    info = describe(name).info
    hidden, last = info.shape.hidden_size, f".layers.{info.shape.num_layers - 1}."
    layer = sum(_elements(header.shape) for tensor, header in info.tensors.items() if last in tensor)
    # A projection of two hidden states and three norms, beside a layer like the last one; the embedding is the model's.
    assert info.parameter_count + layer + 2 * hidden * hidden + 3 * hidden == WITH_MTP_BESIDE[name]


WITH_IMAGES = {
    "qwen3-vl-4b": (24, 1024, 3),
    "qwen3-vl-8b": (27, 1152, 3),
    "qwen3-vl-30b-a3b": (27, 1152, 3),
    "qwen3.5-4b": (24, 1024, 0),
    "qwen3.5-35b-a3b": (27, 1152, 0),
}
"""Blocks of the tower, its width, and the inner layers whose features the language model adds."""


@pytest.mark.parametrize("name", marked(WITH_IMAGES))
def test_towers_are_read_and_planned(name: str, describe: Any) -> None:
    info, (blocks, width, inner) = describe(name).info, WITH_IMAGES[name]
    images, layout = info.architecture.images, info.image_layout
    assert images is not None
    assert layout is not None
    # 1280 x 720 pixels are 80 x 45 patches of 16, an even number of rows once they are resized: 80 x 44.
    assert (layout.merge, layout.patch_width, layout.features(1, 44, 80)) == (2, 3 * 2 * 16 * 16, 880)
    assert layout.token == configuration(name)["image_token_id"]
    tower = {tensor: header for tensor, header in info.tensors.items() if tensor.startswith(images.tower)}
    vision = configuration(name)["vision_config"]
    hidden, ffn, merged = vision["hidden_size"], vision["intermediate_size"], 4 * vision["hidden_size"]
    assert (vision["depth"], hidden) == (blocks, width)
    linear = 4 * hidden * hidden + 2 * hidden * ffn  # of a block: qkv and proj, two layers of the MLP
    biases = 4 * hidden + ffn + hidden + 4 * hidden  # of these, and of two norms
    merger = merged * merged + merged + merged * vision["out_hidden_size"] + vision["out_hidden_size"]
    embeddings = layout.patch_width * hidden + hidden + vision["num_position_embeddings"] * hidden
    # Mergers of inner layers normalise after joining patches.
    expected = blocks * (linear + biases) + embeddings + merger + 2 * hidden + inner * (merger + 2 * merged)
    assert elements(tower) == expected
    adapted = [layer for layer in linear_layers(info, "train") if layer.startswith(images.tower)]
    assert len(adapted) == 4 * blocks + 2 * (1 + inner)
    topology, _ = published_plan(describe(name), INDEX[name]["layout"])
    first = stages(info.tensors, topology, info.shape.num_layers, info.shape.tied, images=images)[0]
    assert first.tower == expected


@pytest.mark.parametrize("name", marked(WITH_MTP))
def test_difference_from_the_hubs_count_is_the_mtp_layer(name: str, describe: Any) -> None:
    info = describe(name).info
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


# DeepSeek-V3's main model without scales, OLMoE's and Nemotron 3 Nano's, by public audits of their files; the last one's by
# Megatron-Bridge's card.
@pytest.mark.nightly_cases("deepseek-v3*")  # covered: the others, by the same count
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("deepseek-v3", 45_395),
        ("olmoe-1b-7b-0924", 3_219),
        ("nemotron-3-nano-30b-a3b", 6_243),
        ("nemotron-3-nano-4b", 263),
    ],
)
def test_tensors_are_as_many_as_in_the_published_files(name: str, count: int, describe: Any) -> None:
    assert len(describe(name).info.tensors) == count


@pytest.mark.parametrize("name", marked(name for name in INDEX if INDEX[name]["layout"]))
def test_layout_is_accepted_and_fits(name: str, describe: Any) -> None:
    topology, memory = published_plan(describe(name), INDEX[name]["layout"])
    assert isinstance(topology, Topology)
    assert isinstance(memory, Estimate)
    assert 0.1 * CARD_BYTES < memory.total < CARD_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_megatron_engine_supports_it(name: str, describe: Any) -> None:
    config = text_config(transformers_config(describe(name).path).to_dict())
    assert architecture_of(config).unsupported(config) == []


@pytest.mark.parametrize("name", NAMES)
def test_configuration_that_transformers_saves_means_the_same(name: str, describe: Any, tmp_path: Path) -> None:
    transformers_config(describe(name).path).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert _meaning(saved, describe(name).info) == _meaning(configuration(name), describe(name).info)


def _meaning(config: dict[str, Any], info: ModelInfo) -> dict[str, Any]:
    architecture = architecture_of(config)
    text = architecture.normalise(text_config(config))
    layers = expert_layers(text)
    return {
        "architecture": architecture,
        "shape": shape_of({"tie_word_embeddings": info.shape.tied, **config}),
        "latent": LatentAttention.from_config(text),
        "linear": LinearAttention.from_config(text),
        "state space": StateSpace.from_config(text),
        "mixers": single_mixers(text),
        "expert layers": None if layers is None or all(layers) else layers,
        "experts of a token": text.get("num_experts_per_tok"),
        "attention width": architecture.attention_width(text),
    }
