"""Files of Hugging Face checkpoints: checked before anything is built, and read as transformers reads them."""

from __future__ import annotations

import json
import operator
import re
import shutil
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascend.config.documents import load_json
from megascend.errors import CheckpointError
from megascend.runtime.io.atomic import replacing

# Files other than weights that transformers needs to load a directory.
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
TOKENIZER_FILES = (
    "tokenizer", "vocab", "merges", "added_tokens", "special_tokens_map", "spiece", "sentencepiece", "chat_template",
)  # fmt: skip
"""Prefixes of the names of a tokenizer's files."""
ADDITIONAL_TEMPLATES = "additional_chat_templates"
GENERATION_CONFIG = "generation_config.json"
POINTER = re.compile(
    rb"(\xef\xbb\xbf)?(version https?://\S+\s+([\w.-]+ \S+\s+)*oid \S|# xet version \d|(\.\./)*(\.git)?/annex/objects/\S+\s*$)"
)
"""Beginning of the file that Git LFS, Xet or git-annex leave in place of one that they have not fetched."""
LARGEST_POINTER = 1024
"""Bytes of such a file, as Git LFS has it."""
WEIGHT_FILE = "model.safetensors"
WEIGHT_INDEX = f"{WEIGHT_FILE}.index.json"
ADAPTER_CONFIG = "adapter_config.json"
MAX_COUNT = 100_000
"""Most layers, experts or heads of a model."""
MAX_HEADER = 100_000_000
"""Longest header in bytes, as of the safetensors package."""
_SHARD_OF_RANKS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_DTYPE_KEYS = ("torch_dtype", "dtype")
FLOATS = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the dtypes of weights that are not quantised."""
# Buffers that old versions of transformers saved. No Megatron model has them: they are derived from the configuration.
DERIVED = ("rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")


def read_config(model_dir: Path) -> dict[str, Any]:
    """Read ``config.json`` of a checkpoint directory."""
    path = Path(model_dir) / "config.json"
    if not Path(model_dir).is_dir():
        raise CheckpointError(
            f"model: {Path(model_dir).absolute()} is not a directory; it must hold a Hugging Face checkpoint"
        )
    if not path.is_file():
        exported = (path.parent / "hf" / path.name).is_file()
        remedy = f"name {path.parent / 'hf'}, the run's model" if exported else "a Hugging Face checkpoint has one"
        raise CheckpointError(f"model: {path.absolute()} is missing; {remedy}")
    return read_config_file(path)


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a model's ``config.json``, wherever it is."""
    config = _json_object(path)
    if not config.get("model_type"):
        raise CheckpointError(f"{path} names no model_type; name a model's directory or its config.json")
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, value in section.items():
            # Loops of transformers and Megatron go over them, and none ends at a billion.
            if name.endswith(("_layers", "_experts", "_heads")) and isinstance(value, int) and value > MAX_COUNT:
                raise CheckpointError(f"{path}: {name} is {value}; at most {MAX_COUNT} are read")
    return config


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = load_json(path.read_bytes())
    except ValueError as error:  # not JSON, or not even text
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


