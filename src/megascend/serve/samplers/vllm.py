"""Requests to sample, answered by vLLM servers instead of the ranks while these train.

:class:`VllmSampling` takes the commands that the ranks would otherwise get: adapters to load and remove, requests to answer. Its
:class:`Pool` picks a server for each request. Sampling changes nothing, so a request that failed on one server can be sent to
another. :func:`vllm_servers` checks at the start that the servers have the model in training.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascend.config import Lora
from megascend.config.serve import ServeConfig
from megascend.errors import ConfigError, EngineError, EngineLostError, EngineTimeoutError, MegascendError
from megascend.rollout.availability import Availability
from megascend.sampling.request import SampleRequest, SampleResult, SamplingParams
from megascend.serve.samplers.vllm_server import RefusedError, ServerFailedError, UnknownModelError, VllmServer
from megascend.serve.scheduler.commands import Command, Create, Outcome, Remove, Respond

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BASE = "base"
"""Our name of the adapter that changes nothing; those of clients are ``p1`` and so on."""
KEY_VARIABLE = "MEGASCEND_VLLM_API_KEY"
SAME_MODEL = 0.05
"""Largest mean difference of log-probabilities that passes for the same model: bf16 on either side stays below 0.02."""
SAME_MODEL_RELATIVE = 0.01
"""Beside that, of their mean."""
log = logging.getLogger("megascend.serve")


class VllmSampling:
    """What the ranks would otherwise be asked, of several servers of one model.

    Args:
        found: the servers.
        report: takes outcomes.
        vocab_size, max_length: of the model, and of a prompt with its response.
        ends: tokens that end every response.

    Attributes:
        pool: of the servers, a collector of their metrics.
    """

    def __init__(
        self,
        found: Servers,
        report: Callable[[list[Outcome]], None],
        vocab_size: int,
        max_length: int,
        ends: Sequence[int] = (),
    ) -> None:
        self.pool, self._report = Pool(found, ends), report
        self._vocab_size, self._max_length = vocab_size, max_length
        self._directories = {BASE: found.base}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def put(self, command: Command) -> None:
        """Carry out a command; its outcome is reported later."""
        work: Coroutine[Any, Any, Any]
        if isinstance(command, Create):
            assert command.path is not None
            self._directories[command.adapter] = str(Path(command.path).absolute())
            work = self._nothing()  # loaded by the server that is asked for a response first
        elif isinstance(command, Remove):
            self._directories.pop(command.adapter, None)
            work = self.pool.unload(command.adapter)
        else:
            assert isinstance(command, Respond)
            work = self._respond(command.request)
        task = asyncio.get_running_loop().create_task(self._carry_out(command.number, work))
        self._tasks[command.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(command.number, None))

    def cancel(self, number: int) -> bool:
        """Give up what nobody waits for any more; whether it was under way."""
        task = self._tasks.get(number)
        return task is not None and task.cancel()

    async def close(self) -> None:
        """Have the servers forget this server's adapters, as far as they answer."""
        for task in list(self._tasks.values()):
            task.cancel()
        for adapter in list(self._directories):
            await self.pool.unload(adapter, always=adapter == BASE)

    async def _carry_out(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            outcome = Outcome(number, await work)
        except RefusedError as error:
            outcome = Outcome(number, error=ConfigError(str(error)))
        except asyncio.CancelledError:
            outcome = Outcome(number, error=ConfigError("nobody waits for this request any more"))
        except Exception as error:  # noqa: BLE001  whatever it is, whoever asked must hear
            outcome = Outcome(number, error=error)
        self._report([outcome])

    async def _nothing(self) -> None:
        return None

    async def _respond(self, request: SampleRequest) -> SampleResult:
        """By a server, if it can be answered at all."""
        if request.target_tokens is not None or request.prompt_draws:
            raise ConfigError("log-probabilities of other tokens in the prompt's places are not to be had from vLLM")
        limit = "what the served model takes"
        if refusal := request.refusal(self._directories, self._vocab_size, self._max_length, limit):
            return SampleResult(error=refusal)
        return await self.pool.respond(request, self._directories)


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


# --- check at the start ---


@dataclass(frozen=True)
class Probe:
    """A prompt, and what the model that is trained says of it.

    Attributes:
        prompt: token ids.
        expected: log-probabilities of all but the first.
    """

    prompt: tuple[int, ...]
    expected: tuple[float, ...]

    async def difference(self, server: VllmServer, model: str) -> float:
        """Mean difference of a server's log-probabilities, or NaN."""
        request = SampleRequest(self.prompt, SamplingParams(1), prompt_logprobs=True)
        found = (await server.sample(request, model)).prompt_logprobs or ()
        apart = [abs(float(one or 0) - other) for one, other in zip(found[1:], self.expected, strict=True)]
        return sum(apart) / len(apart)

    def passes(self, difference: float) -> bool:
        """Whether that is the same model."""
        return difference <= SAME_MODEL + SAME_MODEL_RELATIVE * sum(map(abs, self.expected)) / len(self.expected)


def vllm_servers(settings: ServeConfig, backend: Any) -> Servers | None:
    """The vLLM servers of the settings, once they listen and are found to have this model; None if there are none. Collective.

    Raises:
        ConfigError, EngineError: on every rank: one has another model, does not load adapters from storage, or cannot be asked.
    """
    if not settings.vllm:
        return None
    import torch

    from megascend.batch.sample import Sample
    from megascend.distributed.objects import raise_on_all_ranks

    base = (settings.storage / ".base-adapter").absolute()
    backend.add_adapter(BASE, Lora(rank=1, seed=0))
    backend.save_adapter(BASE, str(base), optimizer=False)
    backend.remove_adapter(BASE)
    tokens = torch.randint(0, backend.vocab_size, (33,), generator=torch.Generator().manual_seed(0))
    logprobs = backend.forward(backend.shard([Sample.causal(tokens)]), reference=True).logprobs
    try:
        servers = [VllmServer(address, os.environ.get(KEY_VARIABLE)) for address in settings.vllm]
    except ConfigError as error:
        raise ConfigError(f"vllm: {error}") from error
    found, problem = Servers(servers, f"megascend-{uuid.uuid4().hex[:12]}", str(base)), None
    if backend.rank == 0:
        probe = Probe(tuple(tokens.tolist()), tuple(logprobs[0].tolist()))
        try:
            asyncio.run(check(found, probe, backend.max_length, settings.timeout_s / 2))
        except MegascendError as error:
            problem = error
    raise_on_all_ranks(problem, backend.groups, "whether the vLLM servers have this model")
    return found


async def check(found: Servers, probe: Probe, max_length: int, wait_s: float = 0.0) -> None:
    """Find out whether every server has the model that is trained here, and reads adapters from storage.

    Args:
        max_length: of a sample, here; a server that takes less is told of in the log.
        wait_s: how long to wait for a server that does not listen yet.

    Raises:
        ConfigError: a server has another model.
        EngineError: it cannot be asked, or does not load adapters.
    """
    for server in found.servers:
        bases = [each for each in await _models(server, wait_s) if each.get("parent") is None]
        if len(bases) != 1:
            names = ", ".join(each["id"] for each in bases)
            raise ConfigError(f"{server.name} serves {len(bases)} models ({names}), not one")
        model = str(bases[0]["id"])
        longest = bases[0].get("max_model_len")
        if isinstance(longest, int) and longest < max_length:
            log.warning(
                "%s takes %d tokens, prompt and response together; this server trains on up to %d",
                server.name,
                longest,
                max_length,
            )
        await server.load_adapter(found.name(BASE), found.base)
        try:
            difference = await probe.difference(server, found.name(BASE))
        except RefusedError as error:
            raise ConfigError(f"{error}: is it the model that this server trains?") from error
        if not probe.passes(difference):
            raise ConfigError(
                f"{server.name} does not have the model that is trained here: log-probabilities of {len(probe.expected)} tokens "
                f"differ by {difference:.3g} on average"
            )
        log.info("%s samples: %s; log-probabilities differ by %.2g on average", server.name, model, difference)


async def _models(server: VllmServer, wait_s: float) -> list[dict[str, Any]]:
    """What it serves, once it listens."""
    loop = asyncio.get_running_loop()
    deadline, told = loop.time() + wait_s, False
    while True:
        try:
            return await server.models()
        except EngineLostError:
            if loop.time() >= deadline:
                raise
        if not told:
            log.warning("%s does not listen yet; waiting for up to %.0f s", server.name, wait_s)
            told = True
        await asyncio.sleep(1.0)
