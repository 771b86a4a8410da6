"""Whose requests to sample run together next. Pure: the same on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megascend.serve.commands import Respond


class SampleTurns:
    """Takes requests of all tenants by turns, one each, so that nobody waits for all that another one has in line.

    The tenant that was served longest ago begins. A request that has more responses than are sampled together runs when its
    tenant begins, alone.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[str, int] = {}  # when each tenant with requests in line was served last

    def take(self, ready: Sequence[Respond], most: int) -> list[Respond]:
        """Requests to run together.

        Args:
            ready: those that may run; a tenant's in their order.
            most: responses at a time.
        """
        lines: dict[str, deque[Respond]] = {}
        for command in ready:
            lines.setdefault(command.tenant, deque()).append(command)
        taken: list[Respond] = []
        room = most
        turns = deque(sorted(lines, key=lambda tenant: self._last.get(tenant, 0)))  # sorted is stable: ties by arrival
        while turns:
            tenant = turns.popleft()
            size = lines[tenant][0].request.num_samples
            if taken and size > room:
                continue  # and nothing behind it: a tenant's requests keep their order
            taken.append(lines[tenant].popleft())
            room -= size
            self._count += 1
            self._last[tenant] = self._count
            if lines[tenant]:
                turns.append(tenant)
        self._last = {tenant: last for tenant, last in self._last.items() if lines.get(tenant)}
        return taken
