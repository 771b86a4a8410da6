"""``torch_npu.utils.flops_count``; see :mod:`simnpu.utilities`."""

from simnpu.utilities import FlopsCounter as FlopsCounter
