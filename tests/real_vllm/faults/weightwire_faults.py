"""Faults in a real vLLM's workers, as one of its plug-ins. What to do stands in the file that ``WEIGHTWIRE_FAULT`` names, while
it is there.

``load``: a commit fails after five tensors; ``load:1``: in the second worker alone. ``restore``: so does going back. ``slow``: a
commit takes two seconds longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def wanted() -> set[str]:
    """Faults that are to happen now."""
    path = Path(os.environ.get("WEIGHTWIRE_FAULT", "/nonexistent"))
    return set(path.read_text().split()) if path.exists() else set()


def failing(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The tensors, as far as the fault lets them."""
    import torch.distributed as dist

    mine = {"load", f"load:{dist.get_rank()}"}
    for place, tensor in enumerate(tensors):
        if place == 5 and mine & wanted():
            raise RuntimeError("the fault of a test: no sixth tensor")
        yield tensor


def register() -> None:
    """Put the faults in their places, once a process."""
    from weightwire.vllm import model, updates

    load, restore = updates.load, model.Snapshot.restore
    if getattr(load, "faulty", False):
        return

    def faulty_load(module: Any, config: Any, tensors: Iterable[tuple[str, Any]]) -> None:
        if "slow" in wanted():
            time.sleep(2)
        load(module, config, failing(tensors))

    def faulty_restore(self: model.Snapshot) -> None:
        if "restore" in wanted():
            raise RuntimeError("the fault of a test: no way back")
        restore(self)

    faulty_load.faulty = True  # type: ignore[attr-defined]
    updates.load, model.Snapshot.restore = faulty_load, faulty_restore  # type: ignore[method-assign]
