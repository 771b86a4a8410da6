"""Recovery of a server from the storage of a killed one: a copy of its files at any moment."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recording_backend import Served, served

from megascend.apps.sampling.request import SampledSequence, SampleResult
from megascend.apps.serve import operations
from megascend.apps.serve.api.keys import Keys
from megascend.apps.serve.api.wire import Datum, ProvenanceSpan, TrainRequest
from megascend.apps.serve.scheduler.inbox import Inbox
from megascend.apps.serve.served_model import ServedModel
from megascend.apps.serve.server import http_server, keys_of
from megascend.apps.serve.store import durability, recovery
from megascend.apps.serve.store.database import StoredRow
from megascend.apps.serve.store.recovery import NAME
from megascend.config.serve import ServeConfig
from megascend.errors import CheckpointError, ConfigError, DataError
from support.waiting import wait_until


@pytest.fixture
def disks(tmp_path: Path) -> Callable[[Path | None], AbstractContextManager[Served]]:
    """Return a function that starts a server on a copy of another one's files, or on none."""
    count = iter(range(100))

    def start(killed: Path | None = None, **settings: Any) -> AbstractContextManager[Served]:
        storage = tmp_path / str(next(count))
        if killed is None:
            storage.mkdir()
        else:
            shutil.copytree(killed, storage)
        return served(storage, durable=True, **settings)

    return start


def storage_of(server: Served) -> Path:
    return server.service.settings.storage


def steps_of(server: Served) -> list[float]:
    """Return the learning rates of the steps that the ranks executed, in order."""
    return [call[-1][call[1]].lr for call in server.backend.calls if call[0] == "optimizer_step"]


def train(server: Served, model: str, first: int, count: int) -> list[Any]:
    """Send gradients and steps number ``first``, ``first + 1``, ...; return their answers."""
    answers = []
    for number in range(first, first + 2 * count, 2):
        names = [
            server.alice.forward_backward(model, number, number % 7),
            server.alice.optim_step(model, number + 1, number * 1.0),
        ]
        answers += [server.alice.fetch(name) for name in names]
    return answers


def test_restart_executes_accepted_requests_and_repeats_answers(disks) -> None:
    with disks(durable_steps=100) as first:
        model = first.alice.model()
        answers = train(first, model, 1, 2)
        first.backend.gate.clear()  # from now on nothing is done, as if the server had been killed then
        names = [first.alice.forward_backward(model, 5, 3), first.alice.optim_step(model, 6, 5.0)]
        early = first.alice.optim_step(model, 8, 7.0)
        with disks(storage_of(first), durable_steps=100) as second:
            session = model.partition(":")[0]
            assert second.alice.post("session_heartbeat", {"session_id": session}).status_code == 200
            assert second.bob.post("session_heartbeat", {"session_id": session}).status_code == 410
            repeated = [second.alice.fetch(f"{model}:request:{number}") for number in range(1, 5)]
            assert repeated == answers
            assert [second.alice.fetch(name)["metrics"]["loss:sum"] for name in names[:1]] == [3.0]
            assert second.alice.fetch(names[1])["metrics"]["learning_rate"] == 5.0
            assert second.alice.forward_backward(model, 5, 3) == names[0]  # sent again by a client that got no answer
            assert second.alice.forward_backward(model, 7, 3) == f"{model}:request:7"
            assert second.alice.fetch(early)["metrics"]["learning_rate"] == 7.0
            assert steps_of(second) == [1.0, 3.0, 5.0, 7.0]
            assert second.service.durability.recovered


def test_save_bounds_the_replayed_steps(disks) -> None:
    with disks(durable_steps=3) as first:
        model = first.alice.model()
        answers = train(first, model, 1, 4)
        wait_for_saves(first, 1)
        with disks(storage_of(first), durable_steps=3) as second:
            repeated = [second.alice.fetch(f"{model}:request:{number}") for number in range(1, 9)]
            assert repeated == answers
            assert steps_of(second) == [7.0]
            (load,) = [call for call in second.backend.calls if call[0] == "load"]
            assert load[2] is True
            train(second, model, 9, 2)
            wait_until(lambda: ("save", load[1], True) in second.backend.calls)
            wait_for_saves(second, 1)
            with disks(storage_of(second), durable_steps=3) as third:
                third.alice.fetch(f"{model}:request:12")
                assert steps_of(third) == []
                assert third.service.tenancy.models[model].steps == 6


def wait_for_saves(server: Served, count: int) -> None:
    """Wait until there are so many and the database has them, which is a moment later."""
    saves, durability = storage_of(server) / NAME / "saves", server.service.durability

    def there() -> bool:
        return len(list(saves.glob("s-*"))) == count and not any(
            progress.saving for progress in durability._models.values()
        )

    wait_until(there)
    server.client.portal.call(durability.durable)


