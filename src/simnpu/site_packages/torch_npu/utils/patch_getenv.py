"""``torch_npu.utils.patch_getenv``: torch_npu's logging of environment variables. Here they are read as ever, unlogged."""

import os

_orig_getenv = os.getenv
_orig_environ_get = os.environ.get


def _log_once(key: str, value: str) -> None:
    """Nothing is logged."""
