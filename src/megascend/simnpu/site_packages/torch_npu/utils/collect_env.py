"""``torch_npu.utils.collect_env``; see :mod:`megascend.simnpu.utilities`."""

from megascend.simnpu.utilities import get_cann_version as get_cann_version
