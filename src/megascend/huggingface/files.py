"""Hugging Face checkpoints: checked before anything is built, loaded completely or not at all, written whole."""

from __future__ import annotations

import json
import operator
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascend.errors import CheckpointError
from megascend.files import replacing
from megascend.huggingface.model_shape import ModelShape

# Files beside the weights that make a directory loadable by transformers.
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
TOKENIZER_FILES = (
    "tokenizer", "vocab", "merges", "added_tokens", "special_tokens_map", "spiece", "sentencepiece", "chat_template",
)  # fmt: skip
"""What the names of a tokenizer's files begin with."""
ADDITIONAL_TEMPLATES = "additional_chat_templates"
LFS_POINTER = b"version https://git-lfs"
WEIGHT_INDEX = "model.safetensors.index.json"
# Tensors that some checkpoints carry and no model of Megatron has: they are derived from the configuration.
DERIVED = ("rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")


def read_config(model_dir: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint directory.

    Raises:
        CheckpointError: the directory or the file is missing, or not JSON.
    """
    path = Path(model_dir) / "config.json"
    if not Path(model_dir).is_dir():
        name = str(model_dir)
        of_hub = not Path(model_dir).is_absolute() and len(Path(model_dir).parts) == 2
        advice = f"; if {name} is one of the Hub: hf download {name} --local-dir DIRECTORY" if of_hub else ""
        raise CheckpointError(
            f"model: {Path(model_dir).absolute()} is not a directory; it must hold a Hugging Face checkpoint{advice}"
        )
    if not path.is_file():
        raise CheckpointError(f"model: {path.absolute()} is missing; a Hugging Face checkpoint has one")
    config = _json_object(path)
    if not config.get("model_type"):
        raise CheckpointError(f"{path} names no model_type")
    return config


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # not JSON, or not even text
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors file says about a tensor: dtype as that format spells it (``F32``, ``BF16``), shape, and where it is."""

    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None


def tensor_headers(model_dir: Path) -> dict[str, TensorHeader]:
    """Every tensor of a safetensors checkpoint, from the files' headers alone.

    Raises:
        CheckpointError: a file is missing or truncated, or is not safetensors.
    """
    headers: dict[str, TensorHeader] = {}
    for path in weight_files(Path(model_dir)):
        headers.update(_headers(path))
    return headers


def tensor_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor; otherwise as :func:`tensor_headers`."""
    return {name: header.shape for name, header in tensor_headers(model_dir).items()}


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        CheckpointError: there are none.
    """
    index = model_dir / WEIGHT_INDEX
    if index.is_file():
        weight_map = _json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map that says which file holds which tensor")
        if not all(isinstance(name, str) and name for name in weight_map.values()):
            raise CheckpointError(f"{index}: its weight_map must give the name of a file for every tensor")
        return [model_dir / name for name in sorted(set(weight_map.values()))]
    if (model_dir / "model.safetensors").is_file():
        return [model_dir / "model.safetensors"]
    raise CheckpointError(
        f"{model_dir} holds neither model.safetensors nor {WEIGHT_INDEX}; other weight formats have to be converted first "
        "(AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))"
    )


def _headers(path: Path) -> dict[str, TensorHeader]:
    """The safetensors header: 8 bytes length, JSON, then the data (huggingface.co/docs/safetensors, "Format")."""
    if not path.is_file():
        raise CheckpointError(f"{path} is listed in {WEIGHT_INDEX} but missing")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if prefix == LFS_POINTER[:8] and prefix + file.read(len(LFS_POINTER) - 8) == LFS_POINTER:
                raise CheckpointError(f"{path} is a pointer of Git LFS, not the file: fetch it with git lfs pull")
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length + 8 > size:
                raise CheckpointError(f"{path} is truncated or not safetensors: {size} bytes cannot hold its header")
            content = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(content)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not safetensors: its header is not JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not safetensors: its header is not a JSON object")
    header.pop("__metadata__", None)
    try:
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0) + length + 8
        found = {
            name: TensorHeader(str(entry["dtype"]), tuple(map(operator.index, entry["shape"])), path)
            for name, entry in header.items()
        }
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{path} is not safetensors: its header must give dtype, shape and data_offsets of every tensor ({error})"
        ) from None
    if end != size:
        raise CheckpointError(f"{path} is truncated: {size} bytes on disk, {end} expected")
    return found


def check_vocabulary(sizes: ModelShape, shapes: dict[str, tuple[int, ...]]) -> None:
    """mcore-bridge pads a short embedding with zeros, silently: hold it against the configuration first."""
    expected = (sizes.vocab_size, sizes.hidden_size)
    for name, shape in shapes.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")) and len(shape) == 2 and shape != expected:
            raise CheckpointError(
                f"{name} has shape {shape}, config.json says {expected}: they are of different models"
            )


def copy_companions(
    source: Path, target: Path, dtype: str, change: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
) -> None:
    """Copy configuration and tokenizer files beside exported weights, with the dtype that the weights now have.

    Args:
        change: what becomes of ``config.json``.
    """
    for path in sorted(Path(source).iterdir()):
        if path.is_file() and path.suffix in COPIED_SUFFIXES and path.name != WEIGHT_INDEX:
            shutil.copyfile(path, target / path.name)
    copy_additional_templates(source, target)
    config = change(json.loads((target / "config.json").read_text()))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def copy_tokenizer(source: Path, target: Path, template: str | None) -> None:
    """Copy a model's tokenizer beside an adapter, so that ``AutoTokenizer`` loads it from there.

    Args:
        template: the chat template that it has been trained with, where that is not the model's.

    Raises:
        CheckpointError: a file cannot be read or written.
    """
    try:
        for path in sorted(Path(source).iterdir()):
            if path.is_file() and path.name.startswith(TOKENIZER_FILES) and path.suffix in COPIED_SUFFIXES:
                shutil.copyfile(path, target / path.name)
        copy_additional_templates(source, target)
    except OSError as error:
        raise CheckpointError(f"{target}: the tokenizer of {source} could not be copied: {error}") from error
    if template is not None:
        write_chat_template(target, template)


def copy_additional_templates(source: Path, target: Path) -> None:
    """Copy the chat templates that a tokenizer has beside its default one."""
    if (source / ADDITIONAL_TEMPLATES).is_dir():
        shutil.copytree(source / ADDITIONAL_TEMPLATES, target / ADDITIONAL_TEMPLATES, dirs_exist_ok=True)


def write_chat_template(folder: Path, template: str) -> None:
    """Make ``template`` the only chat template of the tokenizer in a directory, wherever readers look for one.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        with replacing(folder / "chat_template.jinja") as fresh:
            fresh.write_text(template, encoding="utf-8", newline="")
        for name in ("tokenizer_config.json", "chat_template.json", "processor_config.json"):  # of earlier versions
            path = folder / name
            if path.is_file() and "chat_template" in (settings := _json_object(path)):
                with replacing(path) as fresh:
                    text = json.dumps(settings | {"chat_template": template}, indent=2, ensure_ascii=False)
                    fresh.write_text(text + "\n", encoding="utf-8")
        shutil.rmtree(folder / ADDITIONAL_TEMPLATES, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: the chat template could not be written: {error}") from error