@pytest.mark.parametrize("ahead_s", [0, 3600])
def test_cursor_of_an_earlier_server_acknowledges_nothing(disks, monkeypatch, ahead_s: float) -> None:
    def sample(server: Served, number: int) -> str:
        body = {"sampling_session_id": sampler, "seq_id": number, "prompt": {"chunks": [{"tokens": [5]}]}}
        name = server.alice.post("asample", {**body, "sampling_params": {"max_tokens": 1}}).json()["request_id"]
        server.alice.fetch(name)
        return name

    def poll(server: Served, cursor: int) -> tuple[list[str], int]:
        body = {"target": {"sampling_session_id": sampler}, "prev_cursor": cursor, "timeout": 0}
        answer = server.alice.post("retrieve_futures", body).json()
        return [entry["request_id"] for entry in answer["completions"]], answer["cursor"]

    now = time.time_ns
    with monkeypatch.context() as earlier:
        earlier.setattr(time, "time_ns", lambda: now() + int(ahead_s * 1e9))
        with disks() as first:
            session = first.alice.post("create_session", {}).json()["session_id"]
            body = {"session_id": session, "sampling_session_seq_id": 0}
            sampler = first.alice.post("create_sampling_session", body).json()["sampling_session_id"]
            names = [sample(first, number) for number in (1, 2, 3)]
            observed, cursor = poll(first, 0)
            assert observed == names
            storage = storage_of(first)
    with disks(storage) as second:
        name = sample(second, 4)
        assert poll(second, cursor)[0] == [name]
        assert poll(second, poll(second, cursor)[1])[0] == []


def test_replay_repeats_no_client_save_and_loads_the_same_state(disks) -> None:
    with disks() as first:
        model = first.alice.model()
        train(first, model, 1, 1)
        body = {"model_id": model, "seq_id": 3, "path": "kept"}
        path = first.alice.ask("save_weights", body)["path"]
        refused = first.alice.ask("save_weights", {**body, "seq_id": 4})
        loaded = {"session_id": model.partition(":")[0], "model_seq_id": 1, "path": path, "optimizer": True}
        other = first.alice.ask("load_weights", loaded)["model_id"]
        first.alice.ask("load_weights", {"model_id": model, "seq_id": 5, "path": path})
        missing = first.alice.ask("load_weights", {"model_id": model, "seq_id": 6, "path": path + "2"})
        sampling = {"model_id": model, "seq_id": 7, "sampling_session_seq_id": 0}
        sampler = first.alice.ask("save_weights_for_sampler", sampling)["sampling_session_id"]
        assert first.alice.get(f"training_runs/{model}/checkpoints/weights/kept", "DELETE").status_code == 204
        with disks(storage_of(first)) as second:
            answers = [second.alice.fetch(f"{model}:request:{number}") for number in (3, 4, 6)]
            assert answers == [{"type": "save_weights", "path": path}, refused, missing]
            assert second.alice.post("get_info", {"model_id": other}).json()["lora_rank"] == 4
            (left,) = second.alice.get("checkpoints").json()["checkpoints"]
            assert second.alice.get(f"samplers/{sampler}").json()["model_path"] == left["tinker_path"]
            assert [call[0] for call in second.backend.calls] == ["load", "load"]
            assert steps_of(second) == []


def test_a_request_that_failed_fails_again_though_its_reason_is_gone(disks, monkeypatch) -> None:
    with disks() as first:
        model = first.alice.model()

        def full(*args: Any, **options: Any) -> Any:
            raise ConfigError("memory is full")

        first.backend.forward_backward = full
        names = [first.alice.forward_backward(model, 1, 3), first.alice.optim_step(model, 2, 1.0)]
        failures = [first.alice.fetch(name) for name in names]
        assert "memory is full" in failures[0]["error"]
        with disks(storage_of(first)) as second:
            assert [second.alice.fetch(name) for name in names] == failures
            train(second, model, 3, 1)
            assert steps_of(second) == [3.0]


def test_recorded_responses_survive_a_restart(disks) -> None:
    result = SampleResult([SampledSequence([7, 8], [-1.0, -2.0], "stop"), SampledSequence([9], [-3.0], "stop")])
    spans = [ProvenanceSpan("one", 0, 1, False), ProvenanceSpan("one", 0, 1, True)], [ProvenanceSpan("one", 0, 2, True)]
    inputs = {"target_tokens": np.array([7, 8]), "advantages": np.ones(2, np.float32)}
    datum = Datum(np.array([5, 7]), inputs, *spans)
    with disks() as first:
        model = first.alice.model()
        session = first.service.tenancy.sessions[model.partition(":")[0]]
        on_the_loop = first.client.portal.call
        on_the_loop(first.service.sequences.record, session, np.array([5]), ["one", "two"], result)
        request = TrainRequest(model, 1, "stable_reinforce", {}, False, [datum])
        name = on_the_loop(operations.train, first.service, "alice", request).name
        answer = first.alice.fetch(name)
        on_the_loop(first.service.sequences._drop, "alice", "one")
        on_the_loop(first.service.durability.durable)
        with disks(storage_of(first)) as second:
            assert second.alice.fetch(name) == answer
            assert second.service.sequences.find("alice", session.name, "two").logprobs.tolist() == [-3.0]
            assert second.service.sequences.find("alice", session.name, "two").prompt.tolist() == [5]
            with pytest.raises(DataError):
                second.service.sequences.find("alice", session.name, "one")