@dataclass(frozen=True)
class TensorHeader:
    """Header entry of a tensor in a safetensors file.

    Attributes:
        dtype: as that format spells it (``F32``, ``BF16``).
        file: holds the tensor; None if it is not in a file.
        span: first byte of its data in the file, and the one after the last.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None
    span: tuple[int, int] = field(default=(0, 0), compare=False)


def tensor_headers(model_dir: Path) -> dict[str, TensorHeader]:
    """Read the header of every tensor of a safetensors checkpoint, without its data."""
    headers: dict[str, TensorHeader] = {}
    for path in weight_files(Path(model_dir)):
        headers.update(_headers(path))
    return headers


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, those that transformers reads, in its order.

    These are ``model.safetensors`` or what the index names. transformers passes over all others (shards of an earlier save,
    variants, ``pytorch_model.bin``, ``consolidated.safetensors``). Where several files hold a tensor, the last one counts.
    """
    _refuse_other_readings(model_dir)
    single_file, index = model_dir / WEIGHT_FILE, model_dir / WEIGHT_INDEX
    if not index.is_file():
        if single_file.is_file():
            return [single_file]
        raise CheckpointError(
            f"{model_dir} holds neither {WEIGHT_FILE} nor {WEIGHT_INDEX}; convert other formats first"
        )
    content = _json_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map that says which file holds which tensor")
    if not all(isinstance(name, str) and name for name in weight_map.values()):
        raise CheckpointError(f"{index}: its weight_map must give the name of a file for every tensor")
    # Sorted, because transformers reads them in that order and a later file overrides an earlier one.
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (model_dir / name).is_file()]:
        stale = f"; if {WEIGHT_FILE} is the model, remove the index" if single_file.is_file() else ""
        raise CheckpointError(f"{model_dir / missing[0]} is listed in {WEIGHT_INDEX} but missing{stale}")
    if single_file.is_file() and names != [WEIGHT_FILE]:
        raise CheckpointError(
            f"{model_dir} holds {WEIGHT_FILE}, which transformers would read, and {WEIGHT_INDEX}, which names {names[0]}: "
            "remove the one left from an earlier save"
        )
    if not isinstance(content.get("metadata"), dict):
        raise CheckpointError(f'{index} has no metadata, so transformers does not load it: add "metadata": {{}}')
    return [model_dir / name for name in names]


def _refuse_other_readings(model_dir: Path) -> None:
    """Raise CheckpointError where transformers would load more than the weights, or weights of another name."""
    if (model_dir / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{model_dir} holds {ADAPTER_CONFIG}, which transformers would add to the weights: move the adapter away, or merge "
            "it with megascend export --adapter"
        )
    config = model_dir / "config.json"
    weights_name = _json_object(config).get("transformers_weights") if config.is_file() else None
    if weights_name is not None:
        raise CheckpointError(
            f"{config}: transformers_weights is {weights_name!r}, the file that transformers would load; name that file "
            f"{WEIGHT_FILE} (or {WEIGHT_INDEX}) and remove the entry"
        )
    rank_shard = next(
        (path.name for path in sorted(model_dir.glob("shard-*")) if _SHARD_OF_RANKS.fullmatch(path.name)), None
    )
    if rank_shard is not None:
        raise CheckpointError(
            f"{model_dir} holds {rank_shard}, which transformers would load: move the shard-* files away"
        )


A_POINTER = "a pointer of Git LFS, Xet or git-annex, not the file: fetch it, with git lfs pull for example"


def is_pointer(path: Path) -> bool:
    """Check whether a file stands for one that a version control system has not fetched."""
    return path.stat().st_size <= LARGEST_POINTER and POINTER.match(path.read_bytes()) is not None


def _headers(path: Path) -> dict[str, TensorHeader]:
    """Read the safetensors header: 8 bytes length, JSON, then the data (huggingface.co/docs/safetensors, "Format")."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            # A clone without git-lfs has small text files instead of the weights.
            if is_pointer(path):
                raise CheckpointError(f"{path} is {A_POINTER}")
            # A file shorter than 8 bytes counts as a header that does not fit.
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length + 8 > size:
                raise CheckpointError(f"{path} is truncated or not safetensors: {size} bytes cannot hold its header")
            if length > MAX_HEADER:
                raise CheckpointError(f"{path} is not safetensors: a header of {length} bytes; at most {MAX_HEADER}")
            content = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(content)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not safetensors: its header is not JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not safetensors: its header is not a JSON object")
    # Not a tensor: free-form strings, such as {"format": "pt"}.
    header.pop("__metadata__", None)
    headers, start = {}, length + 8
    try:
        for name, entry in header.items():
            (first, last), shape = (
                map(operator.index, entry["data_offsets"]),
                tuple(map(operator.index, entry["shape"])),
            )
            if not 0 <= first <= last or min(shape, default=0) < 0:
                raise ValueError(f"{name:.80}: {entry!s:.80}")
            headers[name] = TensorHeader(str(entry["dtype"]), shape, path, (start + first, start + last))
        end = max((entry.span[1] for entry in headers.values()), default=start)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not safetensors: its header must give dtype, shape and data_offsets of every tensor ({error})"
        ) from None
    # The format has no gaps and no trailer, so the size shows an incomplete download.
    if end != size:
        raise CheckpointError(f"{path} is truncated: {size} bytes on disk, {end} expected")
    return headers


def companions(source: Path) -> list[Path]:
    """Return a checkpoint's files other than weights that belong to its model, without indexes of weights."""
    return [
        path
        for path in sorted(Path(source).iterdir())
        # An index of the source names its files, and the export writes its own.
        if path.is_file() and path.suffix in COPIED_SUFFIXES and not path.name.endswith(".index.json")
    ]


