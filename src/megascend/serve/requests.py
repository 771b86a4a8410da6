"""Small requests as clients send them in JSON, checked. What is not known in them is passed over, as the protocol grows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megascend.config import Adam
from megascend.errors import ConfigError
from megascend.serve.errors import RequestRefusedError

ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
"""What clients mean by a setting that they leave out."""
LONGEST_S = 100 * 365 * 24 * 3600
"""The longest time that a checkpoint can be asked to be kept for, other than for ever."""


@dataclass(frozen=True)
class LoraRequest:
    """The adapter that a client wants.

    Attributes:
        seed: of its first values; None: any.
        attention, mlp, output: which layers are trained.
    """

    base_model: str
    rank: int
    seed: int | None
    attention: bool
    mlp: bool
    output: bool


def lora_of(body: Mapping[str, Any]) -> LoraRequest:
    """The adapter of a ``create_model``.

    Raises:
        RequestRefusedError: a value is missing or of another kind.
        ConfigError: an optimizer other than AdamW, or full fine-tuning, is asked for.
    """
    lora = body.get("lora_config")
    if lora is None:
        raise ConfigError("this server trains LoRA adapters; create_model needs a lora_config")
    if not isinstance(lora, Mapping):
        raise RequestRefusedError("lora_config must be an object", 422)
    optimizer = body.get("optimizer_config") or {"type": "adamw"}
    if not isinstance(optimizer, Mapping) or optimizer.get("type") != "adamw":
        raise ConfigError("optimizer_config: this server has adamw only")
    seed = lora.get("seed")
    return LoraRequest(
        text(body, "base_model"),
        integer(lora, "rank"),
        None if seed is None else integer(lora, "seed") % 2**62,
        *(flag(lora, name) for name in ("train_attn", "train_mlp", "train_unembed")),
    )


def adam_of(settings: Mapping[str, Any]) -> Adam:
    """The settings of a step; a value that is left out is the client's own default.

    Raises:
        ConfigError: one cannot be.
    """
    values = {}
    for name, default in ADAM.items():
        value = settings.get(name, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"adam_params: {name} must be a number, got {str(value)[:60]!r}")
        values[name] = as_float(value)
    if settings.get("type", "adamw") not in ("adamw", "adam"):
        raise ConfigError(f"optimizer {str(settings['type'])[:60]!r} is not here; this server has adamw")
    return Adam(
        lr=values["learning_rate"],
        betas=(values["beta1"], values["beta2"]),
        eps=values["eps"],
        weight_decay=values["weight_decay"],
        max_grad_norm=max(values["grad_clip_norm"], 0.0),
    )


def as_float(value: float) -> float:
    """A number of a body, whose digits JSON does not bound; what no float can hold is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_text(value: str) -> bool:
    """Whether a string of a body can be written in UTF-8. JSON can have halves of characters (surrogates), which cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def lifetime_of(body: Mapping[str, Any]) -> int | None:
    """Seconds after which something may be removed; None: never.

    Raises:
        RequestRefusedError: 422; it is no whole number, or more than a date can say.
    """
    if body.get("ttl_seconds") is None:
        return None
    seconds = integer(body, "ttl_seconds")
    if seconds > LONGEST_S:
        raise RequestRefusedError(f"ttl_seconds must be at most {LONGEST_S}, or left out", 422)
    return seconds


def text(body: Mapping[str, Any], name: str) -> str:
    """A string of a body.

    Raises:
        RequestRefusedError: 422; it is missing or no string.
    """
    value = body.get(name)
    if not isinstance(value, str) or not value or len(value) > 4096:
        raise RequestRefusedError(f"{name} must be a string, got {str(value)[:60]!r}", 422)
    return value


def integer(body: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of a body.

    Raises:
        RequestRefusedError: 422; it is missing, without ``default``, or no whole number from 0 on.
    """
    value = body.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise RequestRefusedError(f"{name} must be a whole number from 0 on, got {str(value)[:60]!r}", 422)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = True) -> bool:
    """A switch of a body.

    Raises:
        RequestRefusedError: 422; it is neither true nor false.
    """
    value = body.get(name, default)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise RequestRefusedError(f"{name} must be true or false, got {str(value)[:60]!r}", 422)
    return value


def metadata_of(body: Mapping[str, Any]) -> dict[str, str] | None:
    """What a client wants kept with something, within bounds.

    Raises:
        RequestRefusedError: 422; it is no object, or large.
    """
    found = body.get("user_metadata")
    if found is None:
        return None
    if (
        not isinstance(found, dict)
        or len(found) > 64
        or sum(len(str(k)) + len(str(v)) for k, v in found.items()) > 2**16
    ):
        raise RequestRefusedError("user_metadata must be an object of at most 64 entries and 64 KiB", 422)
    return {str(name): str(value) for name, value in found.items()}
