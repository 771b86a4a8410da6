"""Who asked for what: one line of JSON for each request of a tenant."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

from megascend.io.paths import make_directory

QUIET = frozenset(f"/api/v1/{path}" for path in ("session_heartbeat", "retrieve_future", "telemetry", "client/config"))
"""Paths that clients ask for all the time."""


class Audit:
    """Appends to a file that only its owner can read.

    Requests without a valid key are only counted in the figures: whoever sends them could fill the disk.

    Args:
        file: made if it is not there; None: nothing is written.
    """

    def __init__(self, file: Path | None) -> None:
        self._stream = None
        if file is not None:
            make_directory(file.parent)
            file.touch(mode=0o600)
            self._stream = file.open("a", encoding="utf-8", buffering=1)

    def write(self, tenant: str, method: str, path: str, status: int, address: str) -> None:
        """Note a request and the HTTP status of its answer."""
        if self._stream is None or path in QUIET:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        entry = {"time": now, "tenant": tenant, "from": address, "method": method, "path": path[:300], "status": status}
        self._stream.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """Nothing is written any more."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
