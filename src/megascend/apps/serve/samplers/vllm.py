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

from megascend.apps.rl.rollout.availability import Availability
from megascend.apps.sampling.request import SampleRequest, SampleResult, SamplingParams
from megascend.apps.serve.samplers.vllm_server import RefusedError, ServerFailedError, UnknownModelError, VllmServer
from megascend.apps.serve.scheduler.commands import Command, Create, Outcome, Remove, Respond
from megascend.config import Lora
from megascend.config.serve import ServeConfig
from megascend.errors import ConfigError, EngineError, EngineLostError, EngineTimeoutError, MegascendError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BASE = "base"
"""Our name for the zero adapter; those of clients are ``p1`` and so on."""
KEY_VARIABLE = "MEGASCEND_VLLM_API_KEY"
SAME_MODEL = 0.05
"""Largest mean difference of log-probabilities accepted as the same model: bf16 on either side stays below 0.02."""
SAME_MODEL_RELATIVE = 0.01
"""Additional tolerance, relative to their mean."""
CLOSE_S = 5.0
"""Time that all servers together have to unload our adapters when this server ends."""
log = logging.getLogger("megascend.apps.serve")


class VllmSampling:
    """Executes sampling commands on vLLM servers. All methods run on the HTTP server's event loop.

    Args:
        servers: the servers.
        report: takes outcomes.
        vocab_size, max_length: vocabulary size, and maximum length of prompt and response together.
        ends: tokens that end every response.

    Attributes:
        pool: pool of the servers, and collector of their metrics.
    """

    def __init__(
        self,
        servers: Servers,
        report: Callable[[list[Outcome]], None],
        vocab_size: int,
        max_length: int,
        ends: Sequence[int] = (),
    ) -> None:
        self.pool, self._report = Pool(servers, ends), report
        self._vocab_size, self._max_length = vocab_size, max_length
        self._directories = {BASE: servers.base}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def submit(self, command: Command) -> None:
        """Start a command; its outcome is reported later."""
        operation: Coroutine[Any, Any, Any]
        if isinstance(command, Create):
            assert command.path is not None
            # absolute, because vLLM has another working directory
            self._directories[command.adapter] = str(Path(command.path).absolute())
            operation = asyncio.sleep(0)  # nothing: a server loads it with the first request that needs it
        elif isinstance(command, Remove):
            self._directories.pop(command.adapter, None)
            operation = self.pool.unload(command.adapter)
        else:
            assert isinstance(command, Respond)
            operation = self._respond(command.request)
        task = asyncio.get_running_loop().create_task(self._carry_out(command.number, operation))
        self._tasks[command.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(command.number, None))

    def cancel(self, number: int) -> bool:
        """Cancel a command; return whether it was in progress."""
        task = self._tasks.get(number)
        return task is not None and task.cancel()

    async def close(self) -> None:
        """Unload our adapters from the servers, except from those that do not answer within ``CLOSE_S``."""
        # Cancelled first: a request in progress would load its adapter again.
        for task in list(self._tasks.values()):
            task.cancel()
        # At once: one that does not answer must not keep the others' adapters loaded.
        unloads = [self.pool.unload(adapter, always=adapter == BASE) for adapter in self._directories]
        try:
            await asyncio.wait_for(asyncio.gather(*unloads), CLOSE_S)
        except (TimeoutError, asyncio.TimeoutError):
            log.warning("adapters stay loaded: a vLLM server did not answer within %g s", CLOSE_S)

    async def _carry_out(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            outcome = Outcome(number, await work)
        except RefusedError as error:
            outcome = Outcome(number, error=ConfigError(str(error)))
        except asyncio.CancelledError:
            outcome = Outcome(number, error=ConfigError("the request was cancelled"))
        except Exception as error:  # every command must have an outcome
            if not isinstance(error, MegascendError):  # the client gets only its class
                log.exception("a command for the vLLM servers has failed")
            outcome = Outcome(number, error=error)
        self._report([outcome])

    async def _respond(self, request: SampleRequest) -> SampleResult:
        """Sample on a server, after checking what vLLM cannot do."""
        if request.target_tokens is not None or request.prompt_draws:
            raise ConfigError("vLLM does not report log-probabilities of other tokens at prompt positions")
        if request.images is not None:
            raise ConfigError(
                "the prompt has images, which this server does not send to vLLM servers; sample from the ranks"
            )
        limit = "what the served model takes"
        if refusal := request.refusal(self._directories, self._vocab_size, self._max_length, limit):
            return SampleResult(error=refusal)
        return await self.pool.respond(request, self._directories)


@dataclass(frozen=True)
class Servers:
    """The configured vLLM servers.

    Attributes:
        prefix: prefix of adapter names, unique to this process: another megascend server, or an earlier one on this storage, must
            not use the same name for another adapter.
        base: directory of a zero adapter, used to sample from the base model: vLLM 0.32 on a CPU applies the adapter in its
            last slot to requests without one (``lora/ops/torch_ops``, index -1).
    """

    servers: Sequence[VllmServer]
    prefix: str
    base: str

    def name(self, adapter: str) -> str:
        """Return the name of an adapter on the servers."""
        return f"{self.prefix}-{adapter}"


class _PooledServer:
    """One server and the adapters loaded on it."""

    def __init__(self, client: VllmServer) -> None:
        self.client = client
        self._loading: dict[str, asyncio.Task[None]] = {}

    async def load(self, name: str, directory: str) -> None:
        """Load an adapter; concurrent callers share one request."""
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self.client.load_adapter(name, directory))
        # A failed load is forgotten, so that the next request tries again; a cancelled caller leaves the load to the others.
        try:
            await asyncio.shield(task)  # a cancelled request must not cancel the load that others wait for
        except BaseException:
            if task.done() and self._loading.get(name) is task:
                del self._loading[name]
            raise

    def forget(self, name: str) -> None:
        self._loading.pop(name, None)

    async def unload(self, name: str, *, always: bool) -> None:
        """Unload an adapter if this object loaded it, or ``always``."""
        if always or name in self._loading:
            self.forget(name)
            await self.client.unload_adapter(name)


