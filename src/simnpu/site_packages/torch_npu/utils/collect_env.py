"""``torch_npu.utils.collect_env``; see :mod:`simnpu.utilities`."""

from simnpu.npu import utils


def get_cann_version() -> str:
    return utils.get_cann_version()
