"""The local engine: transformers on this machine, for laptops, examples and tests. A real engine, but not a fast one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megascend.errors import EngineError, EngineTimeoutError
from megascend.rollout.engines.base import Completion, Sampling
from megascend.rollout.engines.local_service import ChildProcess, InProcess, Service
from weightwire.offer import Offer, Seal
from weightwire.transports.choice import Location


class LocalEngine:
    """A model of transformers that samples and takes updates; see :class:`megascend.rollout.engines.base.InferenceEngine`.

    Requests that wait are sampled together. An update is received while that goes on and takes effect between two tokens; what
    the responses under way have in the cache is then computed again. Adapters are not loaded: push the merged model.
    """

    stages = True

    def __init__(
        self,
        model: str | Path,
        *,
        name: str = "local engine",
        own_process: bool = True,
        timeout_s: float = 600.0,
        control_timeout_s: float = 60.0,
        **settings: Any,
    ) -> None:
        """
        Args:
            model: directory of a Hugging Face checkpoint, whose weights are of version 0.
            own_process: sample in a process of its own, else on a thread of this one.
            timeout_s: deadline of a request, and of the first answer to anything.
            control_timeout_s: deadline of everything else.
            settings: of :class:`megascend.rollout.engines.local_model.LocalModel`: precision, device, seed, rows.
        """
        self.name = name
        self._timeout_s, self._control_s = timeout_s, control_timeout_s
        self._answered = False
        self._service: Service = (
            ChildProcess(name, Path(model), **settings) if own_process else InProcess(Path(model), **settings)
        )

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        self._no_adapters(adapter)
        arguments = {"prompt": list(prompt), "sampling": asdict(sampling), "n": n}
        answer = await self._ask("generate", self._timeout_s, **arguments)
        return [
            Completion(**{**one, "tokens": tuple(one["tokens"]), "logprobs": tuple(one["logprobs"])}) for one in answer
        ]

    async def logprobs(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        self._no_adapters(adapter)
        return await self._ask("logprobs", self._timeout_s, tokens=list(tokens))

    async def receivers(self) -> int:
        return 1

    async def locations(self) -> list[Location]:
        """Where it keeps received weights, which decides how they travel."""
        return [Location.from_json(await self._ask("location", self._control_s))]

    async def begin_update(self, offer: Offer) -> None:
        await self._ask("begin_update", self._control_s, offer=offer.to_json())

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        await self._ask("verify", timeout_s + 5.0, seal=seal.to_json(), timeout_s=timeout_s)

    async def commit(self, update: str) -> None:
        await self._ask("commit", self._control_s, update=update)

    async def drop(self, update: str) -> None:
        await self._ask("drop", self._control_s, update=update)

    async def pause(self, lease_s: float) -> None:
        await self._ask("pause", self._control_s, lease_s=lease_s)

    async def resume(self) -> None:
        await self._ask("resume", self._control_s)

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        self._no_adapters(name)

    async def version(self, target: str = "model") -> int:
        return await self._ask("version", self._control_s, target=target)

    async def close(self) -> None:
        await asyncio.to_thread(self._service.close)

    async def _ask(self, call: str, deadline_s: float, /, **arguments: Any) -> Any:
        if not self._answered:
            # Its process imports transformers and loads the model first, which takes minutes on a busy machine.
            deadline_s = max(deadline_s, self._timeout_s)
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(self._service.start(call, arguments)), deadline_s)
            self._answered = True
            return answer
        except asyncio.TimeoutError:
            raise EngineTimeoutError(f"{self.name}: no answer to {call} within {deadline_s:g} s") from None

    def _no_adapters(self, adapter: str | None) -> None:
        if adapter is not None:
            raise EngineError(
                f"{self.name} does not load adapters ({adapter!r}): push the model with the adapter merged"
            )
