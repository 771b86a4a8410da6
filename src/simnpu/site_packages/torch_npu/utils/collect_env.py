"""``torch_npu.utils.collect_env``; see :mod:`simnpu.utilities`."""

from simnpu.utilities import get_cann_version as get_cann_version
