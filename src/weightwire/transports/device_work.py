"""Waits for asynchronous work of a device, with a deadline and checks of the other members."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from weightwire.errors import DeadlineError, TransportError

if TYPE_CHECKING:
    import torch

    from weightwire.group import Group

FIRST_PAUSE_S = 20e-6
MAX_PAUSE_S = 5e-3
SHARE = 0.02
"""Pause as a share of the time waited so far: a short wait is hardly prolonged, a long one takes no CPU."""


def wait_until(condition: Callable[[], bool], group: Group, timeout_s: float, failure: str) -> None:
    """Wait until ``condition()`` holds.

    Raises:
        DeadlineError: it did not within ``timeout_s`` seconds; the message begins with ``failure``.
        PeerLostError: a member of the group is known to be lost.
    """
    start = time.monotonic()
    while not condition():
        group.check()
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise DeadlineError(f"{failure} within {timeout_s:g} s")
        time.sleep(min(max(FIRST_PAUSE_S, waited * SHARE), MAX_PAUSE_S))


class DeviceWork:
    """An asynchronous collective of a torch process group. It keeps its buffer alive until it completes.

    Args:
        work: the process group's handle.
        name: name of the transport, for messages.
    """

    def __init__(self, work: Any, buffer: torch.Tensor, group: Group, name: str) -> None:
        self._work, self._buffer, self._group, self._name = work, buffer, group, name

    @property
    def ended(self) -> bool:
        """Check whether the collective has completed or failed."""
        return self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        """See :class:`weightwire.transports.base.Work`."""
        wait_until(self._work.is_completed, self._group, timeout_s, f"{self._name}: a bucket has not travelled")
        try:
            # It has ended: this raises an error that the library has recorded. Without a timeout NCCL's would not.
            self._work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            raise TransportError(f"{self._name}: {first_line(error)}") from error

    def give_up(self) -> None:
        """Cancel the collective unless it has ended: a timed wait that expires aborts NCCL's communicator."""
        if not self.ended:
            with contextlib.suppress(RuntimeError):
                self._work.wait(timedelta(milliseconds=1))


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without torch's C++ frames."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
