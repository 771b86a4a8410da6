"""Signatures of requests and answers with the job's key.

A request carries one header::

    Authorization: Weightwire2 INSTANCE.TIME.NONCE.BODY.SIGNATURE

with the server's instance, the caller's time in milliseconds since 1970, 16 random bytes, the body's SHA-256 and an HMAC-SHA256
over audience, instance, method, target, time, nonce and that digest. Everything but the body is verified from the head alone, so
that a caller without the key cannot make us read a body. A time outside the window is refused, and so is a nonce that was used
within it: a request counts once. The answer is signed too, over the request's nonce, the status and the body: nobody else can
answer in our place.

The instance is random and new in each process, so that a request counts at one server of a job, and not after its restart. A
caller signs its first request with an empty one; the refusal (:class:`InstanceError`), which is signed, states the right one. Who
can redirect a caller's connections can thereby exchange two servers of a job.

Signatures do not encrypt: confidentiality needs TLS or a private network.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from weightwire.errors import AuthBusyError, AuthError, InstanceError
from weightwire.keys import Key

SCHEME = "Weightwire2"
ANSWER_HEADER = "X-Weightwire-Signature"
"""Name of the header with an answer's signature."""
_CREDENTIALS = re.compile(SCHEME + r" ([0-9a-f]{32}|)\.([0-9]{1,15})\.([0-9a-f]{32})\.([0-9a-f]{64})\.([0-9a-f]{64})")
_WORD = re.compile(r"[!-~]{1,2048}")
_AUDIENCE = re.compile(r"[ -~]{0,256}")
_INSTANCE = re.compile(r"[0-9a-f]{32}|")


@dataclass(frozen=True)
class Signature:
    """Signature of a request.

    Attributes:
        headers: headers to add to the request.
        nonce: verifies the answer (:func:`check_answer`).
    """

    headers: dict[str, str]
    nonce: str


@dataclass(frozen=True)
class Grant:
    """A request whose head was verified.

    Attributes:
        nonce: empty if it came with a bearer token.
        body_digest: the SHA-256 that its body must have; None if it came with a bearer token, which signs nothing.
    """

    nonce: str
    body_digest: str | None

    def check_body(self, body: bytes) -> None:
        """Raise :class:`AuthError` unless ``body`` is the one that was signed."""
        if self.body_digest is not None and not hmac.compare_digest(hashlib.sha256(body).hexdigest(), self.body_digest):
            raise AuthError(f"the body ({len(body)} bytes) is not the one that was signed")


def sign(
    key: Key,
    method: str,
    target: str,
    body: bytes = b"",
    *,
    audience: str = "",
    instance: str = "",
    clock: Callable[[], float] = time.time,
) -> Signature:
    """Sign a request. Every attempt to send it needs a new signature: a nonce counts once.

    Args:
        target: path and query, as in the request's first line.
        audience: the kind of receiver that may accept it, as its :class:`Verifier` calls itself; not sent.
        instance: the server's process that may accept it, from its :class:`InstanceError`; empty until it is known.
    """
    # The signed text joins its fields by line breaks, so none may contain one.
    words = _WORD.fullmatch(method) and _WORD.fullmatch(target) and _AUDIENCE.fullmatch(audience)
    if not (words and _INSTANCE.fullmatch(instance)):
        raise ValueError(
            f"cannot sign method {method!r}, target {target!r}, audience {audience!r}, instance {instance!r}"
        )
    # The digest of the body is in the header, so that a request can be refused before its body is read.
    timestamp, nonce, digest = str(int(clock() * 1000)), secrets.token_hex(16), hashlib.sha256(body).hexdigest()
    mac = _request_mac(key, audience, instance, method, target, timestamp, nonce, digest)
    return Signature({"Authorization": f"{SCHEME} {instance}.{timestamp}.{nonce}.{digest}.{mac}"}, nonce)


def sign_answer(key: Key, nonce: str, status: int, body: bytes) -> dict[str, str]:
    """Return the header that proves that the answer to the request with this nonce comes from a holder of the key."""
    return {ANSWER_HEADER: _answer_mac(key, nonce, status, body)}


def check_answer(key: Key, nonce: str, status: int, body: bytes, signature: str | None) -> None:
    """Raise :class:`AuthError` unless a holder of the key gave this answer to the request with this nonce.

    Args:
        signature: the value of :data:`ANSWER_HEADER`; None if the header is missing.
    """
    if signature is None:
        raise AuthError(f"the answer (status {status}) is not signed: it does not come from a holder of the key")
    # The nonce ties the answer to this request: an old answer of the same server does not fit.
    expected = _answer_mac(key, nonce, status, body)
    if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace")):
        raise AuthError(
            f"the answer (status {status}) is not signed with our key, or is not the answer to this request"
        )


