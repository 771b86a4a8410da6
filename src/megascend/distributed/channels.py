"""A Gloo group that carries object collectives and nothing else, so that only those can meet in it."""

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
"""How long a rank waits before it looks, for the first time, whether it waits in vain, in seconds."""
LOOK_AT_MOST_S = 30.0
"""The longest pause between two looks, in seconds: each costs a read of the store for every rank of the group."""
MARGIN_S = 1.0
"""How much longer than Gloo a rank waits for Gloo's own error, in seconds."""


class Channel:
    """Object collectives of one set of ranks, counted. Groups of the same ranks share one, whatever their names.

    Attributes:
        name: the first of the groups' names.
        ranks: global ranks, in group order.
        group: on Gloo; None where a rank is alone and nothing needs to travel.
        timeout_s: of a collective, in seconds.

    Raises:
        ProcessGroupError: the group is not on Gloo.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, group: ProcessGroup | None, timeout_s: float
    ) -> None:
        if group is not None and (backend := dist.get_backend(group)) != "gloo":
            raise ProcessGroupError(
                f"rank {rank}: objects on group {name!r} would go over {backend}; objects travel on gloo only"
            )
        self.name, self.ranks, self.rank, self.group, self.timeout_s = name, list(ranks), rank, group, timeout_s
        self._unfinished: list[tuple[torch.Tensor, Work]] = []

    @property
    def is_single(self) -> bool:
        """Check whether no other rank is in the group."""
        return len(self.ranks) == 1

    def exchange(
        self, frame: bytes, timeout_s: float | None = None, look: Callable[[], None] | None = None
    ) -> list[bytes]:
        """Return every rank's frame, in group order.

        Args:
            timeout_s: default: the group's timeout.
            look: called from time to time while this rank waits.

        Raises:
            RuntimeError: from Gloo: a rank has not come, or was lost.
        """
        if self.is_single:
            return [frame]
        received, work = self._send(frame)
        self._wait(work, self.timeout_s + MARGIN_S if timeout_s is None else timeout_s, look)
        data = received.numpy().tobytes()
        return [data[start : start + frames.SIZE] for start in range(0, len(data), frames.SIZE)]

    def take_part(self, frame: bytes) -> None:
        """Join the next exchange without waiting for it, so that the other ranks can complete it."""
        self._unfinished = [entry for entry in self._unfinished if not entry[1].is_completed()]
        self._unfinished.append(self._send(frame))

    def _send(self, frame: bytes) -> tuple[torch.Tensor, Work]:
        """Start an exchange; return the receive buffer and the work handle."""
        # Gloo passes an all-gather from rank to rank; an all-to-all sends to all at once.
        outgoing = torch.frombuffer(bytearray(frame * len(self.ranks)), dtype=torch.uint8)
        received = torch.empty_like(outgoing)
        work = dist.all_to_all_single(received, outgoing, group=self.group, async_op=True)
        assert work is not None, "this rank is in the group"
        return received, work

    def _wait(self, work: Work, limit_s: float, look: Callable[[], None] | None) -> None:
        deadline, pause = time.monotonic() + limit_s, LOOK_S
        while True:
            left = deadline - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(min(pause, left), 0.001)))  # 0 would be for ever
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what Gloo has to say, unless the end came right after the pause
                    return
                if left <= pause:
                    raise
            if look is not None:
                look()
            pause = min(2 * pause, LOOK_AT_MOST_S)
