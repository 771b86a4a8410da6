"""vLLM servers that fail in every way: another one answers, and the failed one is skipped for a while.

Servers are doubles on sockets of this machine; how they fail is what a real one's clients see.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from recording_backend import Clock

from megascend.apps.rl.rollout.availability import FIRST_S
from megascend.apps.sampling.request import SampleRequest, SamplingParams
from megascend.apps.serve.samplers import vllm
from megascend.apps.serve.samplers.vllm import Pool, Servers
from megascend.apps.serve.samplers.vllm_server import RefusedError, ServerFailedError, VllmServer
from megascend.apps.serve.scheduler.inbox import Inbox
from megascend.apps.serve.served_model import ServedModel
from megascend.apps.serve.server import http_server
from megascend.config.serve import ServeConfig
from megascend.errors import EngineLostError, EngineTimeoutError
from weightwire.engine_calls import LoopThread

REQUEST = SampleRequest([1, 2, 3], SamplingParams(1))
DIRECTORIES = {"base": "/storage/null"}


class Double:
    """A server on a socket. It answers with its token, or as ``fails`` says.

    Attributes:
        fails: "" for not at all; "refuses", "hangs up", "stops within", "hangs", a status, "no HTTP" or "no answer to it".
        failing: targets that this is about.
        asked: targets in their order.
    """

    def __init__(self, token: int, fails: str = "") -> None:
        self.token, self.fails, self.failing, self.targets = (
            token,
            fails,
            "/v1/completions /v1/load_lora_adapter /health",
            [],
        )
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def name(self) -> str:
        return f"vLLM at 127.0.0.1:{self.port}"

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        target = head.split()[1].decode()
        self.targets.append(target)
        fails = self.fails if target in self.failing.split() else ""
        if fails == "hangs":
            await reader.read()  # until the client has had enough
        elif fails == "no HTTP":
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        elif fails != "hangs up":
            writer.write(self._answer(fails))
        await writer.drain()
        writer.close()

    def _answer(self, fails: str) -> bytes:
        status, body = 200, self._body()
        if fails.isdecimal():
            status, body = int(fails), {"error": {"message": "it went wrong"}}
        elif fails == "no answer to it":
            body = {"choices": []}
        content = json.dumps(body).encode()
        answer = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
        return answer[:-7] if fails == "stops within" else answer

    def _body(self) -> dict[str, Any]:
        logprobs = {"token_logprobs": [-0.5], "top_logprobs": [{}]}
        return {"choices": [{"index": 0, "finish_reason": "length", "token_ids": [self.token], "logprobs": logprobs}]}

    def samples(self) -> int:
        return self.targets.count("/v1/completions")


Work = Callable[[Pool, Clock], Awaitable[None]]


def run(doubles: list[Double], work: Work) -> None:
    """Run ``work`` with a pool of these servers, of which those that refuse connections do not listen."""

    async def main() -> None:
        for double in doubles:
            await double.start()
            if double.fails == "refuses":
                double.stop()
        servers = [
            VllmServer(f"http://127.0.0.1:{double.port}", answer_s=2.0 if double.fails == "hangs" else 60.0)
            for double in doubles
        ]
        clock = Clock()
        await work(Pool(Servers(servers, "s", "/storage/null"), clock=clock), clock)
        for double in doubles:
            double.stop()

    asyncio.run(main())


async def token(pool: Pool) -> int:
    return (await pool.respond(REQUEST, DIRECTORIES)).samples[0].tokens[0]


def text_of(pool: Pool) -> str:
    """Return the pool's metrics as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(pool)
    return generate_latest(registry).decode()


FAILURES = {
    "refuses": (EngineLostError, "lost"),
    "hangs up": (EngineLostError, "lost"),
    "stops within": (ServerFailedError, "failed"),
    "hangs": (EngineTimeoutError, "timeout"),
    "500": (ServerFailedError, "failed"),
    "503": (ServerFailedError, "failed"),
    "429": (ServerFailedError, "failed"),
    "no HTTP": (ServerFailedError, "failed"),
    "no answer to it": (ServerFailedError, "failed"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_another_server_answers_and_the_one_that_failed_is_left_out_for_a_while(failure, caplog) -> None:
    bad, good = Double(1, failure), Double(2)
    bad.failing = "/v1/completions"

    async def work(pool: Pool, clock: Clock) -> None:
        assert [await token(pool) for _ in range(3)] == [2, 2, 2]
        assert bad.samples() == (failure != "refuses"), "asked once"
        figures = text_of(pool)
        assert f'megascend_vllm_failures_total{{reason="{FAILURES[failure][1]}",server="0"}} 1.0' in figures
        assert 'megascend_vllm_left_out{server="0"} 1.0' in figures
        assert 'megascend_vllm_answered_total{server="1"} 3.0' in figures
        assert 'megascend_vllm_pending{server="0"} 0.0' in figures
        if failure == "refuses":
            await bad.start()
        bad.fails = ""
        clock.now += FIRST_S
        assert await token(pool) == 1, "its time is over"
        assert "/health" in bad.targets
        assert 'megascend_vllm_left_out{server="0"} 0.0' in text_of(pool)

    with caplog.at_level(logging.INFO, "megascend.apps.serve"):
        run([bad, good], work)
    first, last = (entry.getMessage() for entry in caplog.records)
    assert first.startswith(f"{bad.name} is left out for 5 s: {bad.name}: ")
    assert last == f"{bad.name} answers again"


def test_a_request_that_fails_is_sent_once_more_and_one_that_cannot_be_sent_to_all() -> None:
    doubles = [Double(1, "500"), Double(2, "500"), Double(3, "500")]

    async def twice(pool: Pool, clock: Clock) -> None:
        with pytest.raises(ServerFailedError) as caught:
            await token(pool)
        assert [double.name in str(caught.value) for double in doubles] == [True, True, False]

    run(doubles, twice)
    servers = [Double(1, "refuses"), Double(2, "refuses"), Double(3, "500"), Double(4)]

    async def further(pool: Pool, clock: Clock) -> None:
        assert await token(pool) == 4

    run(servers, further)


@pytest.mark.parametrize("status", ["400", "422"])
def test_refused_request_is_not_resent_and_counts_no_failure(status) -> None:
    doubles = [Double(1, status), Double(2, status)]

    async def work(pool: Pool, clock: Clock) -> None:
        with pytest.raises(RefusedError, match="it went wrong"):
            await token(pool)
        assert "failures_total{" not in text_of(pool)

    run(doubles, work)
    assert doubles[1].targets == []


def test_server_ends_although_a_vllm_server_hangs(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(vllm, "CLOSE_S", 1.0)
    config = ServeConfig(model=tmp_path, storage=tmp_path, port=0)
    base = ServedModel(("tiny",), tmp_path, "Tiny", 512, 100, ())
    hanging, good = socket.create_server(("127.0.0.1", 0)), Double(2)
    with LoopThread("vLLM") as loop:
        loop.run(good.start())
        servers = [VllmServer(f"http://127.0.0.1:{port}") for port in (hanging.getsockname()[1], good.port)]
        sampling = partial(vllm.VllmSampling, Servers(servers, "s", "/storage/null"), vocab_size=100, max_length=512)
        with http_server(config, {"0" * 64: "alice"}, base, Inbox(0, 10), vllm=sampling):
            pass
        loop.loop.call_soon_threadsafe(good.stop)
    hanging.close()
    assert good.targets == ["/v1/unload_lora_adapter"]
    assert "did not answer within 1 s" in caplog.text
    assert "http" not in [thread.name for thread in threading.enumerate()]