class Verifier:
    """Verifier of requests that remembers recent nonces, so that each request counts once. Thread-safe.

    Only nonces of requests signed with the key are remembered, at most ``max_nonces``. With more in a window, requests are
    refused until the oldest expire; none is forgotten that could be replayed.

    Args:
        audience: that callers must have signed.
        bound: accept only requests that were signed for :attr:`instance`. Without it the caller of ``check_head`` sees to it.
        window_s: largest difference between the caller's clock and ours, in seconds, either way.
        bearer: the purpose of tokens (:meth:`Key.bearer_token`) that are accepted as well; None accepts none. A token is neither
            bound to a request nor used up.
        clock: seconds since 1970.

    Attributes:
        instance: this verifier, at random.
    """

    def __init__(
        self,
        key: Key,
        *,
        audience: str = "",
        bound: bool = True,
        window_s: float = 30.0,
        max_nonces: int = 2**16,
        bearer: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = key
        self._audience = audience
        self._bound = bound
        self.instance = secrets.token_hex(16)
        self._window_s = window_s
        self._nonces = _Nonces(max_nonces)
        self._token = None if bearer is None else key.bearer_token(bearer)
        self._clock = clock

    def check_head(self, method: str, target: str, authorization: str | None) -> Grant:
        """Verify a request before its body is read. Its nonce is then used up, whatever happens to the request.

        Args:
            authorization: the value of the Authorization header; None if it is missing.

        Raises:
            AuthError: not signed with our key, too old, or a replay.
            InstanceError: signed with our key, but for another server, or before a restart.
            AuthBusyError: too many requests in the window; retry later.
        """
        if authorization is None:
            raise AuthError("the request is not signed: it has no Authorization header")
        # compare_digest: the time of a comparison must not tell how many characters are right.
        if self._token is not None and authorization.startswith("Bearer "):
            if not hmac.compare_digest(authorization[7:].encode("utf-8", "replace"), self._token.encode()):
                raise AuthError("the bearer token is not ours")
            # A token proves its holder, not the request: without a nonce and a digest, nothing else can be checked.
            return Grant("", None)
        match = _CREDENTIALS.fullmatch(authorization)
        if match is None or not (_WORD.fullmatch(method) and _WORD.fullmatch(target)):
            raise AuthError(
                f"the Authorization header is not of the form '{SCHEME} INSTANCE.TIME.NONCE.BODY.SIGNATURE'"
            )
        instance, timestamp, nonce, digest, signature = match.groups()
        expected = _request_mac(self._key, self._audience, instance, method, target, timestamp, nonce, digest)
        if not hmac.compare_digest(expected, signature):
            raise AuthError(
                "the signature is wrong: another key, another audience, or the request was changed on its way"
            )
        # After the signature: only callers with the key may fill the set of nonces.
        self._check_time(int(timestamp) / 1000)
        if self._bound and instance != self.instance:
            raise InstanceError(f"this is instance {self.instance}, not {instance or 'unnamed'}", nonce)
        self._nonces.add(nonce, expires=int(timestamp) / 1000 + self._window_s, now=self._clock())
        return Grant(nonce, digest)

    def check(self, method: str, target: str, authorization: str | None, body: bytes) -> Grant:
        """Call :meth:`check_head`, then :meth:`Grant.check_body`."""
        grant = self.check_head(method, target, authorization)
        grant.check_body(body)
        return grant

    def _check_time(self, signed_at: float) -> None:
        now = self._clock()
        if abs(now - signed_at) > self._window_s:
            raise AuthError(
                f"signed {now - signed_at:+.1f} s ago by our clock; {self._window_s:g} s are allowed either way: the clocks "
                "differ, or it is a replay"
            )


@dataclass
class _Nonces:
    """Bounded set of nonces that have not expired, with a heap by expiry."""

    limit: int
    _heap: list[tuple[float, str]] = field(default_factory=list)
    _active: set[str] = field(default_factory=set)
    _forgotten_until: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nonce: str, expires: float, now: float) -> None:
        with self._lock:
            # Expired nonces cannot be replayed: their time is outside the window.
            while self._heap and self._heap[0][0] < now:
                # Kept as a watermark: a nonce that was forgotten here must not become valid again when the clock is set back.
                self._forgotten_until, old = heapq.heappop(self._heap)
                self._active.discard(old)
            if nonce in self._active:
                raise AuthError("this request is a replay: its nonce was used before")
            if expires <= self._forgotten_until:  # our clock was set back: this nonce may be one that expired
                raise AuthError("signed at a time whose nonces have expired here: our clock was set back")
            # Refused instead of forgetting one that could still be replayed.
            if len(self._active) >= self.limit:
                raise AuthBusyError(f"{self.limit} requests arrived within the window; retry later")
            self._active.add(nonce)
            heapq.heappush(self._heap, (expires, nonce))


def _request_mac(key: Key, *fields: str) -> str:
    # Two purposes, two keys: an answer can never pass for a request.
    return key.mac("weightwire request 2", "\n".join(fields))


def _answer_mac(key: Key, nonce: str, status: int, body: bytes) -> str:
    return key.mac("weightwire answer 1", f"{nonce}\n{status}\n{hashlib.sha256(body).hexdigest()}")
