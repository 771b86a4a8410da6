"""The served model: the names clients use for it, and the layers that their LoRA settings select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megascend.errors import ConfigError

if TYPE_CHECKING:
    from megascend.apps.data.images import ImageProcessor

Targets = Literal["all-linear"] | tuple[str, ...]


@dataclass(frozen=True)
class ServedModel:
    """The served model.

    Attributes:
        names: names clients may use; the first is the one reported to them.
        path: model directory.
        architecture: architecture named in config.json.
        max_length: longest sample in tokens.
        vocabulary: vocabulary size; token ids are in [0, vocabulary).
        projections: names of the layers that adapters may target.
        image_processor: reads the images of a model that takes them, within the server's limits; else None.
    """

    names: tuple[str, ...]
    path: Path
    architecture: str
    max_length: int
    vocabulary: int
    projections: tuple[str, ...]
    image_processor: ImageProcessor | None = None

    @property
    def adapts_output(self) -> bool:
        return any(_is_output(name) for name in self.projections)

    def targets(self, *, attention: bool, mlp: bool, output: bool) -> tuple[str, ...]:
        """Return the layers that a client's switches select; ``output`` has no effect if the output layer cannot be adapted."""
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


def allowed_targets(layers: Sequence[str], *, unembed: bool, tower: str | None = None) -> Targets:
    """Choose the layers that a backend's adapters may target, enough for any client's switches. Pure.

    Args:
        layers: names of the linear layers in the checkpoint, including the output layer unless its weight is tied.
        tower: prefix of the names of a vision tower's layers.
    """
    if not unembed or not any(_is_output(name) for name in layers):
        return "all-linear"
    # In full: a tower has other modules whose names end alike, and which cannot be adapted.
    names = {name for name in layers if tower is not None and name.startswith(tower)}
    ends = {name.rsplit(".", 1)[-1] for name in layers if name not in names}
    return tuple(sorted((ends - {"embed_tokens"}) | names))
