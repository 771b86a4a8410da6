"""A Gloo group reserved for object collectives: a mismatched call can only meet another object collective in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megascend.distributed import frames
from megascend.errors import ProcessGroupError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

LOOK_S = 1.0
"""Seconds that a rank waits before its first check for a deadlock between groups."""
MAX_PAUSE_S = 30.0
"""Longest pause between two checks, in seconds: each reads the store once for every rank of the group."""
MARGIN_S = 1.0
"""Seconds that a rank waits past the group's timeout, so that Gloo's own error, which says more, arrives first."""


class Channel:
    """The object collectives of one set of ranks. Groups of the same ranks share one channel, whatever their names.

    Attributes:
        name: the first of the groups' names; the collectives are counted under it.
        ranks: global ranks, in group order.
        group: Gloo group; None for a single rank, which exchanges nothing.
        timeout_s: timeout of a collective, in seconds.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, group: ProcessGroup | None, timeout_s: float
    ) -> None:
        if group is not None and (backend := dist.get_backend(group)) != "gloo":
            raise ProcessGroupError(
                f"rank {rank}: objects on group {name!r} would go over {backend}; objects travel on gloo only"
            )
        self.name, self.ranks, self.rank, self.group, self.timeout_s = name, list(ranks), rank, group, timeout_s
        # Gloo writes into the receive buffer after the call returns, so both are held until the work has completed.
        self._unfinished: list[tuple[torch.Tensor, Work]] = []

    @property
    def is_single(self) -> bool:
        """Check whether no other rank is in the group."""
        return len(self.ranks) == 1

    def exchange(
        self, frame: bytes, timeout_s: float | None = None, on_slow: Callable[[], None] | None = None
    ) -> list[bytes]:
        """Return every rank's frame, in group order.

        Args:
            timeout_s: default: the group's timeout.
            on_slow: called with growing pauses while this rank waits; see :data:`LOOK_S`.
        """
        if self.is_single:
            return [frame]
        received, work = self._send(frame)
        self._wait(work, self.timeout_s + MARGIN_S if timeout_s is None else timeout_s, on_slow)
        data = received.numpy().tobytes()
        return [data[start : start + frames.SIZE] for start in range(0, len(data), frames.SIZE)]

    def take_part(self, frame: bytes) -> None:
        """Join the next exchange without waiting for it, so that the other ranks can complete it."""
        self._unfinished = [entry for entry in self._unfinished if not entry[1].is_completed()]
        self._unfinished.append(self._send(frame))

    def _send(self, frame: bytes) -> tuple[torch.Tensor, Work]:
        """Start an exchange; return the receive buffer and the work handle."""
        # An all-to-all of equal frames, not an all-gather: Gloo passes an all-gather from rank to rank around a ring.
        outgoing = torch.frombuffer(bytearray(frame * len(self.ranks)), dtype=torch.uint8)
        received = torch.empty_like(outgoing)
        work = dist.all_to_all_single(received, outgoing, group=self.group, async_op=True)
        assert work is not None, "this rank is in the group"
        return received, work

    def _wait(self, work: Work, limit_s: float, on_slow: Callable[[], None] | None) -> None:
        deadline, pause = time.monotonic() + limit_s, LOOK_S
        while True:
            left = deadline - time.monotonic()
            try:
                # Waiting in slices: one long wait would leave no moment to check for a deadlock.
                work.wait(timedelta(seconds=max(min(pause, left), 0.001)))  # Gloo reads 0 as no limit
                return
            except RuntimeError:
                # Gloo raises RuntimeError for a slice that elapsed and for a failed collective; only the latter has completed.
                if work.is_completed():
                    work.wait()  # raises Gloo's error; returns if the exchange completed just after the slice
                    return
                if left <= pause:
                    raise
            if on_slow is not None:
                on_slow()
            pause = min(2 * pause, MAX_PAUSE_S)
