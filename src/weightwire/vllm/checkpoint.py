"""Check manifests against the checkpoint from which the engine was started."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from weightwire.errors import ManifestError
from weightwire.fp8 import SCALES, SCALES_DTYPE, VALUES_DTYPE, BlockFormat
from weightwire.manifest import Manifest, TensorSpec, in_prediction_head

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 2**28
HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
"""Suffixes of an embedding's name."""
NOT_LOADED = ("rotary_emb.inv_freq",)
"""Suffixes of tensors in old checkpoints that no loader reads."""


def headers(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read dtype and shape of every tensor, by name, from a directory's safetensors files; empty without files."""
    dtypes_and_shapes = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            # A damaged file may begin with any number.
            if size > MAX_HEADER_BYTES:
                raise ManifestError(f"{path}: a header of {size} bytes; at most {MAX_HEADER_BYTES} are read")
            header = json.loads(file.read(size))
        dtypes_and_shapes |= {
            name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__"
        }
    return dtypes_and_shapes


def fp8_blocks(model: str, config: Any) -> dict[str, BlockFormat]:
    """Return the weights of a checkpoint that are stored in fp8 blocks, by name; none if it is not quantised so.

    Args:
        model: its directory.
        config: the model's Hugging Face configuration.

    Raises:
        ManifestError: the directory or a weight's scales are missing, or they have another format.
    """
    settings = getattr(config, "quantization_config", None)
    settings = settings or getattr(getattr(config, "text_config", None), "quantization_config", None) or {}
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    if settings.get("quant_method") != "fp8" or not settings.get("weight_block_size"):
        return {}
    stored = headers(Path(model)) if Path(model).is_dir() else {}
    if not stored:
        raise ManifestError(
            f"{model} has weights in fp8 blocks (quantization_config), and is no directory with safetensors files, which say "
            "which: start the engine from a directory"
        )
    rows, columns = settings["weight_block_size"]
    blocks = BlockFormat(rows, columns, settings.get("scale_fmt") == "ue8m0")
    formats = {}
    for name, (dtype, shape) in stored.items():
        if dtype == "F8_E4M3":
            scales = stored.get(name + SCALES)
            # Published checkpoints have scales in either; vLLM computes with float32, which is what it is sent.
            if len(shape) < 2 or scales not in [(kind, blocks.blocks(shape)) for kind in ("F32", "BF16")]:
                raise ManifestError(
                    f"{model}: {name} {list(shape)} is in fp8, and its scales {name}{SCALES} are {scales}, not F32 or BF16 of "
                    f"blocks of {rows} x {columns}: it cannot be updated"
                )
            if "gate_up_proj" in name and shape[-2] // 2 % rows:
                raise ManifestError(
                    f"{model}: {name} {list(shape)} holds gate and up in one matrix, and blocks of {rows} rows have parts of both"
                )
            formats[name] = blocks
        elif dtype.startswith("F8"):
            raise ManifestError(f"{model}: {name} is stored in {dtype}, and cannot be updated")
    return formats


def prediction_tensors(names: Iterable[str], config: Any) -> set[str]:
    """Return the tensors of heads for multi-token prediction, which vLLM loads into a draft model only."""
    text = getattr(config, "text_config", config)
    layers = getattr(text, "num_hidden_layers", None) or 0
    heads = range(layers, layers + (getattr(text, "num_nextn_predict_layers", None) or 0))
    return {name for name in names if in_prediction_head(name, heads)}


class ExpectedTensors:
    """Tensors expected in an update: those of the checkpoint from which the engine was started.

    Args:
        model: its directory. If that does not exist (a name on a hub), manifests are not checked before the commit, in which
            vLLM's loaders and the check for layers without weights still find errors.
        config: the model's Hugging Face configuration.
    """

    def __init__(self, model: str, config: Any) -> None:
        directory = Path(model)
        stored = headers(directory) if directory.is_dir() else {}
        self._shapes = {name: shape for name, (_, shape) in stored.items()}
        # Loaders would cast values of another dtype, without their scales.
        self._dtypes = {
            key: value
            for name, (dtype, _) in stored.items()
            if dtype == "F8_E4M3"
            for key, value in ((name, VALUES_DTYPE), (name + SCALES, SCALES_DTYPE))
        }
        self._tied = bool(getattr(config, "tie_word_embeddings", False))
        self._predicting = prediction_tensors(self._shapes, config)
        self._accepted: tuple[TensorSpec, ...] | None = None
        if not self._shapes:
            log.warning(
                "no safetensors files at %s: offered tensors are compared with the model only at the commit", model
            )

    def check(self, manifest: Manifest) -> None:
        """Raise ManifestError unless the manifest has the checkpoint's tensors, of any dtype but for those in fp8."""
        # The same object as in the update before: see weightwire.manifest.
        if manifest.adapter is not None or not self._shapes or manifest.tensors is self._accepted:
            return
        specs = {spec.name: spec for spec in manifest.tensors}
        shapes = {name: shape for name, shape in self._shapes.items() if not name.endswith(NOT_LOADED)}
        if not self._predicting & specs.keys():  # the trainer keeps the heads as they are
            shapes = {name: shape for name, shape in shapes.items() if name not in self._predicting}
        if self._tied:  # either side may contain the head as a separate tensor
            shapes.pop(HEAD, None)
            if HEAD in specs:
                shapes[HEAD] = specs[HEAD].shape
        manifest.expect(
            TensorSpec(name, self._dtypes.get(name) or (specs[name].dtype if name in specs else "float32"), shape)
            for name, shape in shapes.items()
        )
        self._accepted = manifest.tensors


def tied_head_checked(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors for a model whose output layer is its embedding; vLLM drops a separate output layer silently."""
    head = embedding = None
    for name, tensor in tensors:
        if name == HEAD:
            head = tensor
        elif name.endswith(EMBEDDINGS):
            embedding = tensor
        # As soon as both have arrived, in whatever order.
        if head is not None and embedding is not None:
            require_equal_head(head, embedding)
            head = None
        yield name, tensor


def require_equal_head(head: torch.Tensor, embedding: torch.Tensor) -> None:
    """Raise ManifestError unless an output layer, or a part of it, has the bits of the embedding."""
    # Bits: in a sharded update, both hold NaN where this worker loads nothing.
    if not torch.equal(head.view(torch.uint8), embedding.view(torch.uint8)):
        raise ManifestError(
            f"{HEAD} of the update differs from the embedding, with which vLLM computes logits: start vLLM with "
            "tie_word_embeddings: false in config.json"
        )
