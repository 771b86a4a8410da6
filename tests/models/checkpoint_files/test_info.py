"""Information on a checkpoint's model: counts compared with transformers, FLOPs with a calculation by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.files import tensor_headers
from megascend.models.checkpoint_files.info import inspect_checkpoint, is_tied, linear_layers, shape_of
from megascend.runtime.topology.model_shape import ModelShape
from megascend.testing import write_tiny_checkpoint
from megascend.testing.parity import case_checkpoint
from megascend.testing.reference import run_reference

HIDDEN, LAYERS, VOCABULARY, MLP, EXPERT = 64, 4, 320, 128, 64
QUERY, KEY_VALUE = 4 * 16, 2 * 16
ATTENTION = HIDDEN * (2 * QUERY + 2 * KEY_VALUE)
MODELS = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "qwen2 (biases)": ("qwen2", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "MoE": ("qwen3_moe", {}),
}


COUNT = """
import json, sys
from transformers import AutoModelForCausalLM
print(json.dumps([AutoModelForCausalLM.from_pretrained(path).num_parameters() for path in sys.argv[1:]]))
"""


def test_parameter_counts_match_transformers(parity_folder):
    paths = [case_checkpoint(parity_folder, arch, **overrides) for arch, overrides in MODELS.values()]
    completed = run_reference(COUNT, *paths)
    assert completed.returncode == 0, completed.stderr
    counts = json.loads(completed.stdout.splitlines()[-1])
    assert [inspect_checkpoint(path).parameter_count for path in paths] == counts


def expected_flops(length: int, layer: int, products: int = 3) -> float:
    """Compute 2 FLOPs per weight, token and product, plus attention scores and values over half of ``length``."""
    projections = products * 2 * (LAYERS * layer + VOCABULARY * HIDDEN)
    attention = 3 * LAYERS * 2 * (2 * QUERY) * length / 2
    return projections + attention


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("length", [1, 512])
def test_flops_of_a_dense_model(parity_folder, tied, length):
    path = case_checkpoint(parity_folder, "qwen3", **({"tie_word_embeddings": True} if tied else {}))
    assert inspect_checkpoint(path).flops_per_token(length) == expected_flops(length, ATTENTION + 3 * HIDDEN * MLP)


def test_flops_count_active_experts(parity_folder):
    path = case_checkpoint(parity_folder, "qwen3_moe")
    layer = ATTENTION + 4 * HIDDEN + 2 * 3 * HIDDEN * EXPERT  # router, and 2 of 4 experts
    assert inspect_checkpoint(path).flops_per_token(128) == expected_flops(128, layer)


def test_frozen_weights_need_two_products_instead_of_three(parity_folder):
    info = inspect_checkpoint(case_checkpoint(parity_folder, "qwen3"))
    layer = ATTENTION + 3 * HIDDEN * MLP
    assert info.flops_per_token(512, frozen=True) == expected_flops(512, layer, products=2)


def test_linear_layers_match_transformers(parity_folder):
    attention = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]
    for arch, mlp in (
        ("qwen3", ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]),
        ("qwen3_moe", ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]),
    ):
        path = case_checkpoint(parity_folder, arch, num_hidden_layers=2)
        expected = [f"model.layers.{layer}.{name}" for layer in range(2) for name in mlp + attention]
        ends = ["lm_head", "model.embed_tokens"]
        info = inspect_checkpoint(path)
        assert sorted(linear_layers(info)) == sorted([*expected, *ends])
        tied = {name: header for name, header in info.tensors.items() if name != "lm_head.weight"}
        assert sorted(linear_layers(replace(info, tensors=tied))) == sorted(expected), (
            "one weight for embedding and head is adapted as neither"
        )


def test_shape_and_tensor_names_match_the_checkpoint(parity_folder):
    path = case_checkpoint(parity_folder, "qwen3_moe", num_hidden_layers=2)
    info = inspect_checkpoint(path)
    assert (info.shape.num_layers, info.shape.num_heads, info.shape.num_query_groups) == (2, 4, 2)
    assert (info.shape.num_experts, info.shape.moe_ffn_hidden_size, info.shape.vocab_size) == (4, EXPERT, VOCABULARY)
    assert info.attention_width == QUERY
    assert len(info.tensor_names) == len(set(info.tensor_names))
    assert {"lm_head.weight", "model.layers.1.mlp.experts.3.down_proj.weight"} <= set(info.tensor_names)


def test_head_dim_defaults_to_the_hidden_size_over_the_heads(parity_folder, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(case_checkpoint(parity_folder, "llama"), path)
    config = json.loads((path / "config.json").read_text())
    config.pop("head_dim")
    (path / "config.json").write_text(json.dumps(config))
    assert inspect_checkpoint(path).attention_width == 64


@pytest.mark.parametrize("tied", [False, True])
def test_head_of_a_reward_model_raises_checkpoint_error(parity_folder, tmp_path, tied):
    """Refuse reward models: with a tied embedding, engine single used to train them without their head."""
    source = case_checkpoint(parity_folder, "qwen3", **({"tie_word_embeddings": True} if tied else {}))
    target = Path(shutil.copytree(source, tmp_path / "reward-model"))
    (target / "model.safetensors").rename(target / "model-layers.safetensors")
    save_file({"score.weight": numpy.zeros((1, HIDDEN), numpy.float32)}, target / "model-score.safetensors")
    index = {name: path.name for path in target.glob("*.safetensors") for name in tensor_headers_of(path)}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    with pytest.raises(CheckpointError, match=r"score\.weight is the head of .*a reward model"):
        inspect_checkpoint(target)


def tensor_headers_of(path: Path) -> list[str]:
    with safe_open(path, "numpy") as file:
        return list(file.keys())


@pytest.mark.parametrize(
    ("kind", "setting", "head", "expected"),
    [
        ("llama", True, "other", False),
        ("llama", True, "equal", True),
        ("llama", False, "equal", False),
        ("llama", True, "near", False),
        ("gemma", None, "absent", True),  # the architecture's own default
        ("gemma", None, "other", False),
        ("llama", None, "equal", False),
    ],
)
def test_is_tied_follows_the_files(tmp_path, kind, setting, head, expected):
    config = {"model_type": kind} | ({} if setting is None else {"tie_word_embeddings": setting})
    (tmp_path / "config.json").write_text(json.dumps(config))
    embedding = numpy.arange(12, dtype=numpy.float32).reshape(4, 3)
    other = embedding.copy()
    other[3, 2] = numpy.nextafter(other[3, 2], 0)  # differs in the last bytes only
    heads = {"equal": embedding, "near": other, "other": -embedding}
    tensors = {"model.embed_tokens.weight": embedding} | ({"lm_head.weight": heads[head]} if head in heads else {})
    save_file(tensors, tmp_path / "model.safetensors")
    shape = ModelShape(3, num_layers=1, num_heads=1, num_query_groups=1, vocab_size=4, ffn_hidden_size=8)
    assert is_tied(config, shape, tensor_headers(tmp_path), tmp_path) is expected


def test_outer_setting_ties_the_embeddings_of_multimodal_models(tmp_path: Path) -> None:
    """Qwen3-VL-MoE's text_config says true when transformers saves it, whatever the model is."""
    path = write_tiny_checkpoint(tmp_path / "model", "qwen3_vl_moe")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for outer, inner in ((False, True), (True, False)):
        config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = outer, inner
        assert shape_of(config).tied is outer
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = True
    assert shape_of(config).tied is True
    del config["text_config"]["tie_word_embeddings"]
    assert shape_of(config).tied is False
