"""Importing this module makes CUDA's names act on the NPU; see :mod:`simnpu.transfer`."""

from simnpu.transfer import transfer as _transfer

_transfer()
