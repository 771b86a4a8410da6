"""Requests to sample, answered by vLLM servers instead of the ranks, while these train.

It takes the commands that the ranks would otherwise get: adapters to load and to remove, requests to answer. All methods run
on the HTTP server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascend.config.serve import ServeConfig
from megascend.errors import ConfigError, EngineError, EngineLostError, MegascendError
from megascend.sampling.request import SampleRequest, SampleResult, SamplingParams
from megascend.serve.commands import Command, Create, Outcome, Remove, Respond
from megascend.serve.vllm_server import RefusedError, UnknownModelError, VllmServer

KEY_VARIABLE = "MEGASCEND_VLLM_API_KEY"
SAME_MODEL = 0.05
"""Largest mean difference of log-probabilities that passes for the same model: bf16 on either side stays below 0.02."""
SAME_MODEL_RELATIVE = 0.01
"""Beside that, of their mean."""
log = logging.getLogger("megascend.serve")


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


class _Server:
    """One server: its adapters, and how busy it is.

    Attributes:
        pending: requests that it has not answered.
        not_itself: why the model without an adapter must not be sampled from here, or None.
    """

    def __init__(self, server: VllmServer, model: str, probe: Probe) -> None:
        self.server, self.model, self.pending = server, model, 0
        self.not_itself: str | None = None
        self._probe = probe
        self._loading: dict[str, asyncio.Task[None]] = {}

    async def load(self, name: str, directory: str) -> None:
        """Have an adapter loaded; several that ask wait for the same."""
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._load(name, directory))
        try:
            await asyncio.shield(task)
        except BaseException:
            if task.done() and self._loading.get(name) is task:
                del self._loading[name]
            raise

    async def _load(self, name: str, directory: str) -> None:
        await self.server.load_adapter(name, directory)
        await self.server.sample(SampleRequest(self._probe.prompt, SamplingParams(1)), name)  # puts it in its slot
        difference = await self._probe.difference(self.server, self.model)
        self.not_itself = None
        if not self._probe.passes(difference):
            self.not_itself = (
                f"{self.server.name}: with {len(self._loading)} adapters, the model without an adapter is another one "
                f"(log-probabilities differ by {difference:.3g} on average); vLLM on CPUs needs --max-loras above max_samplers"
            )

    def forget(self, name: str) -> None:
        """It does not have the adapter any more."""
        self._loading.pop(name, None)

    async def unload(self, name: str) -> None:
        if name in self._loading:
            self.forget(name)
            await self.server.unload_adapter(name)


class VllmSampling:
    """Several servers of one model. The least busy one answers; where one is lost, another does.

    Args:
        servers: with the name that each has for the model (:func:`check`).
        report: takes outcomes.
        probe: by which they are known to have the model.
        vocab_size, max_length: of the model, and of a prompt with its response.
        ends: tokens that end every response.
    """

    def __init__(
        self,
        servers: Sequence[tuple[VllmServer, str]],
        report: Callable[[list[Outcome]], None],
        probe: Probe,
        vocab_size: int,
        max_length: int,
        ends: Sequence[int] = (),
    ) -> None:
        self._servers = [_Server(server, model, probe) for server, model in servers]
        self._report, self._ends = report, tuple(ends)
        self._vocab_size, self._max_length = vocab_size, max_length
        # No other server of ours, earlier ones on this storage among them, may mean another adapter by the same name.
        self._prefix = f"megascend-{uuid.uuid4().hex[:12]}"
        self._directories: dict[str, str] = {}
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
            work = self._unload(command.adapter)
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
            await self._unload(adapter)

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

    async def _unload(self, adapter: str) -> None:
        for each in self._servers:
            try:
                await each.unload(self._name(adapter))
            except MegascendError as error:
                log.warning("an adapter that nobody samples from stays loaded: %s", error)

    async def _respond(self, request: SampleRequest) -> SampleResult:
        """By the least busy server; by another one, if that is lost."""
        if request.target_tokens is not None or request.prompt_draws:
            raise ConfigError("log-probabilities of other tokens in the prompt's places are not to be had from vLLM")
        limit = "what the served model takes"
        if refusal := request.refusal(self._directories, self._vocab_size, self._max_length, limit):
            return SampleResult(error=refusal)
        left = sorted(self._servers, key=lambda each: each.pending)
        problem: EngineError | None = None
        for each in left:
            each.pending += 1
            try:
                return await self._respond_by(each, request)
            except EngineLostError as error:
                problem = problem or error
            finally:
                each.pending -= 1
        assert problem is not None
        raise problem

    async def _respond_by(self, each: _Server, request: SampleRequest) -> SampleResult:
        if request.adapter is None:
            if each.not_itself is not None:
                raise EngineLostError(each.not_itself)
            return await each.server.sample(request, each.model, self._ends)
        name = self._name(request.adapter)
        for attempt in range(2):
            await each.load(name, self._directories[request.adapter])
            try:
                return await each.server.sample(request, name, self._ends)
            except UnknownModelError:  # it was started again, or had to make room
                each.forget(name)
                if attempt:
                    raise
        raise AssertionError("unreachable")

    def _name(self, adapter: str) -> str:
        return f"{self._prefix}-{adapter}"


def vllm_servers(settings: ServeConfig, backend: Any) -> tuple[list[tuple[VllmServer, str]], Probe | None]:
    """The vLLM servers of the settings, once they listen and are found to have this model, and by what; on rank 0. Collective.

    Raises:
        ConfigError, EngineError: on every rank: one has another model, or cannot be asked.
    """
    if not settings.vllm:
        return [], None
    import torch

    from megascend.batch.sample import Sample
    from megascend.distributed.objects import raise_on_all_ranks

    tokens = torch.randint(0, backend.vocab_size, (33,), generator=torch.Generator().manual_seed(0))
    logprobs = backend.forward(backend.shard([Sample.causal(tokens)]), reference=True).logprobs
    found: list[tuple[VllmServer, str]] = []
    problem, probe = None, None
    if backend.rank == 0:
        probe = Probe(tuple(tokens.tolist()), tuple(logprobs[0].tolist()))
        try:
            servers = [VllmServer(address, os.environ.get(KEY_VARIABLE)) for address in settings.vllm]
            found = asyncio.run(check(servers, probe, backend.max_length, settings.timeout_s / 2))
        except MegascendError as error:
            problem = error
    raise_on_all_ranks(problem, backend.groups, "whether the vLLM servers have this model")
    return found, probe


async def check(
    servers: Sequence[VllmServer], probe: Probe, max_length: int, wait_s: float = 0.0
) -> list[tuple[VllmServer, str]]:
    """Every server, with the name that it has for the model; found to be the one that is trained here.

    Args:
        max_length: of a sample, here; a server that takes less is told of in the log.
        wait_s: how long to wait for a server that does not listen yet.

    Raises:
        ConfigError: a server has another model.
        EngineError: it cannot be asked.
    """
    found = []
    for server in servers:
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
        try:
            difference = await probe.difference(server, model)
        except RefusedError as error:
            raise ConfigError(f"{error}: is it the model that this server trains?") from error
        if not probe.passes(difference):
            raise ConfigError(
                f"{server.name} does not have the model that is trained here: log-probabilities of {len(probe.expected)} tokens "
                f"differ by {difference:.3g} on average"
            )
        log.info("%s samples: %s; log-probabilities differ by %.2g on average", server.name, model, difference)
        found.append((server, model))
    return found


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
