"""Declarations by ``model_type``: those of this package, and those that packages from outside register."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any

from megascend.errors import ConfigError
from megascend.models.base import Architecture, Config, text_config
from megascend.models.families import (
    decoders,
    deepseek,
    gemma,
    glm,
    mixtures,
    nemotron,
    qwen3_vl,
    qwen_hybrid,
    sparse_attention,
)

BUILT_IN = {
    model_type: architecture
    for module in (decoders, deepseek, gemma, glm, mixtures, nemotron, qwen_hybrid, qwen3_vl, sparse_attention)
    for architecture in module.FAMILIES
    for model_type in architecture.model_types
}
_BY_TEXT_TYPE = {architecture.text_type: architecture for architecture in BUILT_IN.values() if architecture.text_type}
_REFUSED = {architecture.model_type: architecture for architecture in sparse_attention.REFUSED}
_from_outside: dict[str, Architecture] = {}


def register_architecture(
    architecture: str | Architecture,
    *,
    transformers: str | None = None,
    megatron: str | None = None,
    tiny: Mapping[str, Any] | None = None,
) -> None:
    """Make an architecture known by its ``model_type``. Every rank does so before it constructs a backend.

    Nothing is imported now. transformers' module is, where a model or a tokenizer of the architecture is read: on every rank, in
    the self-check's process and in those of references; mcore-bridge's, where a Megatron backend is constructed. Registering the
    same again changes nothing. One that this package has may be replaced.

    Args:
        architecture: a declaration (:class:`megascend.models.Architecture` or a subclass of it, importable in other processes),
            or the ``model_type`` of a plain decoder.
        transformers: as in :class:`megascend.models.Architecture`, for a plain decoder.
        megatron: likewise.
        tiny: likewise.

    Raises:
        ConfigError: another one is registered for that ``model_type``.
    """
    if isinstance(architecture, str):
        architecture = Architecture((architecture,), transformers, megatron, tiny=dict(tiny or {}))
    for model_type in architecture.model_types:
        if _from_outside.setdefault(model_type, architecture) != architecture:
            raise ConfigError(f"another architecture is registered for model_type {model_type!r}")


def registered(model_type: str | None) -> Architecture | None:
    """Return the architecture that a package from outside has registered for a ``model_type``, or None."""
    return _from_outside.get(model_type or "")


def architecture_of(config: Config) -> Architecture:
    """Return the declaration of a configuration's ``model_type``; of an unknown one, a plain decoder's."""
    # The outer type first: a model with a vision tower is declared as a whole, its text_config's type is another model.
    outer = str(config.get("model_type") or "")
    return _declared(outer) or architecture_named(str(text_config(config).get("model_type") or outer))


def architecture_named(model_type: str) -> Architecture:
    """Return the declaration of a ``model_type``, or of a ``text_config``'s; of an unknown one, a plain decoder's."""
    return _declared(model_type) or _plain(model_type)


def _declared(model_type: str) -> Architecture | None:
    # Those from outside first: a package may replace a declaration of this one.
    built_in = BUILT_IN.get(model_type) or _BY_TEXT_TYPE.get(model_type) or _REFUSED.get(model_type)
    return _from_outside.get(model_type) or built_in


@cache
def _plain(model_type: str) -> Architecture:
    return Architecture((model_type,))


def proven() -> list[Architecture]:
    """List the architectures whose training the parity tests compare with Hugging Face in every layout."""
    return [architecture for architecture in BUILT_IN.values() if architecture.proven]


def to_reference(architecture: Architecture) -> dict[str, Any]:
    """Return JSON values with which another process registers an architecture from outside (:func:`from_reference`)."""
    kind = type(architecture)
    settings = {field.name: getattr(architecture, field.name) for field in fields(architecture)}
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "settings": settings}


def from_reference(reference: Mapping[str, Any]) -> Architecture:
    """Rebuild the architecture of :func:`to_reference` from its JSON values, importing the module of its class."""
    module, _, name = reference["class"].partition(":")
    # JSON has no tuples; declarations are compared with those that this process registers.
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in reference["settings"].items()}
    return getattr(import_module(module), name)(**settings)
