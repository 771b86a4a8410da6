"""Where all ranks meet while weights stream out of a model, so that one that has left is an error and not a hang."""

from __future__ import annotations

from megascend.distributed.objects import gather_objects
from megascend.distributed.process_groups import ProcessGroups


class Stopped(Exception):
    """Some rank has left the stream."""

    def __init__(self, rank: int, where: str, why: str) -> None:
        super().__init__(rank, where, why)
        self.rank, self.where, self.why = rank, where, why


class Meetings:
    """Where all ranks meet during a stream: before each layer, and at the end."""

    def __init__(self, groups: ProcessGroups, layers: int) -> None:
        self._groups, self._layers = groups, layers
        self._why: str | None = None
        self._layer = 0

    def stop(self, why: str) -> None:
        """Tell the others, at the next meeting, that this rank takes no more."""
        self._why = why

    def before_layer(self) -> None:
        """Raises Stopped on every rank if any has stopped."""
        self._meet(f"before layer {self._layer}")
        self._layer += 1

    def at_end(self) -> None:
        """As :meth:`before_layer`, after the last tensor."""
        self._meet("after the last layer")

    def attend(self) -> None:
        """All meetings, of a rank that has nothing else to do."""
        for _ in range(self._layers):
            self.before_layer()
        self.at_end()

    def _meet(self, where: str) -> None:
        told = gather_objects(self._why, "world", self._groups, f"named weights, {where}")
        for rank, why in enumerate(told):
            if why is not None:
                raise Stopped(rank, where, why)
