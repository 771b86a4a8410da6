"""Linear attention and state spaces in plain PyTorch, for machines without the Triton and CUDA kernels of their packages.

Megatron-Core, mcore-bridge and transformers import a few functions of the packages ``fla`` (flash-linear-attention),
``causal_conv1d`` and ``mamba_ssm``. :func:`install` makes those few importable; unlike transformers' own fallbacks they keep
packed samples apart.
"""

from __future__ import annotations

import sys
from typing import Any

from megascend.changes import add_modules

PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")
MARK = "__megascend_reference__"


def is_installed() -> bool:
    """Check whether ``fla`` in this process is the reference implementation."""
    return hasattr(sys.modules.get("fla"), MARK)


def install(*, state_spaces: bool = True) -> list[str]:
    """Make the reference functions importable under the names of :data:`PACKAGES`; return a line for each change. Idempotent.

    Real packages of these names are hidden: their kernels run on GPUs only.

    Args:
        state_spaces: False: leave ``mamba_ssm`` as it is. transformers computes without it; with it, layers multiply by the
            weights of their output projections themselves, and adapters of these have no effect.
    """
    if is_installed():
        return []
    contents = _contents()
    if not state_spaces:
        contents = {name: attributes for name, attributes in contents.items() if name.split(".")[0] != "mamba_ssm"}
    add_modules(contents, __name__)
    packages = ", ".join(name for name in PACKAGES if name in contents)
    return [f"{packages}: megascend's reference functions of linear attention and state spaces in plain PyTorch"]


def _contents() -> dict[str, dict[str, Any]]:
    """Return the contents of each module, parents before children."""
    from megascend.reference.fla import convolution, delta_rule, state_space

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
        # Versions: the oldest that keep packed samples apart, for which Megatron-Core looks.
        "causal_conv1d": {
            "__version__": "1.4.0",
            "causal_conv1d_fn": convolution.causal_conv1d_fn,
            "causal_conv1d_update": convolution.causal_conv1d_update,
        },
        "mamba_ssm": {"__version__": "2.0.0"},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": state_space.GatedRMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": state_space.mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": state_space.mamba_split_conv1d_scan_combined,
        },
    }
