"""Importing this module makes CUDA's names act on the NPU; see :mod:`megascend.simnpu.transfer`."""

from megascend.simnpu.transfer import transfer as _transfer

_transfer()
