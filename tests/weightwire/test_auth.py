"""Signed requests are accepted once; changed, replayed, late or forged ones are refused."""

from __future__ import annotations

import hashlib
import hmac
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire import auth
from weightwire.auth import ANSWER_HEADER, SCHEME, Verifier, check_answer, sign, sign_answer
from weightwire.errors import AuthBusyError, AuthError, InstanceError
from weightwire.keys import Key

TEXT = "0123456789abcdef" * 2
KEY, OTHER = Key(TEXT), Key("f" * 32)
INSTANCE = "1" * 32


def bound(key: Key = KEY, **options) -> Verifier:
    """Return a verifier whose instance :func:`header` signs for."""
    verifier = Verifier(key, **options)
    verifier.instance = INSTANCE
    return verifier


class Clock:
    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def refused(verifier: Verifier, method: str, target: str, header: str | None, body: bytes = b"") -> str:
    with pytest.raises(AuthError) as caught:
        verifier.check(method, target, header, body)
    assert TEXT not in str(caught.value)
    return str(caught.value)


def header(key: Key = KEY, method: str = "POST", target: str = "/x", body: bytes = b"", **options) -> str:
    return sign(key, method, target, body, **{"instance": INSTANCE} | options).headers["Authorization"]


def test_signature_matches_the_documented_format() -> None:
    """Compute the signature by hand."""
    clock = Clock()
    scheme, value = header(target="/v1/a?b=c", body=b"{}", audience="engine 1", clock=clock).split(" ")
    instance, sent_at, nonce, digest, signature = value.split(".")
    assert (scheme, instance, sent_at) == (SCHEME, INSTANCE, "1800000000000")
    assert digest == hashlib.sha256(b"{}").hexdigest()
    text = f"weightwire request 2\nengine 1\n{INSTANCE}\nPOST\n/v1/a?b=c\n{sent_at}\n{nonce}\n{digest}"
    assert signature == hmac.new(TEXT.encode(), text.encode(), hashlib.sha256).hexdigest()
    assert (
        bound(KEY, audience="engine 1", clock=clock).check("POST", "/v1/a?b=c", f"{scheme} {value}", b"{}").nonce
        == nonce
    )


