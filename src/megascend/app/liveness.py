"""Whether the process of an earlier run is alive."""

from __future__ import annotations

import socket
from typing import Any


def process_lives(host: Any, pid: Any, since: Any) -> bool | None:
    """Whether process ``pid`` of ``host`` lives, which at ``since`` (seconds since 1970) did; None if that cannot be told here.

    One that began later has been given the same number, and one that waits for its parent to notice its end has ended.
    """
    if host != socket.gethostname() or not isinstance(pid, int) or not isinstance(since, (int, float)):
        return None
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since + 1.0
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return None