def copy_companions(source: Path, target: Path, config: Mapping[str, Any]) -> None:
    """Copy configuration and tokenizer files to exported weights, with ``config`` as the content of ``config.json``."""
    for path in companions(source):
        shutil.copyfile(path, target / path.name)
    copy_additional_templates(source, target)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a ``config.json`` with ``dtype`` under each of its keys for it, also in nested parts (``text_config``)."""
    changed = dict(config)
    for name, value in config.items():
        if name in _DTYPE_KEYS:
            changed[name] = dtype
        # Multimodal configurations name a dtype in text_config and vision_config.
        elif name.endswith("_config") and isinstance(value, dict) and any(key in value for key in _DTYPE_KEYS):
            changed[name] = with_dtype(value, dtype)
    return changed if any(key in config for key in _DTYPE_KEYS) else changed | {"dtype": dtype}


def copy_tokenizer(source: Path, target: Path, template: str | None) -> None:
    """Copy a model's tokenizer to an adapter for ``AutoTokenizer``, with ``template`` in place of its chat template, if
    given.
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
    """Copy a tokenizer's chat templates other than its default one."""
    # transformers saves further templates as files in this folder.
    if (source / ADDITIONAL_TEMPLATES).is_dir():
        shutil.copytree(source / ADDITIONAL_TEMPLATES, target / ADDITIONAL_TEMPLATES, dirs_exist_ok=True)


def write_chat_template(folder: Path, template: str) -> None:
    """Make ``template`` the only chat template of the tokenizer in a directory, in every file where it may be stored."""
    try:
        with replacing(folder / "chat_template.jinja") as fresh:
            # newline="": a template's line ends are part of the prompt and must not be translated.
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


def generation_settings(model: Path) -> dict[str, Any]:
    """Return generation_config.json of a model or adapter; without it, what transformers takes from config.json instead."""
    if (model / GENERATION_CONFIG).is_file():
        return _json_object(model / GENERATION_CONFIG)
    if not (model / "config.json").is_file():
        return {}
    from transformers import AutoConfig, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):  # an architecture that is not transformers' own
        return {key: value for key, value in read_config(model).items() if key.endswith("_token_id")}
    settings = json.loads(GenerationConfig.from_model_config(config).to_json_string())
    # Marks settings that transformers may replace by those of config.json again.
    settings.pop("_from_model_config", None)
    return settings


def end_tokens(model: Path) -> list[int]:
    """Return the tokens at which transformers and vLLM stop."""
    ends = generation_settings(model).get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def write_ends(model: Path, target: Path, ends: Collection[int]) -> list[int]:
    """Write a model's generation_config.json with the end tokens that it lacks to ``target``, and return these."""
    known = end_tokens(model)
    missing = sorted({*ends} - {*known})
    if missing:
        content = generation_settings(model) | {"eos_token_id": [*known, *missing]}
        try:
            with replacing(target / GENERATION_CONFIG) as fresh:
                fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{target}: {GENERATION_CONFIG} could not be written: {error}") from error
    return missing
