"""The SGLang client with a double of the one route that it calls: no wheel of SGLang is compatible with this torch.

The behaviour of a real SGLang is not tested here.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megascend.apps.rl.rollout.engines.sglang import SglangTeacher
from megascend.errors import ConfigError, EngineError, EngineLostError

VALUE = 4.0
"""Log-probability that the double gives to each token."""


class Double(ThreadingHTTPServer):
    """A server that loses a row of likeliest tokens, or refuses, as ``failure`` says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.failure = ""


class Routes(BaseHTTPRequestHandler):
    server: Double

    def do_POST(self) -> None:
        assert self.path == "/generate"
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert fields["sampling_params"]["temperature"] == 0.0
        tokens, count = fields["input_ids"], fields["top_logprobs_num"]
        meta: dict[str, Any] = {
            "input_token_logprobs": [[None, tokens[0], None]] + [[VALUE, token, None] for token in tokens[1:]]
        }
        if count:
            # Of each position: 10, 11 ... likeliest first.
            top = [[VALUE - index, 10 + index, None] for index in range(count)]
            meta["input_top_logprobs"] = [None] + [top] * (len(tokens) - 1 - (self.server.failure == "top"))
        body = json.dumps({"meta_info": meta}).encode()
        self.send_response(400 if self.server.failure == "refusal" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def double() -> Iterator[Double]:
    server = Double()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def teacher(double: Double) -> SglangTeacher:
    return SglangTeacher(f"http://127.0.0.1:{double.server_port}")


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_log_probabilities_of_all_tokens_but_the_first_are_returned(teacher: SglangTeacher) -> None:
    assert run(teacher.logprobs([1, 2, 3])) == [VALUE, VALUE]


def test_likeliest_tokens_of_every_position_are_returned(teacher: SglangTeacher, double: Double) -> None:
    top = run(teacher.top_logprobs([1, 2, 3], 2))
    assert (top.logprobs, top.ids, top.top_logprobs) == ((4.0, 4.0), ((10, 11),) * 2, ((4.0, 3.0),) * 2)
    assert run(teacher.top_logprobs([1, 2], 0)).ids == ((),)
    double.failure = "top"
    with pytest.raises(EngineError, match=r"log-probabilities of 2 tokens and 1 rows of likeliest ones for 3 tokens"):
        run(teacher.top_logprobs([1, 2, 3], 2))


def test_errors_name_the_server(teacher: SglangTeacher, double: Double) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        SglangTeacher("localhost")
    with pytest.raises(EngineLostError, match=r"SGLang at 127\.0\.0\.1:1: /generate"):
        run(SglangTeacher("http://127.0.0.1:1").logprobs([1, 2]))
    double.failure = "refusal"
    with pytest.raises(EngineError, match=r"/generate: status 400"):
        run(teacher.logprobs([1, 2]))
