"""Forged, replayed, oversized, truncated, malformed and random requests are refused and change no state."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from controller_doubles import Served, read_response
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascend.apps.rl.rollout.controller.messages import read_answer, read_call
from megascend.apps.rl.rollout.controller.routes import ROUTES
from megascend.apps.rl.rollout.controller.server import HttpLimits
from megascend.apps.rl.rollout.http_client import Answer
from megascend.errors import MessageError
from support.waiting import wait_until
from weightwire import asgi
from weightwire.auth import Verifier

pytestmark = pytest.mark.waiting

EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEWER = settings(EXAMPLES, max_examples=60)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Serve one controller that only these tests call."""
    with (
        pytest.MonkeyPatch.context() as patch,
        Served(limits=HttpLimits(max_body_bytes=20_000, max_head_bytes=4096, body_timeout_s=30)) as served,
    ):
        patch.setattr(asgi, "DISCARD_S", 0.05)
        yield served
        wait_until(served.idle)


@pytest.fixture(autouse=True)
def _nothing_changes(served: Served) -> Iterator[None]:
    """Check after each test that the state is unchanged and the next call is answered."""
    before = served.state()
    yield
    assert served.state() == before
    assert served.send(served.request("/v1/status", served.call("/v1/status")))[0] == 200


@EXAMPLES
@given(noise=st.binary(max_size=600), end=st.booleans())
def test_random_bytes_are_refused(served: Served, noise: bytes, end: bool) -> None:
    with served.connect() as connection:
        try:
            connection.sendall(noise)
            if end:
                connection.shutdown(socket.SHUT_WR)
                assert read_response(connection)[0] in (0, 400, 401, 404, 405)
        except ConnectionError:
            pass  # cut off


@FEWER
@given(route=st.sampled_from(sorted(ROUTES)))
def test_replayed_requests_are_refused(served: Served, route: str) -> None:
    request = served.request(route, b"{}")
    assert served.send(request)[0] == 400
    status, answer = served.send(request)
    assert (status, answer["error"]["message"]) == (401, "this request is a replay: its nonce was used before")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"{}{}",
        b"[" * 10_000,
        b'{"a":' * 3_000,
        b'{"version":1,"version":1}',
        b'{"version":NaN}',
        b'{"version":1' + b"0" * 5000 + b"}",
        b'{"version":true}',
        b'{"version":2}',
        b'{"version":1}',
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_invalid_bodies_raise_message_error(served: Served, body: bytes) -> None:
    with pytest.raises(MessageError):
        read_call(body)
    with pytest.raises(MessageError):
        read_answer(Answer(200, body))
    status, answer = served.send(served.request("/v1/claim", body))
    assert (status, answer["error"]["kind"]) == (400, "malformed")


def test_result_with_an_infinite_number_leaves_its_rollout_expected() -> None:
    with Served() as served, served.client() as client:
        client.expect(["large"], deadline_s=60)
        body = served.call("/v1/rollouts/complete", rollout="large", result={"reward": 1.5})
        status, answer = served.send(served.request("/v1/rollouts/complete", body.replace(b"1.5", b"-1e999")))
        assert (status, answer["error"]["message"]) == (400, "-1e999 is too large")
        client.complete("large", {"reward": 1.5})
        assert dict(client.results(["large"])) == {"large": {"reward": 1.5}}


def test_verifier_runs_before_the_body_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a caller without the key that announces a large body before it sends any of it."""
    checks = []
    check = Verifier.check_head
    monkeypatch.setattr(Verifier, "check_head", lambda self, *head: checks.append(head) or check(self, *head))
    with served.connect() as connection:
        connection.sendall(served.head("/v1/claim", 19_000, {"Authorization": "Weightwire2 forged"}))
        assert read_response(connection)[0] == 401
    assert len(checks) == 1
