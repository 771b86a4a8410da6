"""Directories written tensor by tensor: what safetensors reads from them, and cleanup after failures."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megascend.errors import CheckpointError
from megascend.models.checkpoint_files import safetensors_writer
from megascend.models.checkpoint_files.exported import prediction_tensors
from megascend.models.checkpoint_files.files import WEIGHT_INDEX, read_config, tensor_headers
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.models.checkpoint_files.safetensors_writer import SafetensorsWriter
from megascend.models.checkpoint_files.writer import CheckpointWriter
from megascend.runtime.topology.model_shape import ModelShape
from support.exported import exported_tensors

TENSORS = {
    "model.embed_tokens.weight": torch.randn(7, 3).bfloat16(),
    "model.layers.0.odd": torch.randn(3).bfloat16(),  # 6 bytes: the next tensor would not be aligned
    "model.layers.0.bias": torch.randn(5),
    "model.layers.0.ünicode": torch.arange(4, dtype=torch.int64),
    "model.layers.0.scalar": torch.tensor(2.5),
    "model.layers.0.empty": torch.zeros(0, 3),
    "model.layers.1.transposed": torch.randn(6, 4).T,
    "model.layers.1.flags": torch.tensor([True, False, True]),
}


def make_source(folder: Path, tensors: dict[str, torch.Tensor], **config) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 2, "torch_dtype": "float32"} | config)
    )
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("file_bytes", [10**9, 100, 1], ids=lambda size: f"{size} bytes a file")
@pytest.mark.parametrize("seed", range(2))
def test_tensors_written_in_any_order_are_read_unchanged(tmp_path, file_bytes, seed):
    names = random.Random(seed).sample(list(TENSORS), len(TENSORS))
    writer = SafetensorsWriter(tmp_path, TENSORS, file_bytes)
    for name in names:
        writer.add(name, TENSORS[name])
    writer.finish()
    tensors = exported_tensors(tmp_path)
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name], tensor)


def test_index_maps_tensors_to_files(tmp_path):
    tensors = {f"t{number}": torch.full((10,), float(number)) for number in range(5)}
    writer = SafetensorsWriter(tmp_path, tensors, file_bytes=80)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    index = json.loads((tmp_path / WEIGHT_INDEX).read_text())
    assert index["metadata"]["total_size"] == 200
    assert [index["weight_map"][f"t{number}"] for number in range(5)] == [
        "model-00001-of-00003.safetensors",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ]
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])
            assert opened.metadata() == {"format": "pt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*index["weight_map"].values(), WEIGHT_INDEX})


def test_repeated_and_unexpected_tensors_raise_checkpoint_error(tmp_path):
    writer = SafetensorsWriter(tmp_path, ["a"])
    writer.add("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="a came twice"):
        writer.add("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="b is unexpected"):
        writer.add("b", torch.zeros(2))
    writer.abandon()


def test_large_tensors_are_written_from_few_buffers(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_writer, "PIECE", 64)
    monkeypatch.setattr(safetensors_writer, "PIECES", 2)
    tensors = {f"t{number}": torch.randn(100 + number) for number in range(20)}
    writer = SafetensorsWriter(tmp_path, tensors)
    for name, tensor in tensors.items():
        source = tensor.clone()
        writer.add(name, source)
        source.zero_()  # the writer must not need it any more
    writer.finish()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in exported_tensors(tmp_path).items())
    assert len(exported_tensors(tmp_path)) == 20


@pytest.mark.parametrize("failing", [1, 5, 39])
def test_background_write_error_is_raised(tmp_path, monkeypatch, failing):
    monkeypatch.setattr(safetensors_writer, "PIECE", 64)
    monkeypatch.setattr(safetensors_writer, "PIECES", 2)
    calls, pwrite = itertools.count(), os.pwrite

    def full(*arguments):
        if next(calls) >= failing:
            raise OSError(28, "No space left on device")
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    writer = SafetensorsWriter(tmp_path, ["a", "b"])

    def write():
        for name in ("a", "b"):
            writer.add(name, torch.randn(320))  # 20 pieces
        writer.finish()

    with pytest.raises(OSError, match="No space left"):
        write()
    writer.abandon()


WEIGHTS = {
    "model.layers.0.w": torch.randn(4, 4),
    "model.layers.1.w": torch.randn(4, 4),
    "lm_head.weight": torch.randn(8, 4),
}


def info_of(source: Path) -> ModelInfo:
    """Build the ModelInfo that an engine has for a checkpoint with these layers."""
    headers = tensor_headers(source)
    extra = {name: headers.pop(name) for name in prediction_tensors(read_config(source), headers)}
    shape = ModelShape(4, num_layers=2, num_heads=1, num_query_groups=1, vocab_size=8, ffn_hidden_size=8)
    return ModelInfo(shape, headers, 0, 0, 4, extra=extra)


def write(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> None:
    with CheckpointWriter(source, target, "float32", info_of(source)) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish()


def test_export_is_complete_and_includes_untrained_tensors(tmp_path):
    head = {"model.layers.2.eh_proj.weight": torch.randn(3, 3).half()}
    source = make_source(tmp_path / "source", WEIGHTS | head, num_nextn_predict_layers=1)
    new = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    write(source, tmp_path / "a" / "out", new)
    tensors = exported_tensors(tmp_path / "a" / "out")
    assert set(tensors) == set(WEIGHTS | head)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in (new | head).items())
    assert (tmp_path / "a" / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "a" / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    assert not list((tmp_path / "a").glob(".*"))


def test_source_may_be_overwritten(tmp_path):
    source = make_source(tmp_path / "source", WEIGHTS)
    write(source, source, {name: -tensor for name, tensor in WEIGHTS.items()})
    assert all(torch.equal(exported_tensors(source)[name], -tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.parametrize("where", ["top", "text_config", "nowhere"])
def test_config_of_an_untied_export_disables_tying(tmp_path, where):
    """Disable the setting: readers that trust it would use the embedding as output layer."""
    setting = {"tie_word_embeddings": True}
    config = {"top": setting, "text_config": {"text_config": setting}, "nowhere": {}}[where]
    source = make_source(tmp_path / "source", WEIGHTS, **config)
    write(source, tmp_path / "out", WEIGHTS)
    config_file = json.loads((tmp_path / "out" / "config.json").read_text())
    part = config_file["text_config"] if where == "text_config" else config_file
    assert part["tie_word_embeddings"] is False


def test_wrong_tensors_raise_and_keep_the_old_target(tmp_path):
    source = make_source(tmp_path / "source", WEIGHTS)
    target = make_source(tmp_path / "out", {"earlier": torch.ones(1)})
    lacking = {name: tensor for name, tensor in WEIGHTS.items() if name != "model.layers.1.w"}
    with pytest.raises(CheckpointError, match=r"it lacks model.layers.1.w"):
        write(source, target, lacking)
    assert torch.equal(exported_tensors(target)["earlier"], torch.ones(1))
    assert not list(tmp_path.glob(".*"))


def test_exception_while_writing_leaves_no_files(tmp_path):
    source = make_source(tmp_path / "source", WEIGHTS)

    def fail_half_way():
        with CheckpointWriter(source, tmp_path / "out", "float32", info_of(source)) as writer:
            writer.add("model.layers.0.w", WEIGHTS["model.layers.0.w"])
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_directory_without_a_checkpoint_is_not_replaced(tmp_path):
    source = make_source(tmp_path / "source", WEIGHTS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="is not a Hugging Face checkpoint"):
        CheckpointWriter(source, tmp_path / "out", "float32", info_of(source))
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"
    assert not list(tmp_path.glob(".*"))
