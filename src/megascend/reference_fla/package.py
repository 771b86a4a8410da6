"""The modules of the reference ``fla`` and ``causal_conv1d`` packages."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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
    for name, contents in _contents().items():
        module = ModuleType(name, "megascend's reference functions of linear attention")
        module.__spec__ = ModuleSpec(name, loader=None, origin="megascend.reference_fla", is_package=True)
        module.__path__ = []  # type: ignore[attr-defined]  # Python imports submodules of packages only
        module.__dict__.update(contents)
        setattr(module, MARK, True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return [f"{', '.join(PACKAGES)}: megascend's reference functions of linear attention in plain PyTorch"]


def _contents() -> dict[str, dict[str, Any]]:
    """Return the contents of each module, parents before children."""
    from megascend.reference_fla import convolution, delta_rule

    return {
        "fla": {},
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
