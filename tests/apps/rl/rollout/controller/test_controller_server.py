"""The controller on real sockets: calls and their repetition, bounds, slow and dead callers, cost of waiting."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest
from controller_doubles import (
    KEY,
    BlockingClient,
    ManualClock,
    NotingEngine,
    Served,
    a_seal,
    an_offer,
    read_response,
)

from megascend.apps.rl.rollout import connections
from megascend.apps.rl.rollout.controller.client import ControllerEngine
from megascend.apps.rl.rollout.controller.messages import BEARER
from megascend.apps.rl.rollout.controller.server import HttpLimits
from megascend.errors import (
    ConfigError,
    ControllerBusyError,
    ControllerError,
    ControllerLostError,
    EngineError,
    EngineLostError,
    RolloutTaskError,
)
from support.waiting import wait_until
from weightwire import asgi
from weightwire.auth import sign
from weightwire.engine import Completion, Sampling
from weightwire.engine_calls import LoopThread
from weightwire.errors import AuthError
from weightwire.keys import Key

pytestmark = pytest.mark.waiting

OTHER = Key("f" * 32)


def test_a_trainer_owns_engines_updates_and_pauses_them() -> None:
    with Served() as served, served.client() as client:
        first_engine, second_engine = served.engines
        with client.claim("trainer", lease_s=60) as claim:
            assert claim.receivers() == 2
            claim.begin_update(an_offer("a", 2))
            claim.verify(a_seal("a"), timeout_s=60)
            claim.commit("a")
            assert first_engine.in_force == second_engine.in_force == "a"
            with claim.paused(lease_s=60):
                assert [first_engine.paused, second_engine.paused] == [True, True]
                assert client.status()["engines"]["one"]["paused_s"] > 0
            assert [first_engine.paused, second_engine.paused] == [False, False]
            with (
                served.client() as rival,
                pytest.raises(EngineError, match="belongs to 'trainer'"),
                rival.claim("rival"),
            ):
                pass
            second_engine.fails.add("verify")
            claim.begin_update(an_offer("b", 2))
            with pytest.raises(EngineError, match=r"verify failed: engine 'two'.*cannot verify"):
                claim.verify(a_seal("b"), timeout_s=60)
            assert first_engine.calls[-1] == "drop b"
            with pytest.raises(ValueError, match="within a block"), claim.paused(lease_s=60):
                raise ValueError("within a block")
            assert not first_engine.paused
        assert client.status()["engines"]["one"]["owner"] is None


def test_a_claim_is_renewed_while_its_block_runs_and_lost_when_it_lapses() -> None:
    clock = ManualClock()
    with Served(clock=clock) as served, served.client() as client, client.claim("trainer", lease_s=0.3) as claim:
        renewals = served.thread.run(_count_renewals(served))
        wait_until(lambda: len(renewals) >= 3)
        claim.pause(lease_s=100)
        served.thread.run(clock.advance(101))
        assert not served.engines[0].paused
        with pytest.raises(EngineLostError, match=r"the lease of 'trainer' on one, two lapsed"):
            claim.pause(lease_s=1)
        claim.pause(lease_s=1)  # of a new claim
        claim.resume()


def test_an_engine_of_the_controller_claims_again_after_its_claim_was_lost() -> None:
    clock = ManualClock()
    with Served(clock=clock) as served, served.client() as client:
        engine = ControllerEngine(served.where, served.key, owner="trainer")
        assert asyncio.run(engine.receivers()) == 2  # every call runs in a new event loop
        served.thread.run(clock.advance(61))
        with pytest.raises(
            EngineLostError, match=r"engines of the controller .*: pause: the lease of 'trainer' .* lapsed"
        ):
            asyncio.run(engine.pause(1))
        assert asyncio.run(engine.receivers()) == 2
        assert client.status()["engines"]["one"]["owner"] == "trainer"
        asyncio.run(engine.close())
        assert client.status()["engines"]["one"]["owner"] is None


def test_engine_whose_logprobs_are_not_finite_gets_no_further_prompts() -> None:
    class OneToken(NotingEngine):
        logprob = -1.0

        async def generate(self, *_: object) -> list[Completion]:
            return [Completion((5,), (self.logprob,), "length", 0, 0)]

    broken = OneToken("one")
    broken.logprob = float("nan")
    with (
        Served(engines=[broken, OneToken("two")]) as served,
        served.client() as client,
        client.claim("trainer") as claim,
    ):
        with pytest.raises(EngineError, match=r"engine 'one' gave .* log-probability nan"):
            claim.generate([1], Sampling(1))
        for _ in range(4):
            assert claim.generate([1], Sampling(1))[0].logprobs == (-1.0,)


async def _count_renewals(served: Served) -> list[str]:
    renewals, renew = [], served.controller.renew

    def counting(claim_id: str, lease_s: float):
        renewals.append(claim_id)
        return renew(claim_id, lease_s)

    served.controller.renew = counting  # type: ignore[method-assign]
    return renewals


def test_remote_trainer_gets_results_as_they_complete() -> None:
    with Served() as served, served.client() as trainer, served.client() as worker:
        trainer.expect(["a", "b", "c"], deadline_s=600)
        results = trainer.results(["a", "b", "c"])
        worker.complete("b", {"tokens": [1, 2], "logprobs": [-0.5, None]})
        assert next(results) == ("b", {"tokens": [1, 2], "logprobs": [-0.5, None]})
        worker.fail("a", "out of memory")
        name, error = next(results)
        assert name == "a"
        assert isinstance(error, RolloutTaskError)
        assert "'a' failed: out of memory" in str(error)
        threading.Timer(0.1, lambda: worker.complete("c", {})).start()
        assert list(results) == [("c", {})]
        with pytest.raises(RolloutTaskError, match="fetched or given up"):
            worker.complete("b", {})
        assert served.controller.tasks.status() == {"in_flight": 0, "kept": 0, "kept_bytes": 0}


def test_a_repeated_call_has_its_first_answer_and_no_effect() -> None:
    with Served() as served:
        body = served.call("/v1/claim", owner="trainer", lease_s=60.0)
        first = served.send(served.request("/v1/claim", body))
        assert first[0] == 200
        assert served.send(served.request("/v1/claim", body)) == first
        pause = served.call("/v1/pause", claim=first[1]["result"]["claim"], lease_s=60.0)
        for _ in range(3):
            assert served.send(served.request("/v1/pause", pause))[0] == 200
        assert served.engines[0].calls == ["pause 60"]
        refused = served.call("/v1/claim", owner="rival", lease_s=60.0)
        answers = [served.send(served.request("/v1/claim", refused)) for _ in range(2)]
        assert answers[0] == answers[1]
        assert answers[0][1]["error"]["kind"] == "owned"
        # The same id with a different body, and on a different route.
        for route, other in (
            ("/v1/pause", pause.replace(b"60.0", b"61.0")),
            ("/v1/renew", pause),
            ("/v1/resume", pause),
        ):
            status, answer = served.send(served.request(route, other))
            if route == "/v1/renew":  # has no effect that must not be repeated, so its answers are not stored
                assert status == 200
            else:
                assert (status, answer["error"]["kind"]) == (400, "malformed")
        assert served.engines[0].calls == ["pause 60"]


def test_sizes_are_bounded() -> None:
    limits = HttpLimits(max_body_bytes=2000, max_head_bytes=4000, max_buffered_bytes=3000)
    with Served(limits=limits) as served:

        def signed(body: bytes) -> dict[str, str]:
            return sign(served.key, "POST", "/v1/status", body, audience="megascend rollout controller").headers

        def status(data: bytes) -> tuple[int, str]:
            code, answer = served.send(data)
            return code, answer["error"]["message"] if answer and "error" in answer else ""

        large = served.call("/v1/status", padding="x" * 2000)
        assert status(served.request("/v1/status", large)) == (
            413,
            f"a body of {len(large)} bytes; at most 2000 are accepted",
        )
        assert status(served.head("/v1/status", 10**15, signed(b"")))[0] == 413
        assert status(served.head("/v1/status", "9" * 3000, signed(b"")))[0] == 400
        assert status(b"POST /v1/status HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 5000)[0] == 400
        assert status(b"POST /" + b"y" * 5000)[0] == 400
        twice = signed(b"")["Authorization"]
        head = f"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: {twice}\r\nAuthorization: {twice}\r\n\r\n"
        assert status(head.encode()) == (401, "the request has more than one Authorization header")
        body = served.call("/v1/status", padding="x" * 2000)  # of a length that is not announced
        chunked = served.head("/v1/status", 0, signed(body)).replace(
            b"Content-Length: 0", b"Transfer-Encoding: chunked"
        )
        parts = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        assert status(chunked + parts) == (413, "the body has more than 2000 bytes")
        with served.connect() as half:  # holds room for 1800 bytes
            half.sendall(served.head("/v1/status", 1800, signed(b"y" * 1800)))
            wait_until(lambda: served.server._buffered == 1800)
            padded = served.call("/v1/status", padding="x" * 1300)
            assert status(served.request("/v1/status", padded)) == (
                503,
                "too many large requests at once; retry later",
            )
        wait_until(served.idle)


def test_idle_connections_do_not_block_other_callers() -> None:
    """Open thirty connections that never finish their head, with a limit of eight: the oldest are closed, calls succeed."""
    limits = HttpLimits(max_connections=8)
    starts = [b"", b"P", b"POST /v1/status HTTP/1.1", b"POST / HTTP/1.1\r\nHost: x\r\nX: y", b"POST /" + b"x" * 4000]
    with Served(limits=limits) as served, served.client() as client:
        slow = []
        for number in range(30):
            connection = served.connect()
            connection.sendall(starts[number % len(starts)])
            slow.append(connection)
            if number % 5 == 0:
                assert client.status()["rollouts"]["in_flight"] == 0
        assert client.status()["rollouts"]["in_flight"] == 0
        wait_until(lambda: len(served.connections) <= 8)
        for connection in slow[:20]:
            assert read_response(connection)[1] is None  # cut off
        for connection in slow:
            connection.close()
        wait_until(served.idle)


def test_callers_that_stop_halfway_or_do_not_read_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for deadline in ("HEAD_S", "WRITE_S"):
        monkeypatch.setattr(connections, deadline, 1.5)
    with Served(limits=HttpLimits(body_timeout_s=1.5)) as served, served.client() as client:
        with served.connect() as no_head, served.connect() as no_body, socket.socket() as no_reading:
            no_head.sendall(b"POST /v1/status HTTP/1.1\r\n")
            no_body.sendall(served.request("/v1/status", served.call("/v1/status"))[:-1])
            client.expect(["large"], deadline_s=60)
            client.complete("large", {"text": "x" * 12_000_000})
            no_reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            no_reading.connect((served.server.address.host, served.server.address.port))
            body = served.call("/v1/rollouts/wait", rollouts=["large"], timeout_s=60.0)
            no_reading.sendall(served.request("/v1/rollouts/wait", body))
            assert client.status()["rollouts"]["kept"] == 1
            assert read_response(no_head)[0] == 0
            assert "the body did not arrive within 1.5 s" in read_response(no_body)[1]["error"]["message"]
            wait_until(served.idle)
        assert dict(client.results(["large"]))["large"]["text"] == "x" * 12_000_000  # type: ignore[index]


def test_too_many_concurrent_requests_raise_controller_busy_error() -> None:
    with Served(limits=HttpLimits(max_requests=2)) as served, served.client(timeout_s=2.0) as client:
        client.expect(["a"], deadline_s=60)
        body = [served.call("/v1/rollouts/wait", rollouts=["a"], timeout_s=60.0) for _ in range(2)]
        waiting = [served.connect(), served.connect()]
        for connection, call in zip(waiting, body, strict=True):
            connection.sendall(served.request("/v1/rollouts/wait", call))
        wait_until(lambda: served.server._requests == 2)
        with pytest.raises(ControllerBusyError, match="2 requests are being answered"):
            client.status()
        served.thread.run(_complete(served, "a"))
        for connection in waiting:
            assert read_response(connection)[1]["result"]["results"] == {"a": {}}
            connection.close()
        assert client.status()["rollouts"]["kept"] == 1


async def _complete(served: Served, name: str) -> None:
    served.controller.tasks.complete(name, {})


def test_caller_without_the_key_is_refused() -> None:
    with Served() as served:
        with (
            BlockingClient(served.where, OTHER, caller="x", timeout_s=10) as stranger,
            pytest.raises(AuthError) as caught,
        ):
            stranger.status()
        assert "refuses our signature: the signature is wrong: another key" in str(caught.value)
        assert KEY not in str(caught.value)
        token = {"Authorization": f"Bearer {served.key.bearer_token(BEARER)}"}
        body = served.call("/v1/status")
        assert served.send(served.head("/v1/status", len(body), token) + body)[0] == 401
    with Served(bearer=True) as served:
        body = served.call("/v1/status")
        assert served.send(served.head("/v1/status", len(body), token) + body)[0] == 200


def test_unsigned_answer_raises_controller_lost_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse the answer of a process that took the port and does not have the key."""
    with Served() as served, BlockingClient(served.where, served.key, caller="x", timeout_s=2.0) as client:
        client.status()

        async def forget_to_sign() -> None:
            monkeypatch.setattr(asgi, "sign_answer", lambda *_: {})

        served.thread.run(forget_to_sign())
        with pytest.raises(ControllerLostError, match=r"is not our rollout controller: the answer .* is not signed"):
            client.status()


