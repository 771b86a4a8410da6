"""Work of a trainer's ranks in a push: an error of any of them reaches all, as a WeightSyncError."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from megascend.errors import ConfigError, EngineFaultError, MegascendError, WeightSyncError
from megascend.runtime.distributed.objects import from_rank_0, raise_on_all_ranks
from weightwire.errors import WireError

if TYPE_CHECKING:
    from megascend.runtime.distributed.groups import ProcessGroups

T = TypeVar("T")

OLD_WEIGHTS = "; all engines keep the old weights"


@dataclass(frozen=True)
class Ranks:
    """The ranks of a trainer; without process groups, a process that sends weights alone."""

    groups: ProcessGroups | None = None

    def on_rank_0(self, function: Callable[[], T], purpose: str, failure: str = "") -> T:
        """Call ``function`` on rank 0, and return its result or raise its error, a MegascendError, on all ranks. Collective.

        Args:
            purpose: the work, for errors of the exchange itself.
            failure: the consequence, which the message of a WireError follows.
        """

        def run() -> T:
            with _converted(0, failure):
                return function()

        return run() if self.groups is None else from_rank_0(run, self.groups, purpose)

    def on_every_rank(self, function: Callable[[], T], purpose: str, failure: str) -> T:
        """Call ``function``; if it fails on any rank, raise the first rank's error, a MegascendError, on all. Collective.

        No rank waits for one that has failed, and the trainer's process groups stay usable.
        """
        if self.groups is None:
            return self.on_rank_0(function, purpose, failure)
        result: T | None = None
        problem: MegascendError | None = None
        try:
            with _converted(self.groups.rank, failure):
                result = function()
        except MegascendError as error:
            problem = error
        raise_on_all_ranks(problem, self.groups, purpose)
        return result  # type: ignore[return-value]


def push_error(causes: Iterable[Exception], message: str) -> WeightSyncError:
    """Return the error of a push: an EngineFaultError if only engines were lost, and none has refused it."""
    return (EngineFaultError if all(is_lost(cause) for cause in causes) else WeightSyncError)(message)


def is_lost(error: Exception) -> bool:
    """Check an engine's error for one that another engine, or the same one later, would not have."""
    if isinstance(error, WireError):
        return error.kind == "lost"
    # Neither an answer in time nor one of the contract: a process that hangs, is gone, or writes nonsense.
    return not isinstance(error, ConfigError)


@contextlib.contextmanager
def _converted(rank: int, failure: str) -> Iterator[None]:
    """Make a MegascendError of any exception within the context: other ranks wait for the result of this one."""
    try:
        yield
    except MegascendError:
        raise
    except WireError as error:
        raise push_error([error], f"{failure}: {error}{OLD_WEIGHTS}" if failure else str(error)) from error
    except Exception as error:
        text = f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        raise WeightSyncError(text) from error
