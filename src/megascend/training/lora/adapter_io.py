"""Adapters as directories: peft's files, and the state that exact resumption needs.

    adapter_config.json, adapter_model.safetensors    peft's format, float32
    optimizer.safetensors                             Adam's moments, under the names of the weights
    megascend_adapter.json                            settings, step count and loss scale; written last

Tensors are unsharded, so an adapter saved by one layout loads in any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megascend.config import Lora
from megascend.config.data import ProblemType
from megascend.config.documents import load_json
from megascend.errors import CheckpointError, ConfigError
from megascend.models.checkpoint_files.files import weight_files
from megascend.runtime.io.atomic import is_replaceable, replacing_directory
from megascend.runtime.io.hashing import digest
from megascend.training.lora import peft_format
from megascend.training.lora.factors import Factors, UnshardedAdapter
from megascend.training.lora.peft_format import CONFIG
from megascend.training.lora.peft_tensors import WEIGHTS, base_layer

STATE, OPTIMIZER = "megascend_adapter.json", "optimizer.safetensors"
FORMAT = 1


COUNTERS = ("taken", "step_count", "skipped_in_a_row", "loss_scale", "good_steps")


def write(path: Path, saved: UnshardedAdapter, base_model: str, adaptable: list[str]) -> None:
    """Write ``saved`` next to ``path``, then rename it to ``path``, replacing an older adapter. Follows links."""
    try:
        check_target(path)
        with replacing_directory(path) as temporary:
            peft_format.write(temporary, saved.lora, saved.values, base_model, adaptable)
            if saved.moments is not None:
                first, second = saved.moments
                save_file(flatten(first, "exp_avg.") | flatten(second, "exp_avg_sq."), temporary / OPTIMIZER)
            state: dict[str, Any] = {"format": FORMAT, "lora": saved.lora.model_dump(mode="json")}
            if saved.labels is not None:
                state["head"] = {"labels": saved.labels, "problem_type": saved.problem_type}
            # Digests reveal a later change by peft, which writes none.
            state["sha256"] = {file.name: digest(file, hashlib.sha256) for file in sorted(temporary.iterdir())}
            state |= {name: getattr(saved, name) for name in COUNTERS} if saved.moments is not None else {}
            # Last, after the digests of all other files: a directory with this file is complete.
            (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"save_adapter: {path} could not be written: {error}") from error


def check_target(path: Path) -> None:
    """Raise CheckpointError if an adapter at ``path`` would replace something else."""
    try:
        replaceable = is_replaceable(path, CONFIG)
    except OSError as error:
        raise CheckpointError(f"save_adapter: {path} could not be written: {error}") from error
    if not replaceable:
        raise CheckpointError(f"save_adapter: {path} exists and is not an adapter; choose another directory")


def read(path: Path, *, optimizer: bool) -> UnshardedAdapter:
    """Read an adapter that megascend or peft saved.

    Args:
        optimizer: also read the optimizer's state, if it was saved.
    """
    lora, values = peft_format.read(path)
    if not (path / STATE).is_file():
        if optimizer and (path / OPTIMIZER).exists():
            raise CheckpointError(f"{path} has {OPTIMIZER} but no {STATE}; it is not complete")
        return UnshardedAdapter(lora, values)
    try:
        state = load_json((path / STATE).read_bytes())
        if state.get("format") != FORMAT:
            raise CheckpointError(f"{path / STATE} has format {state.get('format')!r}; this megascend reads {FORMAT}")
        for name, expected in state["sha256"].items():
            # peft may have saved over our files, whose moments would then belong to other weights.
            if digest(path / name, hashlib.sha256) != expected:
                raise ValueError(
                    f"{name} is not the file that was saved; if it was replaced on purpose, remove {STATE} and {OPTIMIZER} "
                    "to load only the weights"
                )
        settings = Lora(**state["lora"])
        head = _head_of(state)
        if (settings.rank, settings.alpha, settings.rslora) != (lora.rank, lora.alpha, lora.rslora):
            raise ValueError(f"{STATE} has rank {settings.rank} and alpha {settings.alpha:g}, {CONFIG} has others")
        # Saved with optimizer=False: weights and settings only.
        if not optimizer or ("taken" not in state and not (path / OPTIMIZER).exists()):
            return UnshardedAdapter(settings, values, **head)
        tensors = load_file(path / OPTIMIZER)
        moments = (unflatten(tensors, "exp_avg."), unflatten(tensors, "exp_avg_sq."))
        counters = {name: state[name] for name in COUNTERS}
        if not all(isinstance(value, int | float) and value >= 0 for value in counters.values()):
            raise ValueError(f"{STATE} counts {counters}")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError, ConfigError) as error:
        raise CheckpointError(f"{path}: the adapter's state is damaged: {error}") from error
    for moment in moments:
        shapes = {name: (factors.a.shape, factors.b.shape) for name, factors in moment.items()}
        if shapes != {name: (factors.a.shape, factors.b.shape) for name, factors in values.items()}:
            raise CheckpointError(f"{path / OPTIMIZER} does not belong to {path / WEIGHTS}")
    return UnshardedAdapter(settings, values, moments, **counters, **head)


def _head_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return labels and problem type of an adapter's head; nothing if they are not recorded."""
    if (head := state.get("head")) is None:
        return {}
    labels, problem_type = tuple(head["labels"]), head["problem_type"]
    if not all(isinstance(label, str) for label in labels) or problem_type not in (None, *get_args(ProblemType)):
        raise ValueError(f"{STATE} has the head {head}")
    return {"labels": labels, "problem_type": problem_type}


