"""Transformer Engine's layers in plain PyTorch, for machines without Transformer Engine.

:func:`install` makes them importable as ``transformer_engine``, so that megatron-core's own wrappers
(``megatron/core/extensions/transformer_engine.py``) and mcore-bridge run unmodified, including their isinstance checks, LoRA
dispatch, checkpoint code and layer specs. Unsupported features (fp8, user buffers, fused kernels) raise
:class:`megascend.errors.PlatformError`, which names the setting; none is silently ignored.
"""

from megascend.reference.te.package import install, is_installed

__all__ = ["install", "is_installed"]
