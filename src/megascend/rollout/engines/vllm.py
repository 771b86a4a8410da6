"""vLLM, started by ``python -m weightwire.vllm`` in an environment of its own, over HTTP.

Requests are signed with the job's key, and answers are verified: neither side talks to a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import uuid
from dataclasses import replace
from typing import Any

from megascend.errors import EngineError, EngineLostError, EngineTimeoutError
from megascend.rollout.http_client import Answer, EngineServer
from weightwire.auth import ANSWER_HEADER, check_answer, sign
from weightwire.errors import AuthError, WireError, from_json
from weightwire.keys import Key, load_key
from weightwire.offer import Offer
from weightwire.remote_engine import RemoteEngine
from weightwire.transports.choice import Location

REINSTALL = "its receiver is not of this version: install ./receiver there again"
PREFIX = "/weightwire/"
ATTEMPTS = 3
_SENT_ONCE = {"generate", "load_adapter"}
"""Calls that are not repeated when the connection breaks: responses may have been sampled, an adapter's version counted up. All
others change nothing, or nothing more when repeated."""
NPU = "npu"


class VllmEngine(RemoteEngine):
    """One vLLM server.

    An object may be used from several event loops; connections are not kept.

    Args:
        address: ``http://HOST:PORT``.
        key: the job's key, the server's; default: from the environment (:func:`weightwire.keys.load_key`).
        owner: what the engine calls this trainer; default: host and process. A trainer that starts again under the same name has
            its engine back.
        lease_s: the engine may be claimed by others when this owner has been silent for so long.
        take_over: claim the engine also from a living owner.
        generate_timeout_s: deadline of a request for responses, its waiting in the engine's queue included.

    Raises:
        ConfigError: the address is none.
        SecretKeyError: there is no key.
    """

    kind = "vLLM"
    unreadable = EngineError

    def __init__(
        self,
        address: str,
        *,
        key: str | Key | None = None,
        owner: str | None = None,
        lease_s: float = 600.0,
        take_over: bool = False,
        generate_timeout_s: float = 600.0,
    ) -> None:
        self._server = EngineServer(self.kind, address)
        self.name = self._server.name
        self._key = load_key(key)
        self.owner = f"{owner or f'{socket.gethostname()}:{os.getpid()}'}#{uuid.uuid4().hex[:8]}"
        self._lease_s, self._take_over = lease_s, take_over
        self.answer_s = generate_timeout_s

    async def receivers(self) -> int:
        return (await self.info())["receivers"]

    async def locations(self) -> list[Location | None]:
        info = await self.info()
        if "locations" not in info:
            raise EngineError(f"{self.name} names no locations; {REINSTALL}")
        return [Location.from_json(each) for each in info["locations"]]

    async def version(self, target: str = "model") -> int:
        return (await self.info())["versions"].get(target, 0)

    async def info(self) -> dict[str, Any]:
        """Return versions in force, number of workers, owner, whether it is paused, receives, or does not serve and why."""
        return await self.ask("info", {}, self.control_s)

    async def claim(self) -> None:
        """Become the engine's owner, or renew that.

        Raises:
            OwnerError: another one is; the message names it.
        """
        await self.ask("claim", {"lease_s": self._lease_s, "take_over": self._take_over}, self.control_s)

    async def begin_update(self, offer: Offer) -> None:
        await self.claim()
        await super().begin_update(replace(offer, owner=self.owner))

    async def pause(self, lease_s: float) -> None:
        await self.claim()
        await super().pause(lease_s)

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        """See :class:`InferenceEngine`. Responses that are being generated end with the adapter that they began with."""
        await self.claim()
        await super().load_adapter(name, directory, version)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the server answers, which takes as long as it needs to load the model.

        Raises:
            EngineTimeoutError: it did not within ``timeout_s`` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                await self._once("info", {}, min(self.control_s, timeout_s))
                return
            except (EngineLostError, EngineTimeoutError) as error:
                if loop.time() > deadline:
                    raise EngineTimeoutError(f"{self.name}: not ready within {timeout_s:g} s: {error}") from error
            await asyncio.sleep(0.5)

    async def close(self) -> None:
        """Give up ownership; an engine that is gone has none."""
        with contextlib.suppress(EngineLostError):
            await self.ask("release", {}, self.control_s)

    # --- HTTP ---

    async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer of a route; what may be repeated is, if the connection broke."""
        left = 1 if call in _SENT_ONCE else ATTEMPTS
        while True:
            left -= 1
            try:
                return await self._once(call, arguments, timeout_s)
            except EngineLostError:
                if not left:
                    raise
            await asyncio.sleep(0.2 * 2 ** (ATTEMPTS - 1 - left) * (0.5 + random.random()))

    async def _once(self, call: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        target, body = PREFIX + call, json.dumps({"owner": self.owner, **arguments}).encode()
        signed = sign(self._key, "POST", target, body)
        answer = await self._server.ask(target, body, signed.headers, timeout_s, label=call)
        return self._read(call, answer, signed.nonce)

    def _read(self, call: str, answer: Answer, nonce: str) -> dict[str, Any]:
        where = f"{self.name}: {call}"
        if ANSWER_HEADER not in answer.headers:
            text = answer.body[:300].decode("utf-8", "replace")
            raise EngineError(f"{where}: status {answer.status}, not signed: {text}")
        try:
            check_answer(self._key, nonce, answer.status, answer.body, answer.headers[ANSWER_HEADER])
            fields = json.loads(answer.body)
        except (AuthError, ValueError) as error:
            raise EngineError(f"{where}: status {answer.status}: {error}") from error
        if answer.status == 200:
            return fields
        error = from_json(fields, where)
        if "there is no POST" in str(error):
            raise EngineError(f"{error}; {REINSTALL}")
        raise error if type(error) is not WireError else EngineError(str(error))


class VllmAscendEngine(VllmEngine):
    """One server of vllm-ascend: vLLM on NPUs, started in the same way, with the same routes; weights travel over HCCL.

    Its workers keep received weights on the NPU, where HCCL puts them. With ``WEIGHTWIRE_STAGING=cpu`` in its environment they
    receive into host memory instead, over ``gloo``, where there is no HCCL between trainer and engine.
    """

    kind = "vLLM Ascend"

    async def begin_update(self, offer: Offer) -> None:
        """See :class:`InferenceEngine`.

        Raises:
            EngineError: the server's workers are not on NPUs: a vLLM that has not found vllm-ascend starts on the CPU.
        """
        device = (await self.info())["device"]
        if device != NPU:
            raise EngineError(
                f"{self.name}: its workers are on {device}, not on {NPU}: is vllm-ascend installed there?"
            )
        await super().begin_update(offer)
