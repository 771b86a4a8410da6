"""What lies in a run's directory, for tests that compare before and after."""

from __future__ import annotations

from pathlib import Path


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of the last change of every file below ``folder``, by its path."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
