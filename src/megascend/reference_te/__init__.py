"""Transformer Engine's layers in plain PyTorch, for machines without Transformer Engine.

:func:`install` makes them importable as ``transformer_engine``, so that megatron-core's own wrappers
(``megatron/core/extensions/transformer_engine.py``) and mcore-bridge run unmodified: their isinstance checks, LoRA
dispatch, checkpoint code and layer specs stay the real ones. What these layers cannot do (fp8, user buffers, fused
kernels) raises :class:`megascend.errors.PlatformError` and names the setting; nothing is ignored.
"""

from megascend.reference_te.package import install, is_installed

__all__ = ["install", "is_installed"]
