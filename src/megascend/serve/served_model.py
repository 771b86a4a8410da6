"""The model that is served: what clients may call it, and which of its layers their settings mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megascend.errors import ConfigError

Targets = Literal["all-linear"] | tuple[str, ...]


@dataclass(frozen=True)
class ServedModel:
    """The served model.

    Attributes:
        names: what clients may call it, the first one is what they are told.
        path: its directory.
        architecture: as its configuration has it.
        max_length: longest sample in tokens.
        vocabulary: token ids lie in [0, vocabulary).
        projections: names of the layers that adapters may act on.
    """

    names: tuple[str, ...]
    path: Path
    architecture: str
    max_length: int
    vocabulary: int
    projections: tuple[str, ...]

    @property
    def adapts_output(self) -> bool:
        """Whether adapters may act on the output layer."""
        return any(_is_output(name) for name in self.projections)

    def targets(self, *, attention: bool, mlp: bool, output: bool) -> tuple[str, ...]:
        """Return the layers that a client's switches mean; without an output layer to adapt, that switch has no effect.

        Raises:
            ConfigError: they mean none.
        """
        layers = [
            name
            for name in self.projections
            if (output if _is_output(name) else attention if _is_attention(name) else mlp)
        ]
        if not layers:
            raise ConfigError(
                "train_attn, train_mlp and train_unembed leave no layer of this model to train"
                + ("" if self.adapts_output else "; its output layer is not adapted here")
            )
        return tuple(layers)


def _is_output(name: str) -> bool:
    return name.rsplit(".", 1)[-1] == "lm_head"


def _is_attention(name: str) -> bool:
    return any("attn" in part or "attention" in part for part in name.split(".")[:-1])


def allowed_targets(layers: Sequence[str], *, unembed: bool) -> Targets:
    """Choose the layers that adapters of a backend may act on, so that every client's switches can be followed. Pure.

    Args:
        layers: names of the linear layers in the checkpoint, the output layer among them if it has a weight of its own.
    """
    if not unembed or not any(_is_output(name) for name in layers):
        return "all-linear"
    ends = {name.rsplit(".", 1)[-1] for name in layers}
    return tuple(sorted(ends - {"embed_tokens"}))


def architecture_of(config: dict[str, Any]) -> str:
    """Return the architecture that the configuration of a checkpoint names."""
    names = config.get("architectures") or [config.get("model_type", "unknown")]
    return str(names[0])
