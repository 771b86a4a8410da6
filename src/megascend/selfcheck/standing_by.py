"""A process of the self-check that imports what it needs while this one still imports Megatron: both take seconds.

Whether a run needs a verdict found out is known for certain only when Megatron has been imported. So a file is left where one has
been asked for, with a name of what can be known before; where there is none, a process is started.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from megascend.selfcheck.process import Worker, cache_folder, versions


def worker_for(model_dir: Path, max_length: int | None) -> Worker | None:
    """A process for the verdict on a model, or None where none is likely to be asked for it.

    None too if the model has a sliding window, of which only its Megatron configuration says whether it is in force; and if it
    cannot be read or a package is missing, which is told where it is needed.

    Args:
        max_length: of ``batching``.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError, PackageNotFoundError):
        raw = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        if raw.get("sliding_window") is None and not _mark(model_dir, max_length).exists():
            return Worker()
    return None


def asked(model_dir: Path, max_length: int | None) -> None:
    """The verdict is there: the next run need not have a process for it."""
    with contextlib.suppress(OSError):
        _mark(model_dir, max_length).touch()


def _mark(model_dir: Path, max_length: int | None) -> Path:
    content = [(model_dir / "config.json").read_text(encoding="utf-8"), max_length, versions()]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / f"{digest}.asked"
