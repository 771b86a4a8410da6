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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import h11

from megascend.errors import ConfigError, EngineError, EngineLostError, EngineTimeoutError
from megascend.rollout.engines.base import Completion, Sampling
from megascend.rollout.http_client import exchange
from weightwire.auth import ANSWER_HEADER, check_answer, sign
from weightwire.errors import AuthError, WireError, from_json
from weightwire.keys import Key, load_key
from weightwire.offer import Offer, Seal
from weightwire.transports.choice import Location

MOST_ANSWER_BYTES = 2**30
PREFIX = "/weightwire/"
CONTROL_S = 60.0
"""Deadline of what waits for nobody, in seconds."""
COMMIT_S = 660.0
"""Longer than the server's own deadline, so that its error arrives."""
ATTEMPTS = 3
_REPEATABLE = {"info", "claim", "release", "begin", "verify", "commit", "drop", "pause", "resume", "logprobs"}
"""What may be asked again when the connection broke: nothing changes by it, or nothing changes by asking twice."""


class VllmEngine:
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

    stages = True
    kind = "vLLM"

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
        parts = urlsplit(address)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None or parts.path not in ("", "/"):
            raise ConfigError(f"{address!r:.200} is not an engine's address; http://HOST:PORT was expected")
        self._host, self._port = parts.hostname, parts.port
        self.name = f"{self.kind} at {parts.hostname}:{parts.port}"
        self._key = load_key(key)
        self.owner = f"{owner or f'{socket.gethostname()}:{os.getpid()}'}#{uuid.uuid4().hex[:8]}"
        self._lease_s, self._take_over = lease_s, take_over
        self._generate_timeout_s = generate_timeout_s

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        """See :class:`InferenceEngine`. Not retried: a request whose answer was lost may have been sampled."""
        wanted = {
            "prompt": list(prompt),
            "n": n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
            "seed": sampling.seed,
            "adapter": adapter,
        }
        answer = await self._ask("generate", wanted, self._generate_timeout_s)
        try:
            return [
                Completion(
                    tuple(one["tokens"]),
                    tuple(one["logprobs"]),
                    one["finish_reason"],
                    one["first_version"],
                    one["last_version"],
                )
                for one in answer["completions"]
            ]
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.name}: generate: the answer cannot be read ({error!r})") from error

    async def logprobs(self, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
        """See :class:`InferenceEngine`."""
        answer = await self._ask("logprobs", {"tokens": list(tokens), "adapter": adapter}, self._generate_timeout_s)
        return answer["logprobs"]

    async def receivers(self) -> int:
        """See :class:`InferenceEngine`."""
        return (await self.info())["receivers"]

    async def locations(self) -> list[Location]:
        """Where each worker keeps received weights, which decides how they travel."""
        info = await self.info()
        if "locations" not in info:  # a receiver that is older than this trainer
            return [Location(info["device"], self._host)] * info["receivers"]
        return [Location.from_json(each) for each in info["locations"]]

    async def info(self) -> dict[str, Any]:
        """Versions in force, number of workers, owner, whether it is paused, receives, or does not serve and why."""
        return await self._ask("info", {}, CONTROL_S)

    async def claim(self) -> None:
        """Become the engine's owner, or renew that.

        Raises:
            OwnerError: another one is; the message names it.
        """
        await self._ask("claim", {"lease_s": self._lease_s, "take_over": self._take_over}, CONTROL_S)

    async def begin_update(self, offer: Offer) -> None:
        """See :class:`InferenceEngine`."""
        await self.claim()
        await self._ask("begin", {"offer": replace(offer, owner=self.owner).to_json()}, CONTROL_S)

    async def verify(self, seal: Seal, timeout_s: float) -> None:
        """See :class:`InferenceEngine`."""
        await self._ask("verify", {"seal": seal.to_json(), "timeout_s": timeout_s}, timeout_s + CONTROL_S)

    async def commit(self, update: str) -> None:
        """See :class:`InferenceEngine`. The engine finishes it even if this process dies."""
        await self._ask("commit", {"update": update}, COMMIT_S)

    async def drop(self, update: str) -> None:
        """See :class:`InferenceEngine`."""
        await self._ask("drop", {"update": update}, CONTROL_S)

    async def pause(self, lease_s: float) -> None:
        """See :class:`InferenceEngine`."""
        await self.claim()
        await self._ask("pause", {"lease_s": lease_s}, CONTROL_S)

    async def resume(self) -> None:
        """See :class:`InferenceEngine`."""
        await self._ask("resume", {}, CONTROL_S)

    async def load_adapter(self, name: str, directory: str, version: int | None = None) -> None:
        """See :class:`InferenceEngine`. Responses that are being generated end with the adapter that they began with."""
        await self.claim()
        fields = {"name": name, "path": str(directory), "version": version}
        await self._ask("load_adapter", fields, COMMIT_S)

    async def version(self, target: str = "model") -> int:
        """See :class:`InferenceEngine`."""
        return (await self.info())["versions"].get(target, 0)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the server answers, which takes as long as it needs to load the model.

        Raises:
            EngineTimeoutError: it did not within ``timeout_s`` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                await self._once("info", {}, min(CONTROL_S, timeout_s))
                return
            except (EngineLostError, EngineTimeoutError) as error:
                if loop.time() > deadline:
                    raise EngineTimeoutError(f"{self.name}: not ready within {timeout_s:g} s: {error}") from error
            await asyncio.sleep(0.5)

    async def close(self) -> None:
        """Give up ownership; an engine that is gone has none."""
        with contextlib.suppress(EngineLostError):
            await self._ask("release", {}, CONTROL_S)

    # --- HTTP ---

    async def _ask(self, route: str, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of a route; what may be repeated is, if the connection broke."""
        attempts = ATTEMPTS if route in _REPEATABLE else 1
        for attempt in range(attempts):
            try:
                return await self._once(route, fields, timeout_s)
            except EngineLostError:
                if attempt == attempts - 1:
                    raise
            await asyncio.sleep(0.2 * 2**attempt * (0.5 + random.random()))
        raise AssertionError("unreachable")

    async def _once(self, route: str, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        target, body = PREFIX + route, json.dumps({"owner": self.owner, **fields}).encode()
        signed = sign(self._key, "POST", target, body)
        headers = {"Content-Type": "application/json", **signed.headers}
        try:
            answer, answer_headers = await asyncio.wait_for(
                exchange(self._host, self._port, target, headers, body, max_answer_bytes=MOST_ANSWER_BYTES), timeout_s
            )
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise EngineTimeoutError(f"{self.name}: {route}: no answer within {timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            raise EngineLostError(f"{self.name}: {route}: {error or type(error).__name__}") from error
        except h11.ProtocolError as error:
            raise EngineError(f"{self.name}: {route}: the answer is not HTTP: {error}") from error
        return self._read(route, answer.status, answer.body, answer_headers, signed.nonce)

    def _read(self, route: str, status: int, body: bytes, headers: dict[str, str], nonce: str) -> dict[str, Any]:
        if ANSWER_HEADER.lower() not in headers:
            raise EngineError(
                f"{self.name}: {route}: status {status}, not signed: {body[:300].decode('utf-8', 'replace')}"
            )
        try:
            check_answer(self._key, nonce, status, body, headers[ANSWER_HEADER.lower()])
            fields = json.loads(body)
        except (AuthError, ValueError) as error:
            raise EngineError(f"{self.name}: {route}: status {status}: {error}") from error
        if status == 200:
            return fields
        error = from_json(fields, f"{self.name}: {route}")
        raise error if type(error) is not WireError else EngineError(str(error))
