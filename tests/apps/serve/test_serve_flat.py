"""Memory stays flat: after any number of sessions, models and requests, the server holds what it held before."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recording_backend import Clock, Served, served

from megascend.apps.serve import figures
from megascend.apps.serve.api.wire import TrainAnswer
from megascend.apps.serve.scheduler import futures

LIVES = 16
CONTAINERS = (dict, list, set, deque, OrderedDict)


def live(system: Served, *, ends: str) -> None:
    """Run a session with everything a client does: it trains, fails, saves, samples, and ends one way or another."""
    caller = system.alice
    model = caller.model()
    session = model.partition(":")[0]
    for number in (1, 3):
        caller.fetch(caller.forward_backward(model, number, 10))
        caller.fetch(caller.optim_step(model, number + 1))
    caller.fetch(caller.forward_backward(model, 5, 10**6))  # outside the vocabulary
    caller.forward_backward(model, 7, 10)  # waits for one that never comes
    for number, kind in ((8, "weights"), (9, "sampler_weights")):
        path = "save_weights" if kind == "weights" else "save_weights_for_sampler"
        caller.post(path, {"model_id": model, "path": "one", "seq_id": number})
    caller.fetch(caller.optim_step(model, 6))
    path = caller.fetch(f"{model}:request:9")["path"]
    sampler = caller.post(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    ).json()["sampling_session_id"]
    caller.post("join_sampling_session", {"sampling_session_id": sampler})
    for number in (1, 2):
        body = {
            "sampling_session_id": sampler, "seq_id": number, "prompt": {"chunks": [{"tokens": [5]}]},
            "sampling_params": {"max_tokens": 4}, "record_stability_info": True,
        }  # fmt: skip
        request = caller.post("asample", body).json()["request_id"]
        if number == 1:
            caller.fetch(request)
    caller.post("retrieve_futures", {"target": {"sampling_session_id": sampler}, "timeout": 0})
    caller.post("telemetry", {"events": []})
    for kind in ("weights", "sampler_weights"):
        caller.get(f"training_runs/{model}/checkpoints/{kind}/one", "DELETE")
    if ends == "unload":
        caller.ask("unload_model", {"model_id": model})
    if ends != "silence":
        caller.post(f"sessions/{session}/finish")


async def drop_cancelled_timers() -> None:
    """Drop cancelled timers, which asyncio otherwise keeps until their time or until most are cancelled: 30 s of requests."""
    loop = asyncio.get_running_loop()
    loop._scheduled[:] = sorted(timer for timer in loop._scheduled if not timer.cancelled())  # type: ignore[attr-defined]
    loop._timer_cancelled_count = 0  # type: ignore[attr-defined]


def count_objects() -> Counter[str]:
    """Count the objects of this process by type, and the entries of all containers by theirs."""
    gc.collect()
    objects = gc.get_objects()
    count = Counter(f"{type(item).__module__}.{type(item).__qualname__}" for item in objects)
    for kind in CONTAINERS:
        count[f"entries of {kind.__name__}"] = sum(len(item) for item in objects if type(item) is kind)
    return count


def grown(before: Counter[str], *, within_s: float) -> dict[str, int]:
    """Return objects that exist more often than in `before`, also after a while: a thread may be in its last call."""
    deadline = time.monotonic() + within_s
    while True:
        now = count_objects()
        extra = {name: now[name] - before[name] for name in now if now[name] - before[name] >= LIVES // 2}
        if not extra or time.monotonic() > deadline:
            return extra
        time.sleep(0.1)


def test_lives_that_are_over_leave_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(figures, "RECENT_BATCHES", 4)
    monkeypatch.setattr(figures, "RECENT_PROBLEMS", 4)
    with served(tmp_path / "storage", durable=True, limits={"sessions": 4 * LIVES}) as server:

        def lives(count: int) -> None:
            for number in range(count):
                live(server, ends=("unload", "finish", "silence")[number % 3])
            server.tick(400)  # of silence
            while server.service.futures.pending_by_kind():  # removals, which the ranks have yet to do
                time.sleep(0.01)
            server.tick(2 * 24 * 3600)  # no answer, no response is kept for so long
            server.backend.calls.clear()
            server.backend.sampled.clear()
            server.client.cookies.clear()
            assert server.client.portal is not None
            server.client.portal.call(server.service.durability.durable)
            server.client.portal.call(drop_cancelled_timers)
            assert len(server.service.tenancy.sessions) == len(server.service.tenancy.models) == 0

        lives(12)  # what is made once: adapters that stay loaded for sampling, lists of the last batches and errors
        for _ in range(3):  # what grows every time; a pool's thread or a library's cache may be made late, once
            before = count_objects()
            lives(2 * LIVES)
            if not (extra := grown(before, within_s=30.0)):
                break
        assert extra == {}


@pytest.fixture
def retained() -> futures.Futures:
    return futures.Futures(Clock(), 3600.0, max_bytes=10 * 2**20 + 2**16)


def answered(retained: futures.Futures, number: int, size: int = 2**20, tenant: str = "alice", **values: Any) -> Any:
    future = retained.make(f"m{number}", tenant, "m", "forward_backward", answer_of=lambda value: value, **values)
    retained.complete(future, TrainAnswer([np.zeros(size // 4, np.float32)], {}))
    return future


def test_fetched_answers_make_room_for_others_the_oldest_first(retained) -> None:
    finished = [answered(retained, number) for number in range(8)]
    for future in finished[1:4]:
        future.retrieved = 0.0
    finished += [answered(retained, number) for number in range(8, 11)]
    assert [retained.get(future.name, "alice") is not None for future in finished] == [True, False] + 9 * [True]
    assert not retained.full("alice")


def test_unfetched_answers_block_their_tenant(retained) -> None:
    finished = [answered(retained, number) for number in range(11)]
    assert retained.full("alice")
    assert not retained.full("bob")
    assert all(retained.get(future.name, "alice") is future for future in finished), "none of them is lost"
    finished[5].retrieved = 0.0
    assert not retained.full("alice")
    assert retained.get("m5", "alice") is None
    for future in finished:
        future.retrieved = 0.0
    retained._clock.now = 121.0
    retained.forget()
    assert retained._accounts == {}


def test_tenant_over_its_answer_bytes_is_refused(tmp_path: Path) -> None:
    with served(tmp_path / "storage", limits={"answer_bytes": 10_000}) as service:
        model, other = service.alice.model(), service.bob.model()
        names = [service.alice.forward_backward(model, number, 10) for number in range(1, 6)]
        service.bob.fetch(service.bob.forward_backward(other, 1, 10))
        refused = service.alice.post("optim_step", {"model_id": model, "seq_id": 6, "adam_params": {}})
        assert (refused.status_code, "limits.answer_bytes" in refused.text) == (429, True)
        service.bob.fetch(service.bob.optim_step(other, 2))
        for name in names:
            service.alice.fetch(name)
        service.alice.fetch(service.alice.optim_step(model, 6))