@pytest.fixture
def largest_file() -> Iterator[Callable[[int | None], None]]:
    """Return a function that limits the file size of this process, as a full disk would; None: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))

    yield limit
    limit(None)


def test_requests_are_refused_while_the_disk_is_full(disks, monkeypatch, largest_file) -> None:
    monkeypatch.setattr(durability, "RETRY_S", 0.02)
    with disks() as first:
        model = first.alice.model()
        first.service.durability._writer._wait_s = 0.1
        largest_file((storage_of(first) / NAME / "state.sqlite-wal").stat().st_size)
        body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 1.0}}
        for _ in range(2):  # the second one is not even begun
            refused = first.alice.post("optim_step", body)
            assert refused.status_code == 503
            wait_until(lambda: first.service.durability.stalled)  # on a busy machine the disk has not been tried yet
            first.service.ready = True
            assert first.client.get("/readyz").status_code == 503
            assert first.client.get("/healthz").status_code == 200
        assert "the server's state cannot be written: disk I/O error" in refused.json()["detail"]
        waiting = first.alice.post("retrieve_future", {"request_id": f"{model}:request:1"})
        assert waiting.status_code == 503
        first.tick(1000)  # longer than a session may be silent
        with disks(storage_of(first)) as server:
            assert f"{model}:request:1" not in server.service.futures._by_name
        largest_file(None)
        first.service.durability._writer._wait_s = 60.0
        wait_until(lambda: not first.service.durability.stalled)
        assert first.client.get("/readyz").status_code == 200
        name = first.alice.post("optim_step", body).json()["request_id"]
        assert first.alice.fetch(name)["metrics"]["learning_rate"] == 1.0
        assert len(steps_of(first)) == 1
        with disks(storage_of(first)) as second:
            second.alice.fetch(name)
            assert steps_of(second) == [1.0]


def test_requests_are_refused_after_an_internal_error_of_the_writer(disks) -> None:
    with disks() as first:
        model = first.alice.model()
        first.service.durability._writer.enqueue(StoredRow("session", "s", {"tenant": object()}))
        wait_until(lambda: first.service.durability.stalled)
        first.service.durability._writer._wait_s = 0.1
        refused = first.alice.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
        assert refused.status_code == 503
        assert "internal error (TypeError)" in refused.json()["detail"]


def test_state_that_cannot_be_resumed_raises_config_error(disks, monkeypatch) -> None:
    monkeypatch.setattr(recovery, "LOCK_S", 0.0)
    with disks(durable_steps=1) as first:
        refused = first.alice.post("optim_step", {"model_id": first.alice.model(), "adam_params": {}})
        assert refused.status_code == 422
        assert "seq_id" in refused.json()["detail"]
        with pytest.raises(ConfigError, match="another server uses"), served(storage_of(first), durable=True):
            pass
        with (
            pytest.raises(ConfigError, match="precision 'bf16' then, 'fp32' now"),
            disks(storage_of(first), precision="fp32"),
        ):
            pass
        train(first, first.alice.model(), 1, 1)
        wait_for_saves(first, 1)
        (save,) = (storage_of(first) / NAME / "saves").glob("s-*")
        copy = storage_of(first).with_name("copy")
        shutil.copytree(storage_of(first), copy)
        shutil.rmtree(copy / NAME / "saves" / save.name)
        with pytest.raises(CheckpointError, match=f"{save.name} is missing"), served(copy, durable=True):
            pass


def test_second_server_on_a_storage_is_refused(disks, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(recovery, "LOCK_S", 0.0)

    def server(storage: Path) -> Any:
        settings = ServeConfig(model=tmp_path, storage=storage, port=0)
        base = ServedModel(("tiny",), tmp_path, "Tiny", 512, 100, ())
        return http_server(settings, {"0" * 64: "alice"}, base, Inbox(0, 1))

    with disks() as first, pytest.raises(ConfigError, match="another server uses"), server(storage_of(first)):
        pass
    with server(storage_of(first)):
        for second in (served(storage_of(first), durable=True), server(storage_of(first))):
            with pytest.raises(ConfigError, match="another server uses"), second:
                pass


def test_the_state_of_an_earlier_version_is_refused(tmp_path) -> None:
    (tmp_path / ".journal").mkdir()
    with pytest.raises(ConfigError, match="journal was written by an earlier version of megascend"):
        served(tmp_path, durable=True).__enter__()


def test_a_key_that_was_made_is_let_in_again_and_is_nowhere(tmp_path) -> None:
    settings = ServeConfig(model=tmp_path, storage=tmp_path / "storage", durable=True)
    tenants, key = keys_of(settings, {})
    assert key is not None
    repeated, none = keys_of(settings, {})
    assert none is None
    assert repeated == tenants
    assert Keys(repeated).tenant(key.encode()) == "local"
    (file,) = (tmp_path / "storage").iterdir()
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
