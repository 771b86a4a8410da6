"""The server on sockets, with clients that are slow, silent, many, or do not speak HTTP."""

from __future__ import annotations

import select
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from recording_backend import KEYS, VOCABULARY, RecordingBackend, train_body

from megascend.apps.rl.rollout import connections
from megascend.apps.serve import server
from megascend.apps.serve.api import reading
from megascend.apps.serve.api.keys import key_digest
from megascend.apps.serve.scheduler.inbox import Inbox
from megascend.apps.serve.scheduler.runner import run_commands
from megascend.apps.serve.served_model import ServedModel
from megascend.config.serve import ServeConfig

HEADERS = {"X-API-Key": KEYS["alice"]}
DEADLINE_S = 60.0


@contextmanager
def listening(storage: Path, **settings) -> Iterator[str]:
    """Yield the address of a server on a RecordingBackend."""
    config = ServeConfig(model=storage, storage=storage, port=0, window_ms=0, **settings)
    base = ServedModel(("tiny",), Path("/models/tiny"), "Tiny", 512, VOCABULARY, ("model.layers.0.mlp.up_proj",))
    inbox, backend = Inbox(0, config.batch_tokens), RecordingBackend()
    keys = {key_digest(key): name for name, key in KEYS.items()}
    with server.http_server(config, keys, base, inbox) as (address, report):
        worker = threading.Thread(
            target=run_commands, args=(backend, config.batch_tokens, inbox, report, backend.generate)
        )
        worker.start()
        try:
            yield address
        finally:
            inbox.close()
            worker.join(DEADLINE_S)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set short timeouts, but long enough for a fast client on a busy machine."""
    monkeypatch.setattr(connections, "HEAD_S", 2.0)
    monkeypatch.setattr(connections, "WRITE_S", 0.5)
    monkeypatch.setattr(reading, "TIMEOUT_S", 2.0)
    with listening(tmp_path) as url:
        yield url


def connected(address: str, buffer: int | None = None) -> socket.socket:
    host, _, port = address.rpartition("/")[2].rpartition(":")
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(DEADLINE_S)
    connection.connect((host, int(port)))
    return connection


def rest(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    received = b""
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def status_of(client: socket.socket, request: bytes) -> int:
    """Send a request, read its JSON answer to the end and return the status."""
    client.sendall(request)
    received = b""
    while not received.endswith(b"}"):
        part = client.recv(65536)
        if not part:
            raise ConnectionResetError
        received += part
    return int(received[9:12])


def head(path: str, *lines: str, key: str = KEYS["alice"]) -> bytes:
    return "\r\n".join((f"POST /api/v1/{path} HTTP/1.1", "Host: x", f"X-API-Key: {key}", *lines, "", "")).encode()


def test_slow_and_silent_connections_are_closed(address) -> None:
    with ExitStack() as stack:
        silent, slow_head, slow_body, unwanted, second = (stack.enter_context(connected(address)) for _ in range(5))
        slow_head.sendall(head("create_session")[:40])
        slow_body.sendall(head("create_session", "Content-Length: 100") + b"{")
        unwanted.sendall(head("create_session", "Content-Length: 10000000", key="tml-nobody-0123456789") + b"{" * 100)
        second.sendall(head("telemetry", "Content-Length: 2") + b"{}")
        assert second.recv(65536).startswith(b"HTTP/1.1 200")
        second.sendall(head("telemetry")[:30])
        assert httpx.post(f"{address}/api/v1/create_session", json={}, headers=HEADERS).status_code == 200
        assert (rest(silent), rest(slow_head)) == (b"", b"")
        assert rest(slow_body).startswith(b"HTTP/1.1 408")
        assert rest(unwanted).startswith(b"HTTP/1.1 401")
        assert b"HTTP/1.1" not in rest(second)


def test_client_that_never_reads_is_closed(address) -> None:
    with connected(address, buffer=4096) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)  # more answers than fit between us
        closed = select.poll()
        closed.register(client, 0)
        assert [event & select.POLLERR for _, event in closed.poll(1000 * DEADLINE_S)] == [select.POLLERR]
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_invalid_http_is_refused(address) -> None:
    too_much = "X-Long: " + "a" * 200_000
    for content in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: [\r\n\r\n",
        head("create_session", "Content-Length: 5", "Content-Length: 6"),
        head("create_session", "Content-Length: -1"),
        head("create_session", "Content-Length: 5", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip"),
        head("create_session", "Transfer-Encoding: chunked") + b"zzz\r\n",
        head("create_session", "X-Line: a\nb"),
        head("create_session", too_much),
        head("create_session", *[f"X-{number}: {'a' * 100}" for number in range(2000)]),
        head("create_session", "Upgrade: websocket", "Connection: Upgrade", key="tml-nobody-0123456789"),
    ):
        with connected(address) as client:
            client.sendall(content)
            answer = client.recv(65536)
            assert answer[9:12] in (b"", b"400", b"401", b"404"), (content[:60], answer[:200])
            assert b"Traceback" not in answer
    assert httpx.post(f"{address}/api/v1/create_session", json={}, headers=HEADERS).status_code == 200


def test_one_tenant_cannot_take_all_connections(tmp_path, monkeypatch) -> None:
    """Open idle and waiting connections from one address, as behind a proxy."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 64)
    bobs = {"X-API-Key": KEYS["bob"]}
    with listening(tmp_path) as address, ExitStack() as stack:
        api = f"{address}/api/v1"
        with httpx.Client(base_url=api, headers=bobs) as bob, httpx.Client(base_url=api, headers=HEADERS) as alice:
            session = alice.post("create_session", json={}).json()["session_id"]
            promise = alice.post(
                "create_model",
                json={"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}},
            )
            assert alice.post("retrieve_future", json={"request_id": promise.json()["request_id"]}).status_code == 200
            never = alice.post("forward_backward", json=train_body(f"{session}:train:0", 2, 10)).json()["request_id"]
            bobs_connection = stack.enter_context(connected(address))
            bobs_request = head("telemetry", "Content-Length: 2", key=KEYS["bob"]) + b"{}"
            assert status_of(bobs_connection, bobs_request) == 200
            content = f'{{"request_id": "{never}"}}'.encode()
            for request in (
                head("telemetry", "Content-Length: 2") + b"{}",
                head("retrieve_future", f"Content-Length: {len(content)}") + content,
            ):
                for _ in range(100):
                    with suppress(ConnectionError):
                        alices_connection = stack.enter_context(connected(address))
                        if request.startswith(b"POST /api/v1/telemetry"):
                            assert status_of(alices_connection, request) == 200
                        else:
                            alices_connection.sendall(request)
                assert status_of(bobs_connection, bobs_request) == 200, "what another tenant has kept stays open"
                for _ in range(3):
                    assert bob.post("create_session", json={}).status_code == 200
                    assert httpx.get(f"{api}/sessions", headers=bobs).status_code == 200


def test_requests_of_one_tenant_that_wait_are_bounded(tmp_path) -> None:
    with listening(tmp_path, limits={"requests": 3}) as address, ExitStack() as stack:
        slow = [stack.enter_context(connected(address)) for _ in range(3)]
        for connection in slow:
            connection.sendall(head("create_session", "Content-Length: 2", "Expect: 100-continue"))
            assert connection.recv(65536).startswith(b"HTTP/1.1 100"), "its body is being waited for"
        refused = httpx.post(f"{address}/api/v1/create_session", json={}, headers=HEADERS)
        assert (refused.status_code, refused.headers["retry-after"], "limits.requests" in refused.text) == (
            429,
            "1",
            True,
        )
        assert (
            httpx.post(f"{address}/api/v1/create_session", json={}, headers={"X-API-Key": KEYS["bob"]}).status_code
            == 200
        )
        slow[0].sendall(b"{}")
        assert slow[0].recv(65536).startswith(b"HTTP/1.1 200")
        assert httpx.post(f"{address}/api/v1/create_session", json={}, headers=HEADERS).status_code == 200


@pytest.mark.parametrize(
    ("connection_codes", "expected"),
    [
        ("a- a- b-", 0),  # the oldest idle connection of the owner with the most
        ("a+ a- a- b-", 1),
        ("b- a+ a+ a+", 3),  # the newest of those that wait for an answer
        ("b- b- a- a- a-", 2),
        ("b- a- a- b-", 0),
    ],
)
def test_owner_with_the_most_connections_is_evicted(connection_codes, expected) -> None:
    codes = enumerate(connection_codes.split())
    open_connections = [SimpleNamespace(owner=code[0], idle=code[1] == "-", since=number) for number, code in codes]
    assert connections.choose_victim(open_connections).since == expected


def test_a_client_that_goes_away_leaves_nothing(address) -> None:
    with connected(address) as client:
        client.sendall(head("create_session", "Content-Length: 100") + b"{")
    with httpx.Client(base_url=f"{address}/api/v1", headers=HEADERS) as client:
        session = client.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        client.post("create_model", json=body)
        request = client.post("forward_backward", json=train_body(f"{session}:train:0", 1, 10)).json()["request_id"]
        with connected(address) as connection:
            content = f'{{"request_id": "{request}"}}'.encode()
            connection.sendall(head("retrieve_future", f"Content-Length: {len(content)}") + content)
        assert client.post("retrieve_future", json={"request_id": request}).json()["metrics"]["loss:sum"] == 10
        assert len(client.get("sessions").json()["sessions"]) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls_by_settings(tmp_path) -> None:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "certificate.pem")]
    subprocess.run([*command, *names, *files], check=True, capture_output=True, timeout=DEADLINE_S)
    settings = {"tls_certificate": tmp_path / "certificate.pem", "tls_key": tmp_path / "key.pem"}
    with listening(tmp_path / "storage", **settings) as address:
        assert address.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=tmp_path / "certificate.pem")
        assert httpx.get(f"{address}/api/v1/sessions", headers=HEADERS, verify=trusting).json() == {"sessions": []}
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{address}/healthz")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{address.replace('https', 'http')}/healthz")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, OSError)), connected(address) as client:
            old.wrap_socket(client)