@settings(max_examples=200, deadline=None)
@given(
    body=st.binary(max_size=64),
    flip=st.integers(min_value=0),
    where=st.sampled_from(["body", "header", "method", "target", "audience", "instance", "key"]),
)
def test_any_changed_part_of_a_request_is_refused(body: bytes, flip: int, where: str) -> None:
    clock = Clock()
    verifier = bound(KEY, audience="here", clock=clock)
    request = {"method": "POST", "target": "/v1/update", "audience": "here", "instance": INSTANCE}
    signed = header(
        OTHER if where == "key" else KEY,
        body=body,
        clock=clock,
        **request | ({where: "0" * 32 if where == "instance" else "/other"} if where in request else {}),
    )
    received_body = body
    if where == "body":
        bits = bytearray(body + b"\0")
        bits[(flip // 8) % len(bits)] ^= 1 << (flip % 8)
        received_body = bytes(bits) if flip % 2 else body[:-1] if body else b"\0"
    if where == "header":
        value = bytearray(signed.encode())
        value[(flip // 7) % len(value)] ^= 1 << (flip % 7)
        signed = value.decode()
    refused(verifier, "POST", "/v1/update", signed, received_body)
    good = header(body=body, clock=clock, **request)  # an unchanged request is still accepted
    assert verifier.check("POST", "/v1/update", good, body).nonce


@settings(max_examples=80, deadline=None)
@given(
    value=st.one_of(
        st.text(max_size=300),
        st.from_regex(r"Weightwire2 [0-9a-f]{32}\.[0-9]{1,20}\.[0-9a-f]{32}\.[0-9a-f]{64}\.[0-9a-f]{64}"),
    )
)
def test_forged_headers_are_refused(value: str) -> None:
    refused(bound(KEY, bearer="controller"), "POST", "/", value)
    refused(bound(KEY, bearer="controller"), "POST", "/", f"Bearer {value}")


def test_request_is_accepted_once_within_the_window() -> None:
    clock = Clock()
    verifier = bound(KEY, window_s=30, clock=clock)
    signed = header(clock=clock)
    verifier.check("POST", "/x", signed, b"")
    assert "is a replay" in refused(verifier, "POST", "/x", signed)
    clock.now += 30
    assert "is a replay" in refused(verifier, "POST", "/x", signed)
    clock.now += 0.01
    assert "+30.0 s ago" in refused(verifier, "POST", "/x", signed)
    future = header(clock=Clock(clock.now + 29))
    verifier.check("POST", "/x", future, b"")
    clock.now += 58
    assert "is a replay" in refused(verifier, "POST", "/x", future)
    assert "-31.0 s ago" in refused(verifier, "POST", "/x", header(clock=Clock(clock.now + 31)))


def test_expired_nonces_are_refused_after_the_clock_is_set_back() -> None:
    clock = Clock()
    verifier = bound(KEY, window_s=30, clock=clock)
    signed = header(clock=clock)
    verifier.check("POST", "/x", signed, b"")
    clock.now += 100
    verifier.check("POST", "/x", header(clock=clock), b"")  # forgets the first one
    clock.now -= 100
    assert "set back" in refused(verifier, "POST", "/x", signed)


def test_request_counts_at_one_server_until_it_restarts() -> None:
    """Refuse a request at the job's other servers, and at a server in whose place it was sent; neither uses up its nonce."""
    here, elsewhere, restarted = Verifier(KEY), Verifier(KEY), Verifier(KEY)
    signed = header(instance=here.instance)
    for server in (elsewhere, restarted):
        with pytest.raises(InstanceError, match=server.instance) as caught:
            server.check("POST", "/x", signed, b"")
        assert caught.value.nonce == signed.split(".")[2]
    assert here.check("POST", "/x", signed, b"").nonce
    moved = signed.replace(here.instance, elsewhere.instance)
    assert "signature is wrong" in refused(elsewhere, "POST", "/x", moved)
    for instance in ("", here.instance):
        assert Verifier(KEY, bound=False).check("POST", "/x", header(instance=instance), b"").nonce


def test_nonces_are_bounded_and_filled_by_valid_signatures_only() -> None:
    clock = Clock()
    verifier = bound(KEY, max_nonces=10, clock=clock)
    for _ in range(50):
        refused(verifier, "POST", "/x", header(OTHER, clock=clock))
    first = header(clock=clock)
    for signed in [first, *(header(clock=clock) for _ in range(9))]:
        verifier.check("POST", "/x", signed, b"")
    with pytest.raises(AuthBusyError, match="10 requests"):
        verifier.check("POST", "/x", header(clock=clock), b"")
    assert "is a replay" in refused(verifier, "POST", "/x", first)  # none was forgotten for another
    clock.now += 31
    verifier.check("POST", "/x", header(clock=clock), b"")
    assert len(verifier._nonces._active) == len(verifier._nonces._heap) == 1


def test_one_of_many_concurrent_identical_requests_succeeds() -> None:
    verifier, signed, accepted = bound(KEY), header(), []
    barrier = threading.Barrier(8)

    def attempt() -> None:
        barrier.wait()
        try:
            verifier.check("POST", "/x", signed, b"")
            accepted.append(1)
        except AuthError:
            pass

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert accepted == [1]


def test_bearer_tokens_are_accepted_only_where_configured() -> None:
    token = f"Bearer {KEY.bearer_token('controller')}"
    assert bound(KEY, bearer="controller").check("POST", "/x", token, b"anything").nonce == ""
    refused(bound(KEY), "POST", "/x", token)
    refused(bound(KEY, bearer="engine"), "POST", "/x", token)
    refused(bound(OTHER, bearer="controller"), "POST", "/x", token)
    refused(bound(KEY, bearer="controller"), "POST", "/x", "Bearer \u00e9")
    refused(bound(KEY, bearer="controller"), "POST", "/x", None)


def test_answer_signature_is_bound_to_one_request() -> None:
    nonce = sign(KEY, "POST", "/x").nonce
    signature = sign_answer(KEY, nonce, 200, b"{}")[ANSWER_HEADER]
    check_answer(KEY, nonce, 200, b"{}", signature)
    for arguments in [
        (KEY, "0" * 32, 200, b"{}", signature),
        (KEY, nonce, 409, b"{}", signature),
        (KEY, nonce, 200, b"[]", signature),
        (OTHER, nonce, 200, b"{}", signature),
        (KEY, nonce, 200, b"{}", "\u00e9" + signature),
        (KEY, nonce, 200, b"{}", None),
    ]:
        with pytest.raises(AuthError, match="not signed"):
            check_answer(*arguments)


def test_secrets_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every secret is compared by hmac.compare_digest."""
    compared = []

    def compare(first: str | bytes, second: str | bytes) -> bool:
        compared.append((first, second))
        return hmac.compare_digest(first, second)

    monkeypatch.setattr(auth, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare)}))
    refused(bound(KEY), "POST", "/x", header(OTHER))
    refused(bound(KEY), "POST", "/x", header(body=b"a"), b"b")
    refused(bound(KEY, bearer="x"), "POST", "/x", "Bearer y")
    with pytest.raises(AuthError):
        check_answer(KEY, "0" * 32, 200, b"", "0" * 64)
    assert len(compared) == 5
