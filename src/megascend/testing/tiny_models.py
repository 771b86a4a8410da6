"""Hugging Face checkpoints small enough for a test of a second, with weights that let mistakes show.

A freshly initialised model is a poor test subject: norms are all ones, biases all zeros, logits nearly flat, so a layer
that is skipped or a shard that is swapped hardly changes the loss. Here every parameter is random at a scale that
matters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascend.errors import ConfigError, DistributedTestError
from megascend.models import architecture_named, registered
from megascend.models.registry import BUILT_IN
from megascend.runtime.io.shared import locked, replace
from megascend.testing.artifact_cache import copy_or_make
from megascend.testing.reference import run_reference

ARCHITECTURES = tuple(BUILT_IN)
"""The ``arch`` values that this module knows."""

MARKER = "tiny_checkpoint.json"
"""File beside the weights that records what they were made from."""


def tiny_config(arch: str, **overrides: Any) -> dict[str, Any]:
    """Return the Hugging Face ``config.json`` of a tiny model: 4 layers, hidden 64, 4 heads in 2 query groups, 320 tokens.

    Args:
        arch: one of :data:`ARCHITECTURES`, or registered with :func:`megascend.register_architecture`.
        overrides: any key of the config, e.g. ``tie_word_embeddings=True`` or ``num_hidden_layers=8``.

    Raises:
        ConfigError: the architecture is not known.
    """
    architecture = architecture_named(arch)
    if arch not in BUILT_IN and registered(arch) is None:
        raise ConfigError(
            f"no tiny model of architecture {arch!r}; known: {', '.join(ARCHITECTURES)}, and those registered with "
            "megascend.register_architecture"
        )
    config: dict[str, Any] = {
        "model_type": arch,
        "architectures": [architecture.model_class] if architecture.model_class else None,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        # A multiple of 64, so that usual tensor parallel sizes divide it without padding.
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    return architecture.full_config(config | dict(architecture.tiny) | overrides)


def write_tiny_checkpoint(path: str | Path, arch: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a loadable checkpoint (``config.json`` and safetensors) of a tiny random model to directory ``path``.

    The model is built by transformers in a process of its own, because building an mcore-bridge model in this one
    changes what transformers builds afterwards. A directory that already holds the checkpoint of the same arguments
    is left as it is, so a session-wide fixture costs one build (about 4 s), however many processes ask for it at once; a
    later session gets a copy from the machine's cache (:mod:`megascend.testing.artifact_cache`).

    Args:
        path: the checkpoint directory; created if missing.
        arch: as for :func:`tiny_config`.
        seed: seed of the weights.
        overrides: as for :func:`tiny_config`.

    Returns:
        ``path``.

    Raises:
        ConfigError: the directory holds files that this function did not write.
        DistributedTestError: transformers could not build the model; the message holds its output.
    """
    path = Path(path)
    made_from: dict[str, Any] = {"config": tiny_config(arch, **overrides), "seed": seed}
    architecture = architecture_named(arch)
    if registered(arch) is not None:
        made_from["architecture"] = architecture.code_digest()
    recipe = json.dumps(made_from, sort_keys=True)
    if _holds(path, recipe):
        return path
    if path.exists() and any(path.iterdir()) and not (path / MARKER).exists():
        raise ConfigError(f"{path} holds files that are no tiny checkpoint; give write_tiny_checkpoint a new directory")
    with locked(path):
        # Again under the lock: another process may have written it meanwhile.
        if not _holds(path, recipe):
            modules = [architecture.transformers] if architecture.transformers else []
            replace(path, lambda fresh: _build(fresh, recipe, modules))
    return path


def _holds(path: Path, recipe: str) -> bool:
    marker = path / MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8") == recipe


def _build(path: Path, recipe: str, modules: Sequence[str]) -> None:
    program = Path(__file__).with_name("_build_tiny.py")

    def run(fresh: Path) -> None:
        completed = run_reference(program, fresh, stdin=recipe, timeout_s=300, modules=modules)
        if completed.returncode:
            raise DistributedTestError(
                f"transformers could not build the tiny model {recipe}:\n{completed.stderr[-4000:]}"
            )

    copy_or_make("tiny", json.loads(recipe), program, path, run)
    (path / MARKER).write_text(recipe, encoding="utf-8")