class Pool:
    """Several servers of one model. Requests go to the least busy server without a recent failure.

    If a server cannot be reached, the request is retried on all others in turn; after another failure (timeout, status 5xx,
    unreadable answer), on one other server. Refused requests are not retried.

    Args:
        servers: the servers.
        ends: tokens that end every response.
        clock: monotonic seconds.
    """

    def __init__(self, servers: Servers, ends: Sequence[int] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._servers = [_PooledServer(server) for server in servers.servers]
        self._remote_name, self._ends = servers.name, tuple(ends)
        self._availability = Availability(len(self._servers), clock)
        self._pending = [0] * len(self._servers)
        self._answer_counts: Counter[int] = Counter()
        self._failures: Counter[tuple[int, str]] = Counter()

    async def respond(self, request: SampleRequest, directories: Mapping[str, str]) -> SampleResult:
        """Sample responses to a request.

        Args:
            directories: adapter directories by our names.
        """
        problems: list[EngineError] = []
        left = list(range(len(self._servers)))
        while left and sum(not isinstance(problem, EngineLostError) for problem in problems) < 2:
            index = self._availability.best(left, self._pending)
            left.remove(index)
            self._pending[index] += 1
            try:
                result = await self._respond_with(index, request, directories)
            except RefusedError:
                # It answers, and the others have the same model: they would refuse the request as well.
                self._note_answer(index)
                raise
            except EngineError as error:
                self._note_failure(index, error)
                problems.append(error)
            else:
                self._note_answer(index)
                return result
            finally:
                self._pending[index] -= 1
        # The class of the first failure: the later ones may only be its consequence.
        raise type(problems[0])("; ".join(map(str, problems)))

    async def _respond_with(self, index: int, request: SampleRequest, directories: Mapping[str, str]) -> SampleResult:
        server, adapter = self._servers[index], request.adapter or BASE
        if self._availability.doubtful(index):
            await server.client.check_health()  # fail fast instead of waiting for a server that may hang
        name = self._remote_name(adapter)
        for attempt in range(2):  # a second time only: a server that forgets an adapter at once has no slot for it
            await server.load(name, directories[adapter])
            try:
                return await server.client.sample(request, name, self._ends)
            except UnknownModelError:  # the server restarted, or evicted the adapter
                server.forget(name)
                if attempt:
                    raise
        raise AssertionError("unreachable")

    def _note_failure(self, index: int, error: EngineError) -> None:
        """Suspend the server for a while, unless the failure is specific to the request."""
        reason = _reason(error)
        self._failures[index, reason] += 1
        if reason == "other":
            return
        seconds = self._availability.failed(index)
        if seconds is not None:
            log.warning("%s is left out for %g s: %s", self._servers[index].client.name, seconds, error)

    def _note_answer(self, index: int) -> None:
        self._answer_counts[index] += 1
        if self._availability.succeeded(index):
            log.warning("%s answers again", self._servers[index].client.name)

    async def unload(self, adapter: str, *, always: bool = False) -> None:
        """Unload an adapter from all servers that loaded it for this object, or ``always``; failures are logged."""

        async def unload(server: _PooledServer) -> None:
            try:
                await server.unload(self._remote_name(adapter), always=always)
            except MegascendError as error:
                log.warning("an unused adapter stays loaded: %s", error)

        await asyncio.gather(*map(unload, self._servers))

    def collect(self) -> Iterator[Metric]:
        """Collect metrics of the servers for Prometheus; the label ``server`` is the index in the settings."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        pending = GaugeMetricFamily(
            "megascend_vllm_pending", "Requests that a vLLM server has not answered.", labels=["server"]
        )
        left_out = GaugeMetricFamily(
            "megascend_vllm_left_out",
            "Whether a vLLM server is left out, as it failed a short time ago.",
            labels=["server"],
        )
        answers = CounterMetricFamily(
            "megascend_vllm_answered", "Requests that a vLLM server answered.", labels=["server"]
        )
        failures = CounterMetricFamily(
            "megascend_vllm_failures",
            "Requests that a vLLM server failed at, and that others got.",
            labels=["server", "reason"],
        )
        for index in range(len(self._servers)):
            pending.add_metric([str(index)], self._pending[index])
            left_out.add_metric([str(index)], int(self._availability.left_out(index)))
            answers.add_metric([str(index)], self._answer_counts[index])
        for (index, reason), count in sorted(self._failures.items()):
            failures.add_metric([str(index), reason], count)
        yield from (pending, left_out, answers, failures)


def _reason(error: EngineError) -> str:
    """Classify a failure; "other" concerns one adapter only, so the server stays in use."""
    if isinstance(error, EngineLostError):
        return "lost"
    if isinstance(error, EngineTimeoutError):
        return "timeout"
    return "failed" if isinstance(error, ServerFailedError) else "other"


# --- check at the start ---


@dataclass(frozen=True)
class Probe:
    """A prompt, and its log-probabilities in the model being trained.

    Attributes:
        prompt: token ids.
        expected: log-probabilities of all tokens except the first.
    """

    prompt: tuple[int, ...]
    expected: tuple[float, ...]

    async def difference(self, server: VllmServer, model: str) -> float:
        """Return the mean absolute difference to a server's log-probabilities, possibly NaN."""
        request = SampleRequest(self.prompt, SamplingParams(1), prompt_logprobs=True)
        logprobs = (await server.sample(request, model)).prompt_logprobs or ()
        differences = [
            abs(float(actual or 0) - expected) for actual, expected in zip(logprobs[1:], self.expected, strict=True)
        ]
        return sum(differences) / len(differences)

    def passes(self, difference: float) -> bool:
        """Check whether a difference is small enough for the same model; NaN is not."""
        return difference <= SAME_MODEL + SAME_MODEL_RELATIVE * sum(map(abs, self.expected)) / len(self.expected)


def vllm_servers(settings: ServeConfig, backend: Any) -> Servers | None:
    """Return the configured vLLM servers after checking that they have this model; None if none are configured. Collective.

    Raises:
        ConfigError, EngineError: on every rank: a server has another model, cannot load adapters, or cannot be reached.
    """
    if not settings.vllm:
        return None
    import torch

    from megascend.runtime.distributed.objects import raise_on_all_ranks
    from megascend.training.batch.sample import Sample

    # A new adapter changes nothing. Requests to the base model use this one: see Servers.
    base = (settings.storage / ".base-adapter").absolute()
    backend.add_adapter(BASE, Lora(rank=1, seed=0))
    backend.save_adapter(BASE, str(base), optimizer=False)
    backend.remove_adapter(BASE)
    # Seeded: every rank draws the same tokens. 33 tokens have 32 log-probabilities.
    tokens = torch.randint(0, backend.vocab_size, (33,), generator=torch.Generator().manual_seed(0))
    logprobs = backend.forward(backend.shard([Sample.causal(tokens)]), reference=True).logprobs
    try:
        clients = [VllmServer(address, os.environ.get(KEY_VARIABLE)) for address in settings.vllm]
    except ConfigError as error:
        raise ConfigError(f"vllm: {error}") from error
    servers, problem = Servers(clients, f"megascend-{uuid.uuid4().hex[:12]}", str(base)), None
    if backend.rank == 0:
        probe = Probe(tuple(tokens.tolist()), tuple(logprobs[0].tolist()))
        try:
            # Half of the timeout: the other ranks wait in the collective below, whose timeout is the whole.
            asyncio.run(check(servers, probe, backend.max_length, settings.timeout_s / 2))
        except MegascendError as error:
            problem = error
    raise_on_all_ranks(problem, backend.groups, "the model check of the vLLM servers")
    return servers


async def check(servers: Servers, probe: Probe, max_length: int, wait_s: float = 0.0) -> None:
    """Check that every server has the model being trained, and can load adapters from storage.

    Args:
        max_length: maximum sample length in training; a server with a lower limit is logged.
        wait_s: time to wait for a server that does not listen yet.
    """
    for server in servers.servers:
        bases = [entry for entry in await _models(server, wait_s) if entry.get("parent") is None]
        if len(bases) != 1:
            names = ", ".join(entry["id"] for entry in bases)
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
        # Part of the check: runtime loading has to be enabled in vLLM, and storage mounted at the same path.
        await server.load_adapter(servers.name(BASE), servers.base)
        try:
            difference = await probe.difference(server, servers.name(BASE))
        except RefusedError as error:
            raise ConfigError(f"{error}: is it the model that this server trains?") from error
        if not probe.passes(difference):
            raise ConfigError(
                f"{server.name} does not have the model being trained: log-probabilities of {len(probe.expected)} tokens "
                f"differ by {difference:.3g} on average"
            )
        log.info("%s samples: %s; log-probabilities differ by %.2g on average", server.name, model, difference)


async def _models(server: VllmServer, wait_s: float) -> list[dict[str, Any]]:
    """Return the server's models, waiting until it listens."""
    loop = asyncio.get_running_loop()
    deadline, logged = loop.time() + wait_s, False
    while True:
        try:
            return await server.models()
        except EngineLostError:
            if loop.time() >= deadline:
                raise
        if not logged:
            log.warning("%s does not listen yet; waiting for up to %.0f s", server.name, wait_s)
            logged = True
        await asyncio.sleep(1.0)
