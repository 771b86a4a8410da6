"""Client of a vLLM server (``python -m weightwire.vllm``) over HTTP.

Requests are signed with the job's key, and answers are verified, so that both sides are authenticated.
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

from megascend.apps.rl.rollout.http_client import Answer, EngineServer
from megascend.errors import EngineError, EngineLostError, EngineTimeoutError
from weightwire.auth import ANSWER_HEADER, check_answer, sign
from weightwire.errors import AuthError, InstanceError, WireError, from_json
from weightwire.keys import Key, load_key
from weightwire.offer import Offer
from weightwire.remote_engine import AUDIENCE, CALLS, RemoteEngine

REINSTALL = "its receiver is not of this version: install ./receiver there again"
PREFIX = "/weightwire/"
ATTEMPTS = 3
_CLAIMING = {"needs", "begin_update", "pause", "sleep", "load_adapter"}
"""Calls with which something begins; they claim the engine, or renew the claim. The others need one."""
NPU = "npu"


class VllmEngine(RemoteEngine):
    """Client of one vLLM server.

    May be used from several event loops; connections are not reused.

    Args:
        address: ``http://HOST:PORT``.
        key: the job's key, the server's; default: from the environment (:func:`weightwire.keys.load_key`).
        owner: name of this trainer; default: host and process. A trainer that restarts under the same name gets its engine back.
        lease_s: others may claim the engine when this owner has been silent for so many seconds.
        take_over: claim the engine even from a live owner.
        generate_timeout_s: deadline of a request for responses, including time in the engine's queue.

    Raises:
        ConfigError: the address is malformed.
        SecretKeyError: the key is missing.
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
        # The suffix tells two processes of one trainer apart: the older one loses the engine.
        self.owner = f"{owner or f'{socket.gethostname()}:{os.getpid()}'}#{uuid.uuid4().hex[:8]}"
        self._instance = ""  # of the server's process, which states it
        self._claim = {"lease_s": lease_s, "take_over": take_over}
        self.answer_s = generate_timeout_s

    async def info(self) -> dict[str, Any]:
        """Return the engine's state: active versions, workers, owner, open update, pause, and why it does not serve."""
        return await self.ask("info", {}, self.control_s)

    async def claim(self) -> None:
        """Become the engine's owner, or renew the claim."""
        await self.ask("claim", self._claim, self.control_s)

    async def begin_update(self, offer: Offer) -> None:
        await super().begin_update(replace(offer, owner=self.owner))

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the server answers, after loading its model."""
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
        """Release ownership; a no-op if the engine is gone."""
        with contextlib.suppress(EngineLostError):
            await self.ask("release", {}, self.control_s)

    # --- HTTP ---

    async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Call a route and return its answer; idempotent calls are repeated if the connection breaks."""
        if call in _CLAIMING:
            # One request for both: each waits for a busy server.
            arguments = {**arguments, "claim": self._claim}
        attempts_left = ATTEMPTS if call not in CALLS or CALLS[call].repeatable else 1
        while True:
            attempts_left -= 1
            try:
                return await self._once(call, arguments, timeout_s)
            except EngineLostError:
                if not attempts_left:
                    raise
            # Random delays: many rollouts lose their connections at the same moment.
            await asyncio.sleep(0.2 * 2 ** (ATTEMPTS - 1 - attempts_left) * (0.5 + random.random()))

    async def _once(self, call: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if not self._instance:
            # In a request without a body: a server that refuses a long one may close the connection before its answer is read.
            with contextlib.suppress(InstanceError):
                await self._send("info", b"", timeout_s)
        body = json.dumps({"owner": self.owner, **arguments}).encode()
        try:
            return await self._send(call, body, timeout_s)
        except InstanceError:  # it was restarted, and has not executed the call
            return await self._send(call, body, timeout_s)
        except EngineLostError:
            self._instance = ""
            raise

    async def _send(self, call: str, body: bytes, timeout_s: float) -> dict[str, Any]:
        target = PREFIX + call
        # Signed anew for each attempt: the server accepts a nonce once.
        signed = sign(self._key, "POST", target, body, audience=AUDIENCE, instance=self._instance)
        answer = await self._server.ask(target, body, signed.headers, timeout_s, label=call)
        return self._read(call, answer, signed.nonce)

    def _read(self, call: str, answer: Answer, nonce: str) -> dict[str, Any]:
        source = f"{self.name}: {call}"
        # vLLM's own errors, and proxies, answer without a signature.
        if ANSWER_HEADER not in answer.headers:
            text = answer.body[:300].decode("utf-8", "replace")
            hint = f"; {REINSTALL}" if "not of the form" in text else ""
            if answer.status == 404:
                hint = (
                    "; only servers started by python -m weightwire.vllm have this route: plain vLLM and SGLang do not"
                )
            raise EngineError(f"{source}: status {answer.status}, not signed: {text}{hint}")
        try:
            check_answer(self._key, nonce, answer.status, answer.body, answer.headers[ANSWER_HEADER])
            fields = json.loads(answer.body)
        except (AuthError, ValueError) as error:
            raise EngineError(f"{source}: status {answer.status}: {error}") from error
        if answer.status == 200:
            return fields
        error = from_json(fields, source)
        if isinstance(error, InstanceError):
            self._instance = str(fields["instance"])
            raise error
        # An older receiver on the other side does not know the route.
        if "there is no POST" in str(error) or "unknown fields claim" in str(error):
            raise EngineError(f"{error}; {REINSTALL}")
        raise error if type(error) is not WireError else EngineError(str(error))


class VllmAscendEngine(VllmEngine):
    """Client of one vllm-ascend server: vLLM on NPUs, started in the same way, with the same routes; weights are sent over HCCL.

    Its workers stage received weights on the NPU. With ``WEIGHTWIRE_STAGING=cpu`` in its environment they receive into host
    memory instead, over ``gloo``, for systems without HCCL between trainer and engine.
    """

    kind = "vLLM Ascend"
    _device = ""

    async def begin_update(self, offer: Offer) -> None:
        """See :class:`InferenceEngine`.

        Raises:
            EngineError: the server's workers are not on NPUs: vLLM starts on the CPU if it does not find vllm-ascend.
        """
        device = self._device or (await self.info())["device"]
        if device != NPU:
            raise EngineError(
                f"{self.name}: its workers are on {device}, not on {NPU}: is vllm-ascend installed there?"
            )
        self._device = device
        await super().begin_update(offer)
