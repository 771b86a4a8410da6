"""Architectures registered by external packages, and their registration with transformers and mcore-bridge in each process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megascend.errors import ConfigError
from megascend.huggingface.files import read_config


@dataclass(frozen=True)
class Architecture:
    """Architecture that an external package registers. Modules are given by name, since other processes import them as well.

    Attributes:
        model_type: as in the model's ``config.json``.
        transformers: the module that makes it known to transformers' Auto classes when it is imported; it needs neither Megatron
            nor a bootstrapped process. None: transformers knows it.
        megatron: the module that registers it with mcore-bridge when it is imported, after Megatron. None: mcore-bridge knows it.
        tiny: what :func:`megascend.testing.tiny_config` sets beside the sizes that all tiny models have.
    """

    model_type: str
    transformers: str | None = None
    megatron: str | None = None
    tiny: Mapping[str, Any] = field(default_factory=dict)

    @property
    def modules(self) -> list[str]:
        """Return the names of its modules."""
        return [name for name in (self.transformers, self.megatron) if name is not None]

    def code(self) -> str:
        """Digest the files of the packages that hold its modules, without importing them."""
        digest = hashlib.sha256()
        # The whole package: modules that the named one imports decide the numbers, too.
        for package in sorted({name.partition(".")[0] for name in self.modules}):
            spec = find_spec(package)
            if spec is None or spec.origin is None:
                raise ConfigError(f"architecture {self.model_type!r}: there is no package {package!r}")
            origin = Path(spec.origin)
            files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
            for file in files:
                digest.update(f"{package} {file.relative_to(origin.parent)}\n".encode() + file.read_bytes())
        return digest.hexdigest()


_by_model_type: dict[str, Architecture] = {}


def register_architecture(
    model_type: str,
    *,
    transformers: str | None = None,
    megatron: str | None = None,
    tiny: Mapping[str, Any] | None = None,
) -> None:
    """Make an architecture known by its ``model_type``. Every rank does so before it constructs a backend.

    Nothing is imported now. transformers' module is, where a model or a tokenizer of the architecture is read: on every rank, in
    the self-check's process and in those of references; mcore-bridge's, where a Megatron backend is constructed. Registering it
    again changes nothing.

    Args:
        model_type: that of ``config.json``.
        transformers: module that registers the architecture with transformers.
        megatron: module that registers it with mcore-bridge.
        tiny: settings of a small model for tests.

    Raises:
        ConfigError: another one is registered for that ``model_type``.
    """
    architecture = Architecture(model_type, transformers, megatron, dict(tiny or {}))
    # Registering the same one again is allowed: every rank, and every process started by a test, runs the same code.
    if _by_model_type.setdefault(model_type, architecture) != architecture:
        raise ConfigError(f"register_architecture: another architecture is registered for model_type {model_type!r}")


def registered(model_type: str | None) -> Architecture | None:
    """Return the architecture registered for a ``model_type``, or None."""
    return _by_model_type.get(model_type or "")


def registered_for(model_dir: Path) -> Architecture | None:
    """Return the architecture registered for the model in a directory, or None."""
    return registered(read_config(model_dir).get("model_type"))


def make_known_to_transformers(model_dir: Path) -> None:
    """Import what transformers needs to read the model in a directory, if a package from outside has registered it."""
    architecture = registered_for(model_dir)
    if architecture is not None and architecture.transformers is not None:
        import_part(architecture.model_type, architecture.transformers)


def import_part(model_type: str, module: str) -> None:
    """Import a module that an architecture is registered with."""
    try:
        import_module(module)
    # The external module may raise anything.
    except Exception as error:
        raise ConfigError(
            f"architecture {model_type!r}: importing {module!r} failed: {type(error).__name__}: {error}"
        ) from error
