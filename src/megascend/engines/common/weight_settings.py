"""Optimizer settings by weight: parameter groups by pattern, and the choice between AdamW and one of matrices.

Patterns and choices are of Hugging Face's weights, on every engine: each maps its parameters to slices of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from torch import Tensor

from megascend.config import Adam, Precision, VisionTower
from megascend.config.registry import load
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.hidden_matrices import MATRIX_OPTIMIZERS, is_hidden_matrix
from megascend.models.checkpoint_files.info import ModelInfo
from megascend.runtime.distributed.process_groups import ProcessGroups


@dataclass(frozen=True)
class WeightSettings:
    """Optimizer settings of a weight.

    Attributes:
        lr_scale: factor of the learning rate.
        weight_decay: of a weight that is decayed at all.
        matrix: the optimizer of hidden matrices trains it, not AdamW.
    """

    lr_scale: float
    weight_decay: float
    matrix: bool = False


@dataclass(frozen=True)
class MainParameter:
    """An fp32 main parameter of this rank, or its part of one.

    Attributes:
        main: what the optimizer updates; contiguous, perhaps empty.
        slices: (name of a Hugging Face weight, offsets in it, view of ``main``) of the slices that it consists of.
    """

    main: Tensor
    slices: Sequence[tuple[str, tuple[int, ...], Tensor]]


class MatrixUpdates(Protocol):
    """An optimizer of hidden matrices; ``momentum``: of each parameter."""

    momentum: Sequence[Tensor]

    def step(self, grads: Sequence[Tensor | None], lr: float) -> None: ...


def matrix_optimizer(
    adam: Adam,
    parameters: Sequence[tuple[MainParameter, WeightSettings]],
    groups: ProcessGroups,
    info: ModelInfo,
    precision: Precision,
) -> MatrixUpdates | None:
    """Build the optimizer of the hidden matrices among ``parameters``; None: AdamW trains them. Collective."""
    row = MATRIX_OPTIMIZERS.get(adam.kind)
    if row is None:
        return None
    trained = [(parameter, settings) for parameter, settings in parameters if settings.matrix]
    return load(row.implementation)(trained, getattr(adam, adam.kind), groups, info, precision)


class SettingsByWeight:
    """Settings of every trained weight of a checkpoint.

    Args:
        adam: the run's settings.
        vision_tower: ``train`` if a vision tower is trained.
    """

    def __init__(self, adam: Adam, info: ModelInfo, vision_tower: VisionTower) -> None:
        self._default = WeightSettings(1.0, adam.weight_decay)
        images = info.architecture.images
        tower = None if images is None else images.tower
        if adam.kind in MATRIX_OPTIMIZERS and info.transposed_experts:
            raise ConfigError(
                f"optimizer.kind: {adam.kind} is not supported for {info.architecture.model_type}, whose checkpoint has experts "
                "as [experts, in, out]: set adamw"
            )
        self._settings: dict[str, WeightSettings] = {}
        used = set()
        for name, header in info.tensors.items():
            if tower is not None and vision_tower == "frozen" and name.startswith(tower):
                continue
            group = next((group for group in adam.groups if fnmatchcase(name, group.match)), None)
            decay = adam.weight_decay if group is None or group.weight_decay is None else group.weight_decay
            matrix = adam.kind in MATRIX_OPTIMIZERS and is_hidden_matrix(name, header.shape, tower)
            self._settings[name] = WeightSettings(1.0 if group is None else group.lr_scale, decay, matrix)
            used.add(None if group is None else group.match)
        for number, group in enumerate(adam.groups):
            if group.match not in used:
                matching = any(fnmatchcase(name, group.match) for name in self._settings)
                reason = "earlier groups match all of its weights" if matching else "no trained weight has such a name"
                raise ConfigError(
                    f"optimizer.groups.{number}.match: {group.match!r}: {reason}; names are those of the Hugging Face "
                    f"checkpoint, for example {next(iter(self._settings))}"
                )

    def common(self, weights: Iterable[str], engine: str) -> WeightSettings:
        """Return the common settings of a parameter that consists of ``weights``."""
        by_settings = {self._settings[name]: name for name in sorted(weights)}
        if len(by_settings) > 1:
            first, second, *_ = by_settings.values()
            setting = "kind" if len({settings.matrix for settings in by_settings}) > 1 else "groups"
            raise ConfigError(
                f"optimizer.{setting}: engine {engine} has {first} and {second} in one parameter, and "
                "their settings differ: use patterns that match both, or another engine"
            )
        return next(iter(by_settings), self._default)
