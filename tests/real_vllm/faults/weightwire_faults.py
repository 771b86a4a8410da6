"""Faults in a real vLLM's workers, as a vLLM plug-in. The file that ``WEIGHTWIRE_FAULT`` names lists the active faults.

``load``: a commit fails after five tensors; ``load:1``: only in the second worker. ``restore``: restoring the old weights fails.
``slow``: a commit takes two seconds longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def active_faults() -> set[str]:
    """Return the faults that are active now."""
    path = Path(os.environ.get("WEIGHTWIRE_FAULT", "/nonexistent"))
    return set(path.read_text().split()) if path.exists() else set()


def failing(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield tensors until the fault raises."""
    import torch.distributed as dist

    names = {"load", f"load:{dist.get_rank()}"}
    for index, tensor in enumerate(tensors):
        if index == 5 and names & active_faults():
            raise RuntimeError("the fault of a test: no sixth tensor")
        yield tensor


def register() -> None:
    """Install the faults, once per process."""
    from weightwire.vllm import model, updates

    load, restore = updates.load, model.Snapshot.restore
    if getattr(load, "faulty", False):
        return

    def faulty_load(module: Any, config: Any, tensors: Iterable[tuple[str, Any]]) -> None:
        if "slow" in active_faults():
            time.sleep(2)
        load(module, config, failing(tensors))

    def faulty_restore(self: model.Snapshot) -> None:
        if "restore" in active_faults():
            raise RuntimeError("the fault of a test: no way back")
        restore(self)

    faulty_load.faulty = True  # type: ignore[attr-defined]
    updates.load, model.Snapshot.restore = faulty_load, faulty_restore  # type: ignore[method-assign]
