"""A double of MindSpeed for CI: the interface that megascend's bootstrap uses, written from its observed behaviour.

MindSpeed is not on PyPI, so CI cannot install it. This package is put on ``PYTHONPATH`` where no real checkout is named
by ``MEGASCEND_MINDSPEED``. It patches and repatches megatron-core the way the real one does, side effects and traps
included, and computes in plain PyTorch and through ``torch_npu.npu_fusion_attention``, ``npu_rms_norm``.
``tests/npu/test_contract.py`` makes the same calls to both and compares their results.

A name that is missing here is missing on purpose: importing it raises, it never quietly does nothing. The two branches
(core_r0.15.3, core_r0.16.0) differ where :mod:`mindspeed.flavour` is asked.

Nothing here is copied from MindSpeed; where a name or signature equals the real one, it is because callers rely on it.
"""

from mindspeed.flavour import IS_0_16

# The branch's own number, marked; as literals, since it is read without an import. The real one has it in its setup.py only.
if IS_0_16:
    __version__ = "0.16.0+double"
else:
    __version__ = "0.15.3+double"

__all__ = ["__version__"]
