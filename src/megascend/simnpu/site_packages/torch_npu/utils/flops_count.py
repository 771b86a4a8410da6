"""``torch_npu.utils.flops_count``; see :mod:`megascend.simnpu.utilities`."""

from megascend.simnpu.utilities import FlopsCounter as FlopsCounter
