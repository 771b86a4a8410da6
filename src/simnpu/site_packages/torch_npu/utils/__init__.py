"""``torch_npu.utils``; see :mod:`simnpu.utilities`."""

from simnpu.utilities import FlopsCounter, get_cann_version
from torch_npu.utils import patch_getenv as patch_getenv

__all__ = ["FlopsCounter", "get_cann_version"]


def __getattr__(name: str) -> object:
    from simnpu.errors import missing

    raise missing(name, __name__)
