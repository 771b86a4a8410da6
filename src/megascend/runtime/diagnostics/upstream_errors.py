"""Distinguish an error of torch's communication libraries from any other RuntimeError."""

from __future__ import annotations

import builtins
import re
from typing import Any

import torch.distributed as dist

from megascend.errors import CollectiveTimeoutError, MegascendError

LIBRARIES = {
    # "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer", or "Gloo connectFullMesh ..."
    "gloo": re.compile(r"\[[^\]\s]*gloo[^\]\s]*\.(?:cc|h|cpp):\d+\]|\bGloo \w+ failed\b|\bProcessGroupGloo\b"),
    "nccl": re.compile(r"\bNCCL error\b|\bnccl[A-Z]\w+Error\b|\bProcessGroupNCCL\b|\bNCCL communicator was aborted\b"),
    # torch_npu numbers errors of its collectives ERR02xxx, CANN those of HCCL EI0001 to EI0015.
    "hccl": re.compile(
        r"\bERR02\d{3}\b|\bEI00\d{2}\b|\bProcessGroupHCCL\b|\bHCCL (?:function )?error\b", re.IGNORECASE
    ),
}
"""Patterns in the text of a plain RuntimeError, by the library that raised it."""
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.10 has none


def library_of(error: BaseException | None) -> str | None:
    """Return the communication library that raised ``error``, or None if none of them did.

    torch's own exception classes are accepted as they are. Gloo and HCCL raise plain RuntimeError: those are recognised by
    their text, which contains a source file or an error number of the library. A subclass of RuntimeError belongs to other
    code. An exception group counts if all its members do.
    """
    if members := members_of(error):
        libraries = [library_of(member) for member in members]
        return libraries[0] if all(libraries) else None
    if isinstance(error, dist.DistError):
        return "torch.distributed"
    if type(error) is RuntimeError:
        text = str(error)
        return next((name for name, pattern in LIBRARIES.items() if pattern.search(text)), None)
    return None


def members_of(error: BaseException | None) -> tuple[BaseException, ...]:
    """Return the members of an exception group; none for any other exception."""
    if not isinstance(error, _GROUP):
        return ()
    group: Any = error
    return group.exceptions


def is_secondary(error: BaseException) -> bool:
    """Check whether ``error`` is only a consequence of another rank's failure; for an exception group: all its members are."""
    if members := members_of(error):
        return all(map(is_secondary, members))
    if isinstance(error, CollectiveTimeoutError) or library_of(error) is not None:
        return True
    # The monitor's own translation of a library's error.
    return isinstance(error, MegascendError) and library_of(error.__cause__) is not None
