"""Handles of collectives that Gloo carries out: what is left to do when Gloo is done, and what must live until then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

_c10d: Any = torch._C._distributed_c10d  # type: ignore[reportAttributeAccessIssue]  # not in torch's stubs
_in_flight: dict[int, Any] = {}  # point-to-point operations not waited for yet: Gloo reads their memory


def after(works: Sequence[Work], finish: Callable[[], None] | None = None) -> Work:
    """The work of collectives of one group, and of ``finish``, which runs once they are done.

    ``finish`` runs on Gloo's thread, before the group's next collective: a later collective sees what an earlier one
    wrote, as on a device stream, whether or not somebody waited in between.
    """
    if finish is None and len(works) == 1:
        return works[0]
    futures: list[Any] = [work.get_future() for work in works]

    def done(future: Future[Any]) -> None:
        for each in future.wait():
            each.wait()  # raises what Gloo raised
        if finish is not None:
            finish()

    finished = torch.futures.collect_all(futures).then(done)

    def wait(timeout: timedelta) -> bool:
        finished.wait()  # ends when Gloo's own timeout does; PyTorch's work around a future would swallow the error
        return True

    return _c10d.PythonCallbackWork(wait)


def point_to_point(work: Work, keep: Any) -> Work:
    """The work of a send or receive. ``keep`` lives until somebody waits, even if the caller drops the handle."""
    key = id(work)
    _in_flight[key] = (work, keep)

    def wait(timeout: timedelta) -> bool:
        try:
            return work.wait(timeout) if timeout else work.wait()
        finally:
            _in_flight.pop(key, None)

    return _c10d.PythonCallbackWork(wait)


def together(works: Sequence[Work]) -> Work:
    """One handle for several works of whatever kind."""

    def wait(timeout: timedelta) -> bool:
        done = [work.wait(timeout) if timeout else work.wait() for work in works]  # all, even after a False
        return all(done)

    return _c10d.PythonCallbackWork(wait)
