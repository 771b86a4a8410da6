"""Capturing work of the device as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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

    def stream(self) -> AbstractContextManager[None]:
        """A context in which all work happens that is captured now or later: what comes before it has been done when it begins,
        and it has been done when what follows begins."""
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

    Args:
        own_stream: all work happens on one stream that is not the default one. Where nodes of autograd that add gradients up
            outlive a step, as under Megatron's DDP, they belong to the stream on which they were made, and no node of the
            default stream can be captured.
    """

    def __init__(self, *, own_stream: bool = False) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream() if own_stream else None

    @contextmanager
    def stream(self) -> Iterator[None]:
        """See :class:`Capture`."""
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See :class:`Capture`. Waits for the device."""
        graph = torch.cuda.CUDAGraph()
        # torch keeps cuBLAS's workspace of a stream. One from before would not lie in the pool, and go while the graph still
        # writes to it; one of the pool would stay there beyond the life of all graphs.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # Other threads (checkpoints, NCCL's watchdog) may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                found = work()
        finally:
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
