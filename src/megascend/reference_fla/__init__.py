"""Linear attention in plain PyTorch under the names of flash-linear-attention, for machines without its Triton kernels.

Megatron-Core, mcore-bridge and transformers import a few functions of the packages ``fla`` and ``causal_conv1d``.
:func:`install` makes those few importable; unlike transformers' own fallbacks they keep packed samples apart.
"""

from megascend.reference_fla.package import install, is_installed

__all__ = ["install", "is_installed"]
