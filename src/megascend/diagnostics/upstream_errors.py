"""Telling an error of torch's communication libraries from any other RuntimeError."""

from __future__ import annotations

import re

import torch.distributed as dist

from megascend.errors import CollectiveTimeoutError, MegascendError

LIBRARIES = {
    # "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer", or "Gloo connectFullMesh ..."
    "gloo": re.compile(r"\[[^\]\s]*gloo[^\]\s]*\.(?:cc|h|cpp):\d+\]|\bGloo \w+ failed\b|\bProcessGroupGloo\b"),
    "nccl": re.compile(r"\bNCCL error\b|\bnccl[A-Z]\w+Error\b|\bProcessGroupNCCL\b|\bNCCL communicator was aborted\b"),
    # torch_npu numbers what its collectives raise ERR02xxx; CANN what HCCL raises EI0001 to EI0015
    "hccl": re.compile(
        r"\bERR02\d{3}\b|\bEI00\d{2}\b|\bProcessGroupHCCL\b|\bHCCL (?:function )?error\b", re.IGNORECASE
    ),
}
"""What a plain RuntimeError of each library looks like."""


def library_of(error: BaseException | None) -> str | None:
    """Which communication library raised ``error``, or None if none of them did.

    torch's own classes are believed. Gloo and HCCL raise plain RuntimeError: those are told by their text, which names a
    source file or an error number of the library. A subclass of RuntimeError is somebody else's.
    """
    if isinstance(error, dist.DistError):
        return "torch.distributed"
    if type(error) is RuntimeError:
        text = str(error)
        return next((name for name, pattern in LIBRARIES.items() if pattern.search(text)), None)
    return None


def is_secondary(error: BaseException) -> bool:
    """Whether ``error`` only says that this rank missed another one."""
    if isinstance(error, CollectiveTimeoutError) or library_of(error) is not None:
        return True
    return isinstance(error, MegascendError) and library_of(error.__cause__) is not None
