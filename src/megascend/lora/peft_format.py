"""Adapters on disk as Hugging Face PEFT keeps them: ``adapter_config.json`` beside ``adapter_model.safetensors``.

PEFT knows no dropout for parameters, so an adapter of experts carries ``lora_dropout`` 0.0 in its PEFT files. Who needs
the value that it was trained with must keep it elsewhere, as ``megascend_adapter.json`` does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megascend.config import Lora
from megascend.errors import CheckpointError
from megascend.huggingface.exported import some
from megascend.lora.factors import Factors
from megascend.lora.peft_settings import CONFIG, check_plain, targeted, to_config, to_lora
from megascend.lora.peft_tensors import WEIGHTS, to_factors, to_tensors


def write(
    folder: Path,
    lora: Lora,
    factors: Mapping[str, Factors],
    base_model: str,
    known: Collection[str] | None = None,
) -> None:
    """Write both files into ``folder``, which exists; ``peft.PeftModel.from_pretrained(model, folder)`` loads them.

    Args:
        folder: where; files of the same names are overwritten. Atomicity is the caller's.
        lora: rank, alpha, rslora and dropout are written, dropout as 0.0 beside fused experts (see the module).
        factors: of every adapted projection by its Hugging Face name; fused experts as ``....mlp.experts.down_proj``.
        base_model: name or path of the base model, for the reader's information.
        known: every projection of the base model that PEFT could adapt. With it the configuration names layers by their
            ends (``q_proj``) where all that end so are adapted; without it, by their whole names. A model that has fused
            experts and other MLPs beside them is recognised by it as well, should ``factors`` be of the latter only.

    Raises:
        CheckpointError: the factors do not fit ``lora`` or each other, hold non-finite values, or cannot be written.
    """
    try:
        tensors = to_tensors(factors, lora.rank)
        config = to_config(lora, factors, base_model, known)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except (CheckpointError, OSError, SafetensorError) as error:
        raise CheckpointError(f"adapter {folder} could not be written: {error}") from None


def read(folder: Path) -> tuple[Lora, dict[str, Factors]]:
    """Read an adapter that PEFT or :func:`write` saved.

    Returns:
        The settings (``targets`` as the configuration lists them if that says the same, else the adapted layers' whole
        names; no seed, optimizer or schedule) and the factors by Hugging Face name, in float32.

    Raises:
        CheckpointError: a file is missing or damaged, or holds what plain LoRA of one rank cannot express; the message
            names the file, the field or tensor, and its value.
    """
    try:
        config = _load_config(folder / CONFIG)
        check_plain(config)
        factors = to_factors(_load_tensors(folder), config["r"], config.get("target_parameters") or [])
        return to_lora(config, factors), factors
    except CheckpointError as error:
        raise CheckpointError(f"adapter {folder}: {error}") from None


def check_complete(folder: Path, names: Collection[str], adaptable: Collection[str]) -> None:
    """Refuse an adapter whose file lacks a layer that its configuration targets; peft would fill it with random factors.

    Args:
        names: the projections that the file adapts.
        adaptable: those of the base model that an adapter could adapt.

    Raises:
        CheckpointError: it does.
    """
    targets = targeted(_load_config(folder / CONFIG), adaptable)
    missing = [name for name in adaptable if name in targets and name not in names]
    if missing:
        raise CheckpointError(
            f"adapter {folder}: {WEIGHTS} has no factors of {some(missing)}, which {CONFIG} targets (target_modules, "
            "target_parameters, layers_to_transform): copy the file again if it is damaged; if these layers were not trained, "
            f"leave them out of {CONFIG}"
        )


def _load_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"there is no {path.name}; expected a folder that peft's save_pretrained wrote")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path.name} must hold an object, found {type(config).__name__}")
    return config


def _load_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        if (folder / "adapter_model.bin").is_file():
            raise CheckpointError(
                "the weights are in adapter_model.bin, a pickle, which may run code when it is read. Load it with peft "
                f"where you trust it and save it again, as {WEIGHTS}: save_pretrained(..., safe_serialization=True)"
            )
        raise CheckpointError(f"there is no {WEIGHTS}")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{WEIGHTS} cannot be read: {error}") from None
    if not tensors:
        raise CheckpointError(f"{WEIGHTS} holds no tensor")
    return tensors
