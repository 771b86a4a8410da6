"""Two small names: the random tracker (only to be subclassed) and the split along a dimension."""

from __future__ import annotations

from typing import Any

from megascend.reference_te.unsupported import refuse


class CudaRNGStatesTracker:
    """Constructed only when ``te_rng_tracker`` is asked for, which is refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("te_rng_tracker", "use megatron-core's own tracker (te_rng_tracker=False)")


class SplitAlongDim:
    """Split a tensor along a dimension into views; called through ``apply`` like an autograd function."""

    @staticmethod
    def apply(tensor: Any, dim: int, sizes: Any, squeeze: bool = False) -> tuple[Any, ...]:
        pieces = tensor.split(sizes, dim=dim)
        return tuple(piece.squeeze(dim) for piece in pieces) if squeeze else tuple(pieces)
