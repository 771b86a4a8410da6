"""How far a call has come, from the phases that its engine marks: no engine is asked, and no rank asks another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megascend.diagnostics.hang_monitor import HangMonitor

PHASE = "forward"
"""What engines mark around the forward pass of every micro batch, or of each of its chunks."""

OnMicroBatch = Callable[[int, int], None]


@contextmanager
def progress(monitor: HangMonitor, tell: OnMicroBatch | None, micro_batches: int, chunks: int) -> Iterator[None]:
    """Until the block ends, call ``tell`` when a forward pass begins, with the number of whole micro batches that have had theirs
    and of all.

    Args:
        chunks: of the model on this rank, through each of which a micro batch passes by itself.
    """
    entered = 0

    def on_phase(name: str) -> None:
        nonlocal entered
        if name == PHASE and tell is not None:
            tell(entered // chunks, micro_batches)
            entered += 1

    monitor.on_phase = on_phase
    try:
        yield
    finally:
        monitor.on_phase = None
