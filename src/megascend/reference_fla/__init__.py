"""Linear attention in plain PyTorch under the names of flash-linear-attention, for machines without its Triton kernels.

Megatron-Core, mcore-bridge and transformers import a few functions of the packages ``fla`` and ``causal_conv1d``.
:func:`install` makes those few importable; unlike transformers' own fallbacks they keep packed samples apart.
"""

from __future__ import annotations

import sys
from typing import Any

from megascend.changes import add_modules

PACKAGES = ("fla", "causal_conv1d")
MARK = "__megascend_reference__"


def is_installed() -> bool:
    """Check whether ``fla`` in this process is the reference implementation."""
    return hasattr(sys.modules.get("fla"), MARK)


def install() -> list[str]:
    """Make the reference functions importable as ``fla`` and ``causal_conv1d``; return a line for each change. Idempotent.

    Real packages of these names are hidden: their kernels run on GPUs only.
    """
    if is_installed():
        return []
    add_modules(_contents(), __name__)
    return [f"{', '.join(PACKAGES)}: megascend's reference functions of linear attention in plain PyTorch"]


def _contents() -> dict[str, dict[str, Any]]:
    """Return the contents of each module, parents before children."""
    from megascend.reference_fla import convolution, delta_rule

    return {
        "fla": {MARK: True},
        "fla.modules": {},
        "fla.modules.convolution": {"causal_conv1d": convolution.causal_conv1d},
        "fla.modules.l2norm": {"l2norm": delta_rule.l2norm},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {
            "chunk_gated_delta_rule": delta_rule.chunk_gated_delta_rule,
            "fused_recurrent_gated_delta_rule": delta_rule.fused_recurrent_gated_delta_rule,
        },
        "causal_conv1d": {
            "causal_conv1d_fn": convolution.causal_conv1d_fn,
            "causal_conv1d_update": convolution.causal_conv1d_update,
        },
    }
