"""Megatron-Core without accelerators: the reference Transformer Engine, and what else has to be put right for a CPU.

On CUDA it is there by request (``provider="reference"`` or ``MEGASCEND_REFERENCE_TE=1``), with torch.cuda left as it is.
"""

from megascend.bootstrap.reference.provider import Reference

__all__ = ["Reference"]
