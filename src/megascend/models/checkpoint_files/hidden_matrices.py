"""The matrices of the decoder's layers and of their experts, and the optimizers that train them. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from weightwire.manifest import LAYER

_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)(\.wg)?\.weight$")
_FUSED_HALVES = re.compile(r"\.gate_up_proj(\.weight)?$")


@dataclass(frozen=True)
class MatrixOptimizer:
    """An optimizer of hidden matrices, beside which AdamW trains the other weights.

    Attributes:
        implementation: import path of a class with the constructor, ``step`` and ``momentum`` of Muon's.
        copies: temporaries of the matrices that a rank updates at a time, of at most ``ROUND_ELEMENTS``.
    """

    implementation: str
    copies: int


MATRIX_OPTIMIZERS = {
    # Sent and received pieces, the matrices, an iterate and the next, and its products.
    "muon": MatrixOptimizer("megascend.engines.common.muon:MuonOptimizer", copies=6),
}
"""By ``optimizer.kind``; the section of that name has its settings."""

ROUND_ELEMENTS = 2**26
"""Elements of matrices that a rank orthogonalises at one time, unless a single matrix is larger: bounds the memory of a step."""


def is_hidden_matrix(name: str, shape: Sequence[int], tower: str | None = None) -> bool:
    """Check whether a weight is a matrix of a decoder layer, or the stacked matrices of its experts.

    Routers are excluded, as are biases, norms, convolutions and everything outside the layers.

    Args:
        tower: prefix of a vision tower's tensors, which do not count.
    """
    if LAYER.search(name) is None or (tower is not None and name.startswith(tower)):
        return False
    if name.endswith("bias") or _ROUTER.search(name):
        return False
    stacked = len(shape) == 3 and ".experts." in name
    # A single row or column has no directions to balance.
    return (len(shape) == 2 or stacked) and min(shape[-2:]) > 1


def has_fused_halves(name: str) -> bool:
    """Check whether the first half of a weight's rows is a gate projection, and the second an up projection."""
    return _FUSED_HALVES.search(name) is not None
