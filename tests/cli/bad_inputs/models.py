"""Model directories that cannot be trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import load_file, save_file

from bad_inputs.row import UNREADABLE, Bad, words

INDEX = "model.safetensors.index.json"


def model(says: str, damage: Callable[[Path], Any]) -> Bad:
    """``model`` is a copy with this damage."""

    def arrange(folder: Path) -> None:
        source = (folder / "model").resolve()
        (folder / "model").unlink()
        shutil.copytree(source, folder / "model")
        damage(folder / "model")

    return Bad(words(says), arrange=arrange)


def removed(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def written(name: str, content: str | bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def configured(**values: Any) -> Callable[[Path], Any]:
    """``config.json`` with these values; None removes one."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | values
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def cut(size: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:size])


def header(text: str) -> Callable[[Path], Any]:
    return written("model.safetensors", len(text).to_bytes(8, "little") + text.encode())


def folder_instead(name: str) -> Callable[[Path], Any]:
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


def unreadable(name: str) -> Callable[[Path], Any]:
    return lambda folder: ((folder / name).unlink(), (folder / name).symlink_to(UNREADABLE))


def one_token(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {"a": 0}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def reward_model(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    weights.pop("lm_head.weight", None)
    save_file(weights | {"score.weight": numpy.zeros((1, hidden), numpy.float32)}, folder / "model.safetensors")
    configured(architectures=["Qwen3ForSequenceClassification"], num_labels=1)(folder)


MODELS = {
    "nothing there": Bad(words("model: | nowhere | is not a directory"), ("train", "run.yaml", "--set", "model=nowhere")),
    "a file": Bad(words("model: | data.jsonl | is not a directory"), ("train", "run.yaml", "--set", "model=data.jsonl")),
    "a name of the Hub": Bad(
        words("model: | Qwen/Qwen3-8B | hf download"), ("train", "run.yaml", "--set", "model=Qwen/Qwen3-8B")
    ),
    "no config": model("config.json is missing", removed("config.json")),
    "config is a folder": model("config.json", folder_instead("config.json")),
    "a link to itself": Bad(
        words("model: | loop | is not a directory"),
        ("train", "run.yaml", "--set", "model=loop"),
        lambda folder: (folder / "loop").symlink_to("loop"),
    ),
    "config is not to be read": model("config.json cannot be read", unreadable("config.json")),
    "weights are not to be read": model("model.safetensors cannot be read", unreadable("model.safetensors")),
    "config is not JSON": model("config.json is not valid JSON | line 1", written("config.json", "{nope")),
    "config is not UTF-8": model("config.json is not valid JSON", written("config.json", b'{"a": "caf\xe9"}')),
    "config is a list": model("config.json must hold a JSON object | list", written("config.json", "[1]")),
    "no model_type": model("config.json names no model_type", configured(model_type=None)),
    "no hidden size": model("config.json | hidden_size", configured(hidden_size=None)),
    "layers in words": model("config.json | num_hidden_layers | 'two'", configured(num_hidden_layers="two")),
    "negative heads": model("config.json | num_attention_heads | -4", configured(num_attention_heads=-4)),
    "another vocabulary": model("(320, 32) | (999, 32) | different models", configured(vocab_size=999)),
    "text part in words": model("config.json | text_config | 'x'", configured(text_config="x")),
    "a reward model": model("score.weight is the head of | Run files | docs/data.md", reward_model),
    "no weights": model("neither model.safetensors nor", removed("model.safetensors")),
    "weights of torch": model(
        "neither model.safetensors nor | converted first", lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin")
    ),
    "weights cut off": model("model.safetensors is truncated | expected", cut(-100)),
    "weights cut off in the header": model("model.safetensors is truncated | 20 bytes", cut(20)),
    "empty weights": model("model.safetensors is truncated | 0 bytes", cut(0)),
    "weights that are a pointer of git-lfs": model(
        "model.safetensors is a pointer of Git LFS | git lfs pull", written("model.safetensors", "version https://git-lfs\noid 0")
    ),
    "a header that is no JSON": model("model.safetensors is not safetensors | not JSON", header("{nope")),
    "a header that is a list": model("model.safetensors is not safetensors | not a JSON object", header("[1]")),
    "a header without offsets": model(
        "model.safetensors is not safetensors | data_offsets", header('{"a": {"dtype": "F32", "shape": [1]}}')
    ),
    "an index that is no JSON": model(f"{INDEX} is not valid JSON", written(INDEX, "{")),
    "an index without a map": model(f"{INDEX} | weight_map", written(INDEX, "{}")),
    "an index of numbers": model(f"{INDEX} | weight_map | name of a file", written(INDEX, '{"weight_map": {"a": 5}}')),
    "a shard that is missing": model(
        f"model-2.safetensors is listed in {INDEX} but missing", written(INDEX, '{"weight_map": {"a": "model-2.safetensors"}}')
    ),
    "no tokenizer": model("tokenizer", removed("tokenizer.json")),
    "a tokenizer that is no JSON": model(
        "transformers cannot load the tokenizer | tokenizer.json", written("tokenizer.json", "{")
    ),
    "a tokenizer of another kind": model("transformers cannot load the tokenizer", written("tokenizer.json", '{"a": 1}')),
    "a tokenizer of one token": model("the tokenizer knows 4 tokens, of which 1 are not special", one_token),
    "tokenizer settings that are a list": model("tokenizer", written("tokenizer_config.json", "[1]")),
    "no chat template": model("data.jsonl:1 | need a chat template | data.chat_template", removed("chat_template.jinja")),
    "a chat template that is none": model("chat template | line 1", written("chat_template.jinja", "{% if %}")),
}  # fmt: skip
