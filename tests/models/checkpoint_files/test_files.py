"""Checkpoint directories: problems are detected from a few bytes, and copies are complete."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig

from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.errors import CheckpointError
from megascend.models.checkpoint_files.files import (
    WEIGHT_INDEX,
    copy_companions,
    copy_tokenizer,
    read_config,
    tensor_headers,
    with_dtype,
    write_ends,
)
from megascend.models.checkpoint_files.info import check_vocabulary
from megascend.runtime.topology.model_shape import ModelShape

TENSORS = {"a.weight": torch.zeros(3, 2), "b.bias": torch.zeros(5, dtype=torch.bfloat16), "c": torch.tensor(1.0)}
SHAPES = {"a.weight": (3, 2), "b.bias": (5,), "c": ()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 10}')
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"config\.json is missing"),
        ("{", r"config\.json is not valid JSON: .*line 1"),
        ("\xff\xfe", r"config\.json is not valid JSON"),
        ("[]", r"config\.json must hold a JSON object, found list"),
        ("{}", r"config\.json names no model_type"),
    ],
)
def test_invalid_config_raises_checkpoint_error(folder, text, message):
    (folder / "config.json").unlink() if text is None else (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message):
        read_config(folder)


def test_directory_of_a_run_is_refused_with_its_model(folder):
    (folder / "hf").mkdir()
    (folder / "config.json").rename(folder / "hf" / "config.json")
    with pytest.raises(CheckpointError, match=rf"config\.json is missing; name {folder / 'hf'}, the run's model"):
        read_config(folder)


@pytest.mark.parametrize("name", ["nowhere", "config.json"])
def test_missing_directory_raises_checkpoint_error(folder, name):
    with pytest.raises(CheckpointError, match=rf"{name} is not a directory"):
        read_config(folder / name)


def test_shapes_of_several_files_are_merged(folder):
    (folder / "model.safetensors").unlink()
    names = {"a.weight": "one.safetensors", "b.bias": "two.safetensors", "c": "two.safetensors"}
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "one.safetensors")
    save_file({name: TENSORS[name] for name in ("b.bias", "c")}, folder / "two.safetensors")
    (folder / WEIGHT_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert {name: header.shape for name, header in tensor_headers(folder).items()} == SHAPES
    (folder / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"two\.safetensors is listed in {WEIGHT_INDEX} but missing"):
        tensor_headers(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_invalid_index_raises_checkpoint_error(folder, text):
    (folder / WEIGHT_INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{WEIGHT_INDEX}.*(not valid JSON|JSON object|weight_map)"):
        tensor_headers(folder)


def test_every_truncation_raises_checkpoint_error(folder):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
            tensor_headers(folder)
    path.write_bytes(content + b"x")
    with pytest.raises(CheckpointError, match=rf"{len(content) + 1} bytes on disk, {len(content)} expected"):
        tensor_headers(folder)


@pytest.mark.parametrize("header", [b"not json", b"[1, 2]  ", b"\xff" * 8])
def test_invalid_safetensors_header_raises_checkpoint_error(folder, header):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="is not safetensors"):
        tensor_headers(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [-1], "data_offsets": [-4, 4]},
        {"shape": [1], "data_offsets": [8, 4]},
        {"shape": [1], "data_offsets": [0.0, 4.0]},
        {"shape": [1], "data_offsets": [0, 4, 4]},
        {"shape": [-1], "data_offsets": [0, 4]},
    ],
)
def test_tensor_outside_its_file_is_refused(folder, entry):
    header = json.dumps({"a": {"dtype": "F32", **entry}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0000")
    with pytest.raises(CheckpointError, match="is not safetensors"):
        tensor_headers(folder)


def test_header_of_gigabytes_is_not_read(folder):
    path = folder / "model.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    os.truncate(path, 2**40 + 8)  # without content, which takes no room
    with pytest.raises(CheckpointError, match="a header of 1099511627776 bytes"):
        tensor_headers(folder)


def test_other_formats_raise_checkpoint_error(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .* convert other formats first"):
        tensor_headers(folder)


def test_embedding_and_output_must_match_the_config():
    sizes = ModelShape(4, num_layers=1, num_heads=1, num_query_groups=1, vocab_size=10, ffn_hidden_size=8)
    good = {
        "model.embed_tokens.weight": (10, 4),
        "lm_head.weight": (10, 4),
        "model.layers.0.mlp.up_proj.weight": (8, 4),
    }
    check_vocabulary(sizes, good)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        for shape in ((12, 4), (10, 8)):
            with pytest.raises(CheckpointError) as raised:
                check_vocabulary(sizes, good | {name: shape})
            assert f"{name} has shape {shape}, config.json says (10, 4)" in str(raised.value)


def test_companions_are_copied_without_indexes_of_weights(folder, tmp_path):
    for name in (
        "tokenizer.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "modeling_x.py",
        "q.tiktoken",
    ):
        (folder / name).write_text(name)
    for name in (WEIGHT_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json", "README.md"):
        (folder / name).write_text("{}")
    (folder / "subfolder.json").mkdir()
    target = tmp_path / "target"
    target.mkdir()
    copy_companions(folder, target, {"model_type": "qwen3", "author": "Æ"})
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "modeling_x.py",
        "q.tiktoken",
        "tokenizer.json",
        "tokenizer.model",
    ]
    assert (target / "merges.txt").read_text() == "merges.txt"
    assert json.loads((target / "config.json").read_bytes()) == {"model_type": "qwen3", "author": "Æ"}


TEMPLATE = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"


@pytest.mark.parametrize("storage", ["in a file", "in the configuration", "one for tools", "none"])
@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["trained with another", "trained with its own"])
def test_copied_tokenizer_has_the_training_template(tmp_path, storage, template):
    source, target = tmp_path / "model", tmp_path / "adapter"
    tokenizer = byte_tokenizer(256)
    tokenizer.chat_template = {"none": None, "one for tools": {"default": "a", "tool_use": "b"}}.get(storage, "a")
    tokenizer.save_pretrained(source)
    if storage == "in the configuration":
        (source / "chat_template.jinja").unlink()
        path = source / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "a"}))
    source_template = AutoTokenizer.from_pretrained(source).chat_template
    assert source_template == tokenizer.chat_template
    target.mkdir()
    copy_tokenizer(source, target, template)
    copy = AutoTokenizer.from_pretrained(target)
    assert copy.chat_template == (source_template if template is None else TEMPLATE)
    assert copy("abc") == tokenizer("abc")
    if template is not None and storage == "in the configuration":  # for readers that only read tokenizer_config.json
        assert json.loads((target / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE


def test_companions_include_templates_for_tools(tmp_path):
    source, target = tmp_path / "model", tmp_path / "hf"
    tokenizer = byte_tokenizer(256)
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    tokenizer.save_pretrained(source)
    (source / "config.json").write_text('{"model_type": "qwen3"}')
    target.mkdir()
    copy_companions(source, target, {"model_type": "qwen3"})
    assert AutoTokenizer.from_pretrained(target).chat_template == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32", "torch_dtype": "float16"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        (
            {"text_config": {"dtype": "float32", "n": 1}, "other_config": {"n": 2}},
            {"text_config": {"dtype": "bfloat16", "n": 1}, "other_config": {"n": 2}, "dtype": "bfloat16"},
        ),
    ],
)
def test_with_dtype_changes_every_place_that_names_one(config, expected):
    before = json.dumps(config)
    assert with_dtype(config, "bfloat16") == expected
    assert json.dumps(config) == before


@pytest.mark.parametrize(
    ("generation", "config", "ends", "expected"),
    [
        ({"eos_token_id": 1, "top_p": 0.5}, {}, {2}, [1, 2]),
        ({"eos_token_id": [3, 1]}, {}, {2, 1}, [3, 1, 2]),
        ({"eos_token_id": [1, 2]}, {}, {2}, [1, 2]),
        ({"eos_token_id": 1}, {}, set(), 1),
        ({"top_p": 0.5}, {"eos_token_id": 1}, {2}, [2]),  # transformers does not read config.json beside it
        (None, {"eos_token_id": 1}, {2}, [1, 2]),
        (None, {}, {2}, [2]),
    ],
)
def test_learned_ends_are_added_to_those_that_transformers_reads(
    generation: dict | None, config: dict, ends: set[int], expected: list[int] | int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "bos_token_id": 0, **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    write_ends(tmp_path, tmp_path, ends)
    written = GenerationConfig.from_pretrained(tmp_path)
    assert written.eos_token_id == expected
    assert written.top_p == (generation or {}).get("top_p")
    assert generation is not None or written.bos_token_id == 0
