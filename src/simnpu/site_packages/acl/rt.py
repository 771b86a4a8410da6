"""Stand-in for ``acl.rt``."""

import torch


def get_mem_info(kind: int) -> tuple[int, int, int]:
    """Free and total device memory in bytes, and the return code 0."""
    free, total = torch.npu.mem_get_info()  # type: ignore[attr-defined]
    return free, total, 0
