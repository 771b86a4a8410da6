"""Forged, replayed, oversized, truncated, malformed and random requests are refused and change no state."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from controller_doubles import KEY, Served, read_response, until
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megascend.apps.rl.rollout.controller.messages import AUDIENCE, new_id, read_answer, read_call
from megascend.apps.rl.rollout.controller.routes import CONTROLLER_CALLS, ROUTES
from megascend.apps.rl.rollout.controller.server import HttpLimits
from megascend.apps.rl.rollout.http_client import Answer
from megascend.errors import MessageError
from weightwire import asgi
from weightwire.auth import Verifier, sign
from weightwire.keys import Key

pytestmark = pytest.mark.waiting

OTHER = Key("f" * 32)
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
        until(served.idle)


@pytest.fixture(autouse=True)
def _nothing_changes(served: Served) -> Iterator[None]:
    """Check after each test that the state is unchanged and the next call is answered."""
    before = served.state()
    yield
    assert served.state() == before
    assert served.send(served.request("/v1/status", served.call("/v1/status")))[0] == 200


def claim_call(served: Served) -> bytes:
    """Build the body of a call with a side effect."""
    return served.call("/v1/claim", owner="attacker", lease_s=60.0)


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


HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            ["Content-Length", "Transfer-Encoding", "Authorization", "Expect", "Connection", "Upgrade", "X"]
        ),
        st.one_of(
            st.sampled_from(["0", "5", "-1", "1e9", "chunked", "close", "100-continue", ""]), st.text(max_size=30)
        ),
    ),
    max_size=6,
)


@pytest.mark.nightly  # covered: chosen requests in the same file
@EXAMPLES
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "OPTIONS", "CONNECT", "post", "P\0ST"]),
    target=st.one_of(st.sampled_from([*ROUTES, "*", "//", "http://x/", "/v1/../v1/claim"]), st.text(max_size=40)),
    headers=HEADERS,
    body=st.binary(max_size=100),
)
def test_random_http_requests_are_refused(served: Served, method: str, target: str, headers: list, body: bytes) -> None:
    lines = [f"{method} {target} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers), "", ""]
    status, _ = served.send("\r\n".join(lines).encode("utf-8", "replace") + body)
    assert status in (0, 400, 401, 404, 405)


@EXAMPLES
@given(cut=st.integers(min_value=0))
def test_truncated_requests_are_refused(served: Served, cut: int) -> None:
    """Refuse a correctly signed request that ends early at any byte."""
    request = served.request("/v1/claim", claim_call(served))
    assert served.send(request[: cut % len(request)], end=True)[0] in (0, 400, 401, 408)


@EXAMPLES
@given(where=st.integers(min_value=0), bit=st.integers(0, 7))
@example(where=5, bit=4)  # the path's first slash becomes a question mark: no path is left
def test_flipped_bit_is_refused(served: Served, where: int, bit: int) -> None:
    """Refuse a change of any signed part; unsigned parts, such as the host's name, do not matter."""
    body = served.call("/v1/status")
    request = bytearray(served.request("/v1/status", body))
    value = request.index(b"Weightwire2")
    first_line, header = range(request.index(b" HTTP")), range(value, request.index(b"\r", value))
    index = where % len(request)
    request[index] ^= 1 << bit
    status, answer = served.send(
        bytes(request), end=index not in (*first_line, *header) and index < len(request) - len(body)
    )
    if index >= len(request) - len(body):
        assert status == 400
        assert "not the one that was signed" in answer["error"]["message"]
    elif index in first_line or index in header:
        assert status in (0, 400, 401, 404, 405)
    else:
        assert status in (0, 200, 400, 401, 408, 413)


@FEWER
@given(
    route=st.sampled_from(sorted(ROUTES)),
    how=st.sampled_from(["another key", "another route", "another audience", "longer"]),
)
def test_forged_requests_are_refused(served: Served, route: str, how: str) -> None:
    body = claim_call(served)
    key = OTHER if how == "another key" else served.key
    signed_for = "/v1/other" if how == "another route" else route
    audience = "an engine" if how == "another audience" else AUDIENCE
    headers = sign(key, "POST", signed_for, body, audience=audience).headers
    payload = body + b" " if how == "longer" else body
    status, answer = served.send(served.head(route, len(payload), headers) + payload)
    assert (status, answer["error"]["kind"]) == (400 if how == "longer" else 401, "malformed")
    assert KEY not in str(answer)


@FEWER
@given(route=st.sampled_from(sorted(ROUTES)))
def test_replayed_requests_are_refused(served: Served, route: str) -> None:
    request = served.request(route, b"{}")
    assert served.send(request)[0] == 400
    status, answer = served.send(request)
    assert (status, answer["error"]["message"]) == (401, "this request is a replay: its nonce was used before")


@FEWER
@given(route=st.sampled_from(sorted(ROUTES)), size=st.integers(20_001, 10**18))
def test_oversized_requests_are_refused(served: Served, route: str, size: int) -> None:
    headers = sign(served.key, "POST", route, b"x", audience=AUDIENCE).headers
    status, answer = served.send(served.head(route, size, headers) + b"x" * 1000)
    assert status == 413
    assert "at most 20000" in answer["error"]["message"]


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    sorted({field for service in CONTROLLER_CALLS.values() for field in service.model_fields})
    + ["offer", "seal", "update", "prompt", "tokens", "max_tokens", "n", "target", "name", "directory"]
)
ANSWERED = {"/v1/hello", "/v1/status", "/v1/rollouts/forget"}
"""Calls that may be answered whatever their arguments."""


@EXAMPLES
@given(
    route=st.sampled_from(sorted(set(ROUTES) - ANSWERED)),
    arguments=st.dictionaries(FIELDS, JSON, max_size=4),
    spoil=st.sampled_from(["", "", "version", "instance", "id", "caller", "arguments", "field"]),
    value=JSON,
)
def test_malformed_signed_calls_are_refused(
    served: Served, route: str, arguments: dict, spoil: str, value: object
) -> None:
    call = {"version": 1, "instance": served.controller.instance, "id": new_id(), "caller": "x", "arguments": arguments}
    if spoil:
        call[spoil] = value
    body = json.dumps(call).encode()
    status, answer = served.send(served.request(route, body))
    # 404 and 409: the arguments were well formed, but name a claim or rollouts that do not exist.
    assert status in (400, 404, 409)
    assert answer["error"]["kind"] in ("malformed", "not_expected", "refused", "restarted")
    for call_id in [call["id"]] if isinstance(call["id"], str) else []:  # a stored answer is not a change of state
        served.thread.run(_forget(served, call_id))


async def _forget(served: Served, call_id: str) -> None:
    replies = served.server._replies
    if replies._replies.pop(call_id, None) is not None:
        replies._expiries.pop()


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
