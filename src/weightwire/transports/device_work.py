"""What a device does in its own time, waited for with a deadline and an eye on the other members."""

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
MOST_PAUSE_S = 5e-3
SHARE = 0.02
"""A pause is this share of the time waited so far: a bucket of a millisecond takes little longer, a minute takes no CPU."""


def wait_until(done: Callable[[], bool], group: Group, timeout_s: float, what: str) -> None:
    """Return when ``done()``.

    Raises:
        DeadlineError: it was not within ``timeout_s`` seconds; the message begins with ``what``.
        PeerLostError: a member of the group is known to be lost.
    """
    start = time.monotonic()
    while not done():
        group.check()
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise DeadlineError(f"{what} within {timeout_s:g} s")
        time.sleep(min(max(FIRST_PAUSE_S, waited * SHARE), MOST_PAUSE_S))


class DeviceWork:
    """A collective of a torch process group on a device. It holds its buffer until it is done.

    Args:
        work: what the process group returned.
        name: of the transport, for messages.
    """

    def __init__(self, work: Any, buffer: torch.Tensor, group: Group, name: str) -> None:
        self._work, self._buffer, self._group, self._name = work, buffer, group, name

    @property
    def ended(self) -> bool:
        """Whether the device has done it, or it has failed."""
        return self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        """See :class:`weightwire.transports.base.Work`."""
        wait_until(self._work.is_completed, self._group, timeout_s, f"{self._name}: a bucket has not travelled")
        try:
            # It is over: this raises what the library has reported. Without a timeout NCCL's would not.
            self._work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            raise TransportError(f"{self._name}: {first_line(error)}") from error

    def give_up(self) -> None:
        """If it is not done, end it: a timed wait that runs out aborts NCCL's communicator."""
        if not self.ended:
            with contextlib.suppress(RuntimeError):
                self._work.wait(timedelta(milliseconds=1))


def first_line(error: Exception) -> str:
    """The first line of a message, without torch's C++ frames."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
