"""What lies in a run's directory, for tests that compare before and after."""

from __future__ import annotations

from pathlib import Path

from megascend.apps.train.run_directory import LOCK


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return content and time of the last change of every file below ``folder``, by its path.

    Without the lock, whose file a killed run leaves behind.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