def test_unreachable_and_closing_controllers_raise_errors() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with (
            BlockingClient(f"127.0.0.1:{port}", Key(KEY), caller="x", timeout_s=0.3) as client,
            pytest.raises(ControllerLostError, match=f"127.0.0.1:{port}.*in time"),
        ):
            client.status()
    with Served() as served, served.client(timeout_s=6.0) as client:
        client.expect(["a"], deadline_s=60)
        results = client.results(["a"])
        waiting = LoopThread("waiting")

        async def first() -> tuple[str, object]:
            return await asyncio.to_thread(next, results)

        pending = waiting.submit(first())
        wait_until(lambda: served.server._requests == 1)
        served.thread.run(served.server.close("the run is over"))
        name, error = pending.result(30)
        assert (name, type(error)) == ("a", RolloutTaskError)
        assert "the run is over" in str(error)
        waiting.close()


def test_port_in_use_is_named_and_free_port_is_published(tmp_path: Path) -> None:
    with Served(publish=tmp_path / "controller.json") as served:
        assert served.server.address.port > 0
        assert served.server.address.host == "127.0.0.1"
        with BlockingClient(tmp_path / "controller.json", served.key, caller="x") as client:
            assert client.status()["instance"] == served.controller.instance
        with pytest.raises(
            ConfigError, match=f"127.0.0.1:{served.server.address.port}: .*in use.*port 0 takes one that is free"
        ):
            Served(port=served.server.address.port)
        with pytest.raises(ControllerError, match=f"controller.json is held by another controller, at {served.where}"):
            Served(publish=tmp_path / "controller.json")
    assert not (tmp_path / "controller.json").exists()
    with Served(publish=tmp_path / "controller.json"):
        pass


def test_internal_error_is_returned_to_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    with Served() as served, served.client() as client:

        def broken() -> dict:
            raise ZeroDivisionError("of ours")

        served.controller.status = broken  # type: ignore[method-assign]
        with pytest.raises(ControllerError, match="ZeroDivisionError: of ours"):
            client.status()
        assert "a call of 'test' failed" in caplog.text
        assert KEY not in caplog.text
