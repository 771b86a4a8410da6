"""The engines for all ranks of a trainer: rank 0 calls them, and every rank learns of an error."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from megascend.errors import MegascendError, WeightSyncError
from megascend.runtime.distributed.objects import from_rank_0, raise_on_all_ranks
from megascend.sync.delivery import Delivery, Update, sync_error
from weightwire.errors import WireError

if TYPE_CHECKING:
    from megascend.runtime.distributed.groups import ProcessGroups

T = TypeVar("T")


@dataclass
class AllRanks:
    """The engines for all ranks of a trainer: rank 0 calls them, and all ranks raise its errors.

    Attributes:
        delivery: connection to the engines; None on other ranks, and after :meth:`WeightSync.close`.
    """

    groups: ProcessGroups
    delivery: Delivery | None = None

    def verify(self, update: Update) -> None:
        """Wait until all engines have verified the update. Collective."""
        self.call(lambda delivery: delivery.verify(update), "verification by the engines")

    def commit(self, update: Update) -> None:
        """Activate the update on all engines. Collective."""
        self.call(lambda delivery: delivery.commit(update), "the commit on the engines")

    def drop(self, update: Update) -> None:
        """Leave the update's group; on rank 0, make the engines drop it."""
        if update.sender is not None:
            update.sender.close()
        if self.delivery is not None:
            self.delivery.drop(update)

    def call(self, function: Callable[[Delivery], T], purpose: str) -> T:
        """Call ``function`` on rank 0, and return its result or raise its error on all ranks. Collective."""

        def with_delivery() -> T:
            if self.delivery is None:
                raise WeightSyncError("push: this WeightSync is closed")
            return function(self.delivery)

        return on_rank_0(with_delivery, self.groups, purpose)


def on_rank_0(function: Callable[[], T], groups: ProcessGroups, purpose: str) -> T:
    """Call ``function`` on rank 0, and return its result or raise its error, a MegascendError, on all ranks. Collective."""

    def run() -> T:
        try:
            return function()
        except MegascendError:
            raise
        except Exception as error:
            raise _sync_error(error, 0) from error

    return from_rank_0(run, groups, purpose)


def on_every_rank(function: Callable[[], T], groups: ProcessGroups, purpose: str, failure: str) -> T:
    """Call ``function``; if it fails on any rank, raise the first rank's error, a MegascendError, on all. Collective.

    No rank waits for one that has failed, and the trainer's process groups stay usable.

    Args:
        failure: the consequence, which the message of a WireError follows.
    """
    result: T | None = None
    problem: MegascendError | None = None
    try:
        result = function()
    except MegascendError as error:
        problem = error
    except Exception as error:  # noqa: BLE001  the other ranks wait for this rank's result
        problem = _sync_error(error, groups.rank, failure)
    raise_on_all_ranks(problem, groups, purpose)
    return result  # type: ignore[return-value]


def _sync_error(error: Exception, rank: int, failure: str = "") -> WeightSyncError:
    if isinstance(error, WireError):
        text = f"{failure}: {error}; all engines keep the old weights" if failure else str(error)
        return sync_error([error], text)
    return WeightSyncError(f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
