"""Which vLLM server answers a request to sample, and what is remembered of those that failed.

Sampling changes nothing, so a request that one server failed at can be sent to another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megascend.errors import EngineError, EngineLostError, EngineTimeoutError, MegascendError
from megascend.rollout.availability import Availability
from megascend.sampling.request import SampleRequest, SampleResult
from megascend.serve.samplers.vllm_server import RefusedError, ServerFailedError, UnknownModelError, VllmServer

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BASE = "base"
"""Our name of the adapter that changes nothing; those of clients are ``p1`` and so on."""
log = logging.getLogger("megascend.serve")


@dataclass(frozen=True)
class Servers:
    """vLLM servers that have the model.

    Attributes:
        prefix: of adapters' names. No other server of ours, earlier ones on this storage among them, may mean another adapter by
            the same name.
        base: directory of an adapter that changes nothing, by which the model itself is sampled from: vLLM 0.32 on a CPU gives
            requests without an adapter the one in its last slot (``lora/ops/torch_ops``, index -1).
    """

    servers: Sequence[VllmServer]
    prefix: str
    base: str

    def name(self, adapter: str) -> str:
        """What the servers call an adapter."""
        return f"{self.prefix}-{adapter}"


class _Adapters:
    """Adapters that one server has."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self._loading: dict[str, asyncio.Task[None]] = {}

    async def load(self, name: str, directory: str) -> None:
        """Have an adapter loaded; several that ask wait for the same."""
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self.server.load_adapter(name, directory))
        try:
            await asyncio.shield(task)
        except BaseException:
            if task.done() and self._loading.get(name) is task:
                del self._loading[name]
            raise

    def forget(self, name: str) -> None:
        """The server does not have the adapter any more."""
        self._loading.pop(name, None)

    async def unload(self, name: str, *, always: bool) -> None:
        """Have an adapter forgotten that was loaded by this object, or ``always``."""
        if always or name in self._loading:
            self.forget(name)
            await self.server.unload_adapter(name)


class Pool:
    """Several servers of one model. The least busy one of those that have not failed a short time ago answers.

    If a server cannot be reached, the request goes to another one, as long as there are any; if it fails otherwise (no answer in
    time, status 5xx, an answer that cannot be read), to one other. What a server refuses is not sent again.

    Args:
        found: the servers.
        ends: tokens that end every response.
        clock: seconds, monotonic.
    """

    def __init__(self, found: Servers, ends: Sequence[int] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._servers, self._name, self._ends = [_Adapters(each) for each in found.servers], found.name, tuple(ends)
        self._availability = Availability(len(self._servers), clock)
        self._pending = [0] * len(self._servers)
        self._answered: Counter[int] = Counter()
        self._failures: Counter[tuple[int, str]] = Counter()

    async def respond(self, request: SampleRequest, directories: Mapping[str, str]) -> SampleResult:
        """Answer a request.

        Args:
            directories: of adapters, by their names here.

        Raises:
            RefusedError: a server says that it cannot be answered.
            EngineError: of the kind of the first failure; the message has those of all servers that were asked.
        """
        problems: list[EngineError] = []
        left = list(range(len(self._servers)))
        while left and sum(not isinstance(each, EngineLostError) for each in problems) < 2:
            which = self._availability.best(left, self._pending)
            left.remove(which)
            self._pending[which] += 1
            try:
                result = await self._respond_by(which, request, directories)
            except RefusedError:
                self._note_answer(which)
                raise
            except EngineError as error:
                self._note_failure(which, error)
                problems.append(error)
            else:
                self._note_answer(which)
                return result
            finally:
                self._pending[which] -= 1
        raise type(problems[0])("; ".join(map(str, problems)))

    async def _respond_by(self, which: int, request: SampleRequest, directories: Mapping[str, str]) -> SampleResult:
        each, adapter = self._servers[which], request.adapter or BASE
        if self._availability.doubtful(which):
            await each.server.check_health()  # before a request waits for a server that hangs
        name = self._name(adapter)
        for attempt in range(2):
            await each.load(name, directories[adapter])
            try:
                return await each.server.sample(request, name, self._ends)
            except UnknownModelError:  # it was started again, or had to make room
                each.forget(name)
                if attempt:
                    raise
        raise AssertionError("unreachable")

    def _note_failure(self, which: int, error: EngineError) -> None:
        """Leave the server out, unless what failed says nothing of other requests."""
        reason = _reason(error)
        self._failures[which, reason] += 1
        if reason == "other":
            return
        seconds = self._availability.failed(which)
        if seconds is not None:
            log.warning("%s is left out for %g s: %s", self._servers[which].server.name, seconds, error)

    def _note_answer(self, which: int) -> None:
        self._answered[which] += 1
        if self._availability.answered(which):
            log.warning("%s answers again", self._servers[which].server.name)

    async def unload(self, adapter: str, *, always: bool = False) -> None:
        """Have all servers forget an adapter that they loaded for this object, or ``always``, as far as they answer."""
        for each in self._servers:
            try:
                await each.unload(self._name(adapter), always=always)
            except MegascendError as error:
                log.warning("an adapter that nobody samples from stays loaded: %s", error)

    def collect(self) -> Iterator[Metric]:
        """Collect metrics of the servers for Prometheus; a server's label is its place in the settings, from 0 on."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        pending = GaugeMetricFamily(
            "megascend_vllm_pending", "Requests that a vLLM server has not answered.", labels=["server"]
        )
        left_out = GaugeMetricFamily(
            "megascend_vllm_left_out",
            "Whether a vLLM server is left out, as it failed a short time ago.",
            labels=["server"],
        )
        answered = CounterMetricFamily(
            "megascend_vllm_answered", "Requests that a vLLM server answered.", labels=["server"]
        )
        failures = CounterMetricFamily(
            "megascend_vllm_failures",
            "Requests that a vLLM server failed at, and that others got.",
            labels=["server", "reason"],
        )
        for which in range(len(self._servers)):
            pending.add_metric([str(which)], self._pending[which])
            left_out.add_metric([str(which)], int(self._availability.left_out(which)))
            answered.add_metric([str(which)], self._answered[which])
        for (which, reason), count in sorted(self._failures.items()):
            failures.add_metric([str(which), reason], count)
        yield from (pending, left_out, answered, failures)


def _reason(error: EngineError) -> str:
    """Of a failure; "other": it is of one adapter's, and the server may well answer for others."""
    if isinstance(error, EngineLostError):
        return "lost"
    if isinstance(error, EngineTimeoutError):
        return "timeout"
    return "failed" if isinstance(error, ServerFailedError) else "other"
