"""Capturing work of the device as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Capture(Protocol):
    """How work is captured that has run before, so that nothing in it happens for the first time."""

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Call ``work`` once without executing what it asks of the device.

        Returns:
            What executes it all, as often as it is called; and what ``work`` returned, tensors that each execution overwrites.

        Raises:
            RuntimeError: something in ``work`` cannot be captured.
        """
        ...

    def wait(self) -> None:
        """Wait for the device: captured work that still runs must not be given up."""
        ...

    def free(self) -> None:
        """Return the memory of captured work that has been given up to the device."""
        ...

    @property
    def bytes(self) -> int:
        """Device memory that all captured work holds."""
        ...


class CudaCapture:
    """CUDA graphs in one memory pool: no two of them ever run at a time, so they may use the same memory.

    The pool is as large as the largest of them needs, rather than all together. What a graph returns is valid until another one
    runs.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See :class:`Capture`. Waits for the device."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (checkpoints, NCCL's watchdog) may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                found = work()
        finally:
            # torch keeps cuBLAS's workspace of the stream that captures, in the pool, beyond the life of all graphs.
            torch._C._cuda_clearCublasWorkspaces()
        return graph.replay, found

    def wait(self) -> None:
        """See :class:`Capture`."""
        torch.cuda.synchronize()

    def free(self) -> None:
        """See :class:`Capture`."""
        torch.cuda.empty_cache()

    @property
    def bytes(self) -> int:
        """Of the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == tuple(self._pool))
