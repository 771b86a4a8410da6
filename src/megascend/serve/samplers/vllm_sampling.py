"""Requests to sample, answered by vLLM servers instead of the ranks, while these train.

It takes the commands that the ranks would otherwise get: adapters to load and to remove, requests to answer. All methods run
on the HTTP server's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from megascend.errors import ConfigError
from megascend.sampling.request import SampleRequest, SampleResult
from megascend.serve.samplers.vllm_pool import BASE, Pool, Servers
from megascend.serve.samplers.vllm_server import RefusedError
from megascend.serve.scheduler.commands import Command, Create, Outcome, Remove, Respond


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
