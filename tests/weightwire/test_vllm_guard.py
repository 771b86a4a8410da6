"""Requests that pass the guard of vLLM's server; ``tests/real_vllm`` tests the routes of a real one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from weightwire.auth import sign
from weightwire.keys import Key, generate_key
from weightwire.vllm.guard import AUDIENCE, BEARER, Guard

KEY = Key(generate_key())


def answer(
    path: str,
    authorization: str | None = None,
    body: bytes = b"",
    method: str = "POST",
    signed: tuple[str, bytes] | None = None,
    audience: str = AUDIENCE,
    instance: str | None = None,
) -> int:
    """Return the status of a request; 299 if it passed the guard.

    Args:
        signed: target and body that a signature for this guard is of, if there is one.
        audience, instance: what it names; default: the guard's.
    """
    statuses: list[int] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == body
        await send({"type": "http.response.start", "status": 299, "headers": []})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    guard = Guard(behind, KEY)
    if signed is not None:
        instance = instance or guard._verifier.instance
        authorization = sign(KEY, "POST", *signed, audience=audience, instance=instance).headers["Authorization"]
    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    app = SimpleNamespace(state=SimpleNamespace(engine_client=None))
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "app": app}
    asyncio.run(guard(scope, receive, send))
    return statuses[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health", "/metrics", "/metrics/", "/version"])
def test_inference_and_health_are_open(path):
    assert answer(path) == 299


@pytest.mark.parametrize(
    "path",
    [
        "/pause",
        "//pause",
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/load_weights",
        "/healthy",
    ]
    + ["/version_of", "/metrics_reset", "/", "/docs", "/v1", "/weightwire/commit", "/weightwire/", "/V1/models"],
)
def test_other_routes_require_the_key(path):
    assert answer(path) == 401
    assert answer(path, "Bearer " + "0" * 64) == 401
    assert answer(path, sign(Key(generate_key()), "POST", path).headers["Authorization"]) == 401


def test_signature_or_token_opens_its_route():
    signed = ("/pause", b"{}")
    assert answer("/pause", body=b"{}", signed=signed) == 299
    assert answer("/pause", body=b"[]", signed=signed) == 401  # another body
    assert answer("/resume", body=b"{}", signed=signed) == 401  # another route
    assert answer("/pause", body=b"{}", signed=signed, audience="controller") == 401
    assert answer("/pause", body=b"{}", signed=signed, instance="0" * 32) == 401  # another server of the job
    assert answer("/pause", "Bearer " + KEY.bearer_token(BEARER)) == 299
    assert answer("/pause", "Bearer " + KEY.bearer_token("something else")) == 401
    assert answer("/weightwire/nothing", "Bearer " + KEY.bearer_token(BEARER)) == 400


@pytest.mark.parametrize("name", ["commit", "drop", "resume", "release"])
def test_a_call_that_changes_the_engine_names_its_owner(name):
    body = b'{"update": "a"}' if name in ("commit", "drop") else b"{}"
    target = f"/weightwire/{name}"
    assert answer(target, body=body, signed=(target, body)) == 400
