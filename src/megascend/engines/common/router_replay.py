"""Router replay: the forward pass and its recomputation send tokens to the experts that the rollout chose.

Rollout and trainer compute with other kernels, so near ties between experts fall differently, and the two compute with different
models (Ma et al. 2025, "Rollout Routing Replay", arXiv:2510.11370). A sample with ``routed_experts`` is routed by them. Weights
of the experts, and the router's gradient, are those of this model's scores of the replayed experts, by the model's own formula:
the choice is a constant, as the choice of top-k always is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascend.errors import DataError
from megascend.training.batch.sample import Sample

NOTHING_TO_REPLAY = "this model has no experts whose choice can be replayed"


@dataclass(frozen=True)
class ExpertLayers:
    """Layers of a model that route tokens to experts.

    Attributes:
        total: layers of the model.
        numbers: indices of the layers that have experts, from 0, ascending.
        experts: number of experts in each of those layers.
        topk: experts of a token.
    """

    total: int
    numbers: tuple[int, ...]
    experts: int
    topk: int

    def check(self, sample: Sample, index: int) -> None:
        """Raise DataError unless a sample's ``routed_experts`` are of this model."""
        routed = sample.routed_experts
        if routed is None:
            return
        # Inference engines report either all layers, dense ones included, or only those with experts.
        layers = sorted({self.total, len(self.numbers)})
        if routed.shape[1] not in layers or routed.shape[2] != self.topk:
            raise DataError(
                f"sample {index}: routed_experts has shape {list(routed.shape)}; this model needs [tokens, layers, {self.topk}] "
                f"with {' or '.join(map(str, layers))} layers (all, or those with experts)"
            )
        choices = self.columns(routed)
        recorded = ~(choices < 0).all(-1)
        if bool(((choices >= self.experts) | ((choices < 0) & recorded[..., None])).any()):
            raise DataError(
                f"sample {index}: routed_experts must be in [0, {self.experts}), or -1 where they are not known"
            )
        # No router chooses an expert twice: a duplicate would enter the token's output, and its gradient, twice.
        ordered = choices.sort(-1).values
        if bool(((ordered[..., 1:] == ordered[..., :-1]) & recorded[..., None]).any()):
            raise DataError(f"sample {index}: routed_experts names an expert twice for one token and layer")

    def columns(self, routed: Tensor) -> Tensor:
        """Return the choices of layers with experts, [tokens, len(numbers), k], from those of all layers or of these."""
        if routed.shape[1] == len(self.numbers):
            return routed
        return routed[:, list(self.numbers)]


@dataclass
class ReplayedPass:
    """Forward pass of one micro batch.

    Attributes:
        routed: int64 [rows, layers with experts, k]; None: routers choose.
        real: [rows], tokens that each row stands for; None if routers choose.
        complete: the pass has run; later calls of its routers are recomputation.
    """

    routed: Tensor | None
    real: Tensor | None
    complete: bool = False


class RouterReplay:
    """Replaces the choices of a forward pass's routers by those of its micro batch, and counts where they differ.

    Args:
        layers: the model's layers with experts.
        device: device of the counts.
    """

    def __init__(self, layers: ExpertLayers, device: torch.device) -> None:
        self.layers = layers
        self._pass: ReplayedPass | None = None
        self._counts = torch.zeros(2, device=device)

    def choose(self, indices: Tensor, replayed: Tensor, real: Tensor | None) -> Tensor:
        """Return the experts [rows, k] of a layer's tokens: ``replayed`` where they are recorded (not -1), ``indices`` elsewhere.

        Args:
            indices: int64 [rows, k], the router's own choice.
            real: [rows], tokens that each row stands for; None: nothing is counted, as the layer is recomputed.
        """
        # The first entry decides for the row: check() has refused rows that are recorded in part.
        recorded = replayed[:, :1] >= 0
        if real is not None:
            # Compared as sets: the order among the chosen experts has no meaning.
            differs = (indices.sort(-1).values != replayed.sort(-1).values).any(-1, keepdim=True)
            rows = recorded * real[:, None]
            self._counts += torch.stack([(differs * rows).sum(), rows.sum()]).float()
        return torch.where(recorded, replayed, indices)

    def take_counts(self) -> Tensor:
        """Return [tokens and layers routed otherwise by the router itself, all that were replayed] since the last call."""
        counts = self._counts.clone()
        self._counts.zero_()
        return counts


def check(samples: Sequence[Sample], layers: ExpertLayers | None, unsupported_reason: str | None) -> None:
    """Raise DataError for samples whose ``routed_experts`` do not fit the model, or which the engine cannot replay."""
    for index, sample in enumerate(samples):
        if sample.routed_experts is None:
            continue
        if layers is None or unsupported_reason is not None:
            raise DataError(
                f"sample {index} has routed_experts, and {unsupported_reason or NOTHING_TO_REPLAY}; leave them out"
            )
        layers.check(sample, index)