def read_head(path: Path) -> tuple[tuple[str, ...], ProblemType | None] | None:
    """Return labels and problem type of a saved adapter's head, if they are recorded."""
    try:
        head = _head_of(load_json((path / STATE).read_bytes()))
    except FileNotFoundError:  # peft writes none
        return None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: the adapter's state is damaged: {error}") from error
    return (head["labels"], head["problem_type"]) if head else None


def flatten(factors: Mapping[str, Factors], prefix: str) -> dict[str, torch.Tensor]:
    """Return one tensor for every factor, by name."""
    tensors = {f"{prefix}{name}.a": factor.a.contiguous() for name, factor in factors.items()}
    return tensors | {f"{prefix}{name}.b": factor.b.contiguous() for name, factor in factors.items()}


def unflatten(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, Factors]:
    """Invert :func:`flatten` for the tensors with that prefix."""
    names = sorted({key[len(prefix) : -2] for key in tensors if key.startswith(prefix)})
    return {name: Factors(tensors[f"{prefix}{name}.a"], tensors[f"{prefix}{name}.b"]) for name in names}


def check_base_weights(adapter: Path, model_dir: Path) -> None:
    """Compare base model weights that peft saved with an adapter with the model's, in the less precise dtype of the two.

    peft would load them into the model. They are frozen, so they equal the base model's unless the adapter was trained on another
    model, or on one whose weights were resized or trained too. The factors alone would then give other outputs.
    """
    try:
        with safe_open(adapter / WEIGHTS, "pt") as file:
            for key in file.keys():  # noqa: SIM118, not a dict
                module = base_layer(key)
                if module is not None and not equal(file.get_tensor(key), read_tensor(model_dir, f"{module}.weight")):
                    raise CheckpointError(
                        f"{adapter}: {WEIGHTS} holds {key}, which is not the weight of {module} in {model_dir}; the adapter "
                        "was trained on another model, or that weight was trained or resized too"
                    )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{adapter}: {WEIGHTS} or the weights of {model_dir} cannot be read: {error}") from None


def equal(first: Tensor, second: Tensor | None) -> bool:
    """Check whether two weights are equal except for rounding to another dtype."""
    if second is None or first.shape != second.shape:
        return False
    # The narrower dtype: one of them may be a rounded copy of the other.
    dtype = first.dtype if first.dtype.itemsize <= second.dtype.itemsize else second.dtype
    return torch.equal(first.to(dtype), second.to(dtype))


def read_tensor(model_dir: Path, name: str) -> Tensor | None:
    """Read a tensor of a Hugging Face checkpoint; None if the checkpoint does not have it."""
    # Where several files hold it, the last one counts.
    for path in reversed(weight_files(model_dir)):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name)
    return None
