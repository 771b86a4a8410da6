"""Invalid model directories."""

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
    """Replace ``model`` by a damaged copy."""

    def arrange(folder: Path) -> None:
        source = (folder / "model").resolve()
        (folder / "model").unlink()
        shutil.copytree(source, folder / "model")
        damage(folder / "model")

    return Bad(words(says), arrange=arrange)


def remove(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def overwrite(name: str, content: str | bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def configure(**values: Any) -> Callable[[Path], Any]:
    """Set values of ``config.json``; None removes one."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | values
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def truncate(size: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:size])


def make_unreadable(name: str) -> Callable[[Path], Any]:
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
    configure(architectures=["Qwen3ForSequenceClassification"], num_labels=1)(folder)


MODELS = {
    "nothing there": Bad(words("model: | nowhere | is not a directory"), ("train", "run.yaml", "--set", "model=nowhere")),
    "a name of the Hub": Bad(
        words("model: | Qwen/Qwen3-8B | hf download"), ("train", "run.yaml", "--set", "model=Qwen/Qwen3-8B")
    ),
    "no config": model("config.json is missing", remove("config.json")),
    "config is not to be read": model("config.json cannot be read", make_unreadable("config.json")),
    "negative heads": model("config.json | num_attention_heads | -4", configure(num_attention_heads=-4)),
    "a reward model": model("score.weight is the head of | bradley_terry", reward_model),
    "weights cut off": model("model.safetensors is truncated | expected", truncate(-100)),
    "weights that are a pointer of git-lfs": model(
        "model.safetensors is a pointer of Git LFS | git lfs pull",
        overwrite("model.safetensors", "version https://git-lfs\noid 0"),
    ),
    "no tokenizer": model("tokenizer", remove("tokenizer.json")),
    "a tokenizer that is no JSON": model(
        "transformers cannot load the tokenizer | tokenizer.json", overwrite("tokenizer.json", "{")
    ),
    "a tokenizer of one token": model("the tokenizer knows 4 tokens, of which 1 are not special", one_token),
    "no chat template": model("data.jsonl:1 | need a chat template | data.chat_template", remove("chat_template.jinja")),
    "a chat template that is none": model("chat template | line 1", overwrite("chat_template.jinja", "{% if %}")),
}  # fmt: skip
