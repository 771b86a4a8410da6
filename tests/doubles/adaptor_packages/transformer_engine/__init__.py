"""A stand-in for TransformerEngineNPU, which is installed under this name; see README.md beside this package.

The layers are those of :mod:`megascend.reference.te` on NPU tensors; norms and attention without context parallelism call
``torch_npu``'s fused operators, as the real package does.
"""

from __future__ import annotations

import sys

import torch_npu  # noqa: F401

__version__ = "2.13.0"


def _install() -> None:
    """Create the submodules, with Transformer Engine's layout."""
    from megascend.reference.te.package import ROOT, build_modules
    from transformer_engine import _npu_layers

    modules = build_modules()
    for name, module in modules.items():
        if name == ROOT:
            continue
        for layer, replacement in _npu_layers.LAYERS.items():
            if layer in vars(module) and not name.startswith(f"{ROOT}.pytorch.ops"):
                setattr(module, layer, replacement)
        module.__file__ = __file__
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent == ROOT:
            globals()[child] = module


_install()
