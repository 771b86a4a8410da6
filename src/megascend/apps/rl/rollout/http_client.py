"""HTTP client for inference engines and the rollout controller: bounded answers, errors that name the peer."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11  # httpx reads HTTP/1.1 with it
import httpx

from megascend.errors import ConfigError, EngineError, EngineLostError, EngineTimeoutError

MAX_ANSWER_BYTES = 2**30
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Shared context: httpx would create one for each transport and load certificates (40 ms), even for http addresses."""


class UnreadableAnswerError(EngineError):
    """The answer is not HTTP, is incomplete, or exceeds the limit."""


@dataclass(frozen=True)
class Answer:
    """Status, body and headers of an HTTP response."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        """Return the parsed body, or its text if it is not JSON."""
        text = self.body.decode("utf-8", "replace")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


async def exchange(
    method: str, url: str, body: bytes, headers: Mapping[str, str], *, max_bytes: int = MAX_ANSWER_BYTES
) -> Answer:
    """Send a request on a new connection. It has no deadline: callers set one.

    Raises:
        ConnectionError: the connection could not be opened, or broke.
        UnreadableAnswerError: the answer is not HTTP, or has more than ``max_bytes``.
    """
    fixed = {"Connection": "close", "Accept-Encoding": "identity", "Content-Length": str(len(body))}
    received = bytearray()
    try:
        # Only the transport: a client would log a line for each request, and use proxies from the environment.
        async with httpx.AsyncHTTPTransport(verify=_NO_TLS, trust_env=False) as transport:
            request = httpx.Request(method, url, content=body, headers={**fixed, **headers})
            response = await transport.handle_async_request(request)
            async for part in response.aiter_raw():
                # Counted as it arrives: a header may be missing, or wrong.
                received += part
                if len(received) > max_bytes:
                    raise UnreadableAnswerError(f"the answer has more than {max_bytes} bytes")
            return Answer(response.status_code, bytes(received), response.headers)
    except httpx.TransportError as error:
        # httpx's classes say that it failed; the operating system's error says why.
        origin = _origin(error)
        if isinstance(origin, h11.ProtocolError):
            raise UnreadableAnswerError(f"the answer is not HTTP: {origin}") from error
        raise ConnectionError(str(origin) or type(origin).__name__) from error


def _origin(error: BaseException) -> BaseException:
    """Return the innermost exception that httpx and its libraries have wrapped, which names the reason."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error


class EngineServer:
    """Client of an inference engine's HTTP server. May be used from several event loops; connections are not reused.

    Args:
        kind: kind of engine, for messages: ``vLLM``.
        address: ``http://HOST:PORT``.
    """

    def __init__(self, kind: str, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None or parts.path not in ("", "/"):
            raise ConfigError(f"{address!r:.200} is not the address of a {kind} server; http://HOST:PORT was expected")
        self.name = f"{kind} at {parts.hostname}:{parts.port}"
        self._url = f"http://{parts.netloc.rpartition('@')[2]}"

    async def ask(
        self,
        target: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        *,
        method: str = "POST",
        label: str | None = None,
    ) -> Answer:
        """Send a request and return the answer, whatever its status.

        Args:
            label: label of the request, for messages; default: ``target``.

        Raises:
            EngineTimeoutError: the answer was not complete within ``timeout_s`` seconds.
            EngineLostError: the connection could not be opened, or broke.
            UnreadableAnswerError: the answer is not HTTP, or too large.
        """
        label = label or target
        work = exchange(method, self._url + target, body, {"Content-Type": "application/json", **headers})
        try:
            # One deadline for everything: httpx's own are for each read, and a slow answer would never end.
            return await asyncio.wait_for(work, timeout_s)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise EngineTimeoutError(f"{self.name}: {label}: no answer within {timeout_s:g} s") from error
        except UnreadableAnswerError as error:
            raise UnreadableAnswerError(f"{self.name}: {label}: {error}") from error
        except ConnectionError as error:
            raise EngineLostError(f"{self.name}: {label}: {error}") from error
