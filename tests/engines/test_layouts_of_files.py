"""Engines load the files of a checkpoint that transformers loads, or raise CheckpointError."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import layouts_of_files
import pytest
import torch
from layouts_of_files import HEAD, LAYOUTS, build, results

from megascend.testing import run_distributed
from support.forked_programs import run_forked

ENGINES = ("megatron", "single")
REFUSED = {
    "untied, no head": "tie_word_embeddings: false, and no file holds lm_head.weight",
    "no embedding": "holds lm_head.weight and no embedding",
    "adapter beside": "adapter_config.json, which transformers would add",
    "adapter config alone": "adapter_config.json, which transformers would add",
    "shard absent": "is listed in model.safetensors.index.json but missing",
    "index beside whole": "remove the one left from an earlier save",
    "index without metadata": 'add "metadata"',
    "variant alone": "holds neither model.safetensors nor",
    "other file by config": "transformers_weights is 'other.safetensors'",
    "distributed shards": "shard-00000-model-00001-of-00001.safetensors",
    "tensor missing": "model.layers.1.self_attn.q_proj",
    "bias without a place": "model.layers.1.self_attn.q_proj.bias",
    "config with fewer layers": "model.layers.1.",
}
"""Layouts that no engine loads, and words of the sentence that says so."""
IN_CI = ("tied, equal head", "tied, other head", "tensor in two shards", "adapter beside", "bias without a place")
IN_CI += ("fused experts",)
TIED = ("tied, no head", "tied, equal head", "tied, equal head of another dtype")


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.nightly) for name in names]


def program(engine: str, folder: Path) -> dict[str, Any]:
    result = folder / f"{engine}.result"
    completed = run_forked(Path(layouts_of_files.__file__), engine, folder, result)
    assert completed.returncode == 0, completed.stderr[-6000:]
    return torch.load(result, weights_only=False)


@pytest.fixture(scope="module")
def table_of(tmp_path_factory, megatron_imported):
    """Return a function from a layout to the results of its group: each engine's, and transformers' of layouts and exports."""

    @cache
    def make(in_ci: bool) -> dict[str, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("layouts")
        build(folder, [name for name in LAYOUTS if (name in IN_CI) is in_ci])
        [megatron] = run_distributed(results, 1, "megatron", folder, init=False)
        tables = {"megatron": megatron, "single": program("single", folder)}
        return tables | {"transformers": program("transformers", folder)}

    return lambda layout: make(layout in IN_CI)


def largest_difference(first, second) -> float:
    return max(abs(a - b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", marked(name for name in LAYOUTS if name not in REFUSED))
def test_engine_loads_and_exports_like_transformers(table_of, engine, layout):
    table = table_of(layout)
    expected, actual = table["transformers"][layout], table[engine][layout]
    assert not isinstance(expected, str), expected
    assert not isinstance(actual, str), actual
    logprobs, names, tied = actual
    assert largest_difference(logprobs, expected) < 2e-5
    exported = table["transformers"][f"{engine}-exports/{layout}"]
    assert not isinstance(exported, str), exported
    assert largest_difference(exported, expected) < 2e-5
    assert (HEAD in names) is (layout not in TIED)
    assert tied is (layout in TIED)
    if layout == "fused experts":
        assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} <= set(names)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", marked(REFUSED))
def test_engine_refuses_files_that_it_would_load_differently(table_of, engine, layout):
    message = table_of(layout)[engine][layout]
    assert isinstance(message, str), "it was loaded"
    assert REFUSED[layout] in message
