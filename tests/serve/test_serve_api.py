"""The service's routes on a backend that records: order, tenants, limits, failures, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recording_backend import KEYS, Caller, Served, served, train_body

OPEN = {"/healthz", "/readyz", "/api/v1/healthz", "/metrics", "/"}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "storage") as server:
        yield server


def steps(here: Served) -> list[Any]:
    """Return the backend calls of steps."""
    return [call[:2] for call in here.backend.calls if call[0] in ("forward_backward", "optimizer_step", "discard")]


# --- order ---


def test_requests_run_in_the_clients_order_however_they_arrive(here) -> None:
    model = here.alice.model()
    third = here.alice.optim_step(model, 3)
    second = here.alice.forward_backward(model, 2, 20)
    assert steps(here) == []
    first = here.alice.forward_backward(model, 1, 10)
    answers = [here.alice.fetch(name) for name in (third, second, first)]
    assert steps(here) == [
        ("forward_backward", ("a1", [[10]])),
        ("forward_backward", ("a1", [[20]])),
        ("optimizer_step", "a1"),
    ]
    assert [answer["metrics"].get("loss:sum") for answer in answers] == [None, 20.0, 10.0]
    assert answers[2]["loss_fn_outputs"][0]["logprobs"] == {"data": [-10.0], "dtype": "float32", "shape": [1]}
    assert answers[2]["metrics"] == {"loss:sum": 10.0, "kl:mean": 0.5}  # what is not finite is left out


def test_a_request_that_is_sent_again_is_done_once(here) -> None:
    model = here.alice.model()
    names = [here.alice.forward_backward(model, 1, 10) for _ in range(3)]
    names += [here.alice.optim_step(model, 2) for _ in range(3)]
    for name in names:
        here.alice.fetch(name)
    assert len(set(names)) == 2
    assert [kind for kind, _ in steps(here)] == ["forward_backward", "optimizer_step"]
    session, body = model.partition(":")[0], {"model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    assert here.alice.ask("create_model", {"session_id": session, **body})["model_id"] == model
    assert len(here.backend.adapters) == 1
    other = here.alice.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    assert (other.status_code, "was a forward_backward" in other.text) == (400, True)


def test_missing_request_fails_only_its_step(here) -> None:
    model, other = here.alice.model(), here.bob.model()
    late = [here.alice.forward_backward(model, 2, 20), here.alice.optim_step(model, 3)]
    after = [here.alice.forward_backward(model, 4, 30), here.alice.optim_step(model, 5)]
    here.bob.fetch(here.bob.forward_backward(other, 1, 40))
    here.tick(121)
    for name in late:
        answer = here.alice.fetch(name)
        assert (answer["category"], "request 1 of this model did not arrive" in answer["error"]) == ("user", True)
    assert all("error" not in here.alice.fetch(name) for name in after)
    assert steps(here)[-2:] == [("forward_backward", ("a1", [[30]])), ("optimizer_step", "a1")]


def test_models_share_a_batch(here) -> None:
    first_model, second_model = here.alice.model(), here.bob.model()
    here.backend.gate.clear()
    first = here.alice.forward_backward(first_model, 1, 10)  # runs alone, and is held
    while here.service._inbox._commands:
        pass
    waiting = [here.alice.forward_backward(first_model, 2, 11), here.bob.forward_backward(second_model, 1, 21)]
    here.backend.gate.set()
    here.alice.fetch(first)
    assert here.alice.fetch(waiting[0])["metrics"]["loss:sum"] == 11
    assert here.bob.fetch(waiting[1])["metrics"]["loss:sum"] == 21
    assert here.backend.calls[-1][0] == "forward_backward"
    assert {name for name, _ in here.backend.calls[-1][1:]} == {"a1", "a2"}
    assert 'megascend_models_in_batch_bucket{le="1.0"} 1.0' in here.client.get("/metrics").text


# --- authentication ---


def test_only_health_and_metrics_are_open(here) -> None:
    routes = [(route.path, method) for route in here.client.app.routes for method in route.methods or ()]
    for path, method in routes:
        at = path.replace("{kind}", "weights").replace("{model}", "m").replace("{name}", "n").replace("{session}", "s")
        for key in (None, "tml-wrong-0123456789abcdef", "", "tml-alice-0123456789abcdeF"):
            answer = here.client.request(method, at, headers={} if key is None else {"X-API-Key": key})
            is_open = path in OPEN or (
                path == "/status" and key is None
            )  # which has no names then (test_serve_status.py)
            assert answer.status_code == (200 if is_open else 401) or path == "/readyz", (path, method, key)


def test_another_tenants_things_do_not_exist(here) -> None:
    model = here.alice.model()
    session = model.partition(":")[0]
    request = here.alice.forward_backward(model, 1, 10)
    path = here.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 2})["path"]
    before = list(here.backend.calls)
    bodies = {
        "session_heartbeat": {"session_id": session},
        "create_model": {"session_id": session, "model_seq_id": 7, "base_model": "tiny", "lora_config": {"rank": 4}},
        "unload_model": {"model_id": model},
        "get_info": {"model_id": model},
        "forward_backward": train_body(model, 3, 10),
        "optim_step": {"model_id": model, "seq_id": 3},
        "save_weights": {"model_id": model, "path": "two", "seq_id": 3},
        "save_weights_for_sampler": {"model_id": model, "path": "two", "seq_id": 3},
        "load_weights": {"session_id": here.bob.model().partition(":")[0], "model_seq_id": 1, "path": path, "optimizer": False},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0},
        "retrieve_future": {"request_id": request},
        "weights_info": {"tinker_path": path},
    }  # fmt: skip
    for where, body in bodies.items():
        assert here.bob.post(where, body).status_code in (404, 410), where
    run = f"training_runs/{model}"
    for method, where in (
        ("GET", run), ("DELETE", f"{run}/checkpoints/weights/one"), ("POST", f"{run}/checkpoints/weights/one/publish"),
        ("GET", f"{run}/checkpoints/weights/one/archive"), ("GET", f"sessions/{session}"), ("POST", f"sessions/{session}/finish"),
    ):  # fmt: skip
        assert here.bob.get(where, method).status_code in (404, 410), where
    assert here.bob.get(f"{run}/checkpoints").json() == {"checkpoints": []}
    assert here.bob.get("checkpoints").json()["checkpoints"] == []
    assert [call for call in here.backend.calls if call[0] != "add"] == [call for call in before if call[0] != "add"]


def test_a_published_checkpoint_is_everybodys_to_load_and_only_its_owners_to_delete(here) -> None:
    model = here.alice.model()
    path = here.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})["path"]
    where = f"training_runs/{model}/checkpoints/weights/one"
    assert here.alice.get(f"{where}/publish", "POST").status_code == 204
    session = here.bob.post("create_session", {}).json()["session_id"]
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    assert here.bob.ask("load_weights", load) == {
        "model_id": f"{session}:train:0",
        "type": "load_weights",
        "path": None,
    }
    assert here.backend.calls[-1] == ("load", "a2", True)
    assert here.bob.get(f"{where}/archive").content[:2] == b"\x1f\x8b"
    assert here.bob.get(where, "DELETE").status_code == 404
    assert here.alice.get(f"{where}/publish", "DELETE").status_code == 204
    assert here.bob.get(f"{where}/archive").status_code == 404
    assert here.alice.get(where, "DELETE").status_code == 204
    assert here.alice.get(f"training_runs/{model}/checkpoints").json() == {"checkpoints": []}


# --- what fails, and how ---


@pytest.mark.parametrize("name", ["../one", "a/b", "..", ".hidden", "a..b", "x" * 101, "a\x00b", "/etc/x", "a\n", ""])
def test_a_name_is_never_a_path(here, tmp_path, name) -> None:
    model = here.alice.model()
    answer = here.alice.ask("save_weights", {"model_id": model, "path": name, "seq_id": 1})
    assert answer["category"] == "user"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["audit.jsonl"]
    for path in (f"tinker://{model}/weights/{name}", f"tinker://../{model}/weights/a", f"file:///{name}", name):
        assert here.alice.post("weights_info", {"tinker_path": path}).status_code in (400, 404, 422)
    assert "error" not in here.alice.fetch(here.alice.forward_backward(model, 2, 10))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weights": [float("nan")]}, "must be finite"),
        ({"weights": [1.0, 2.0]}, "the same shape"),
        ({"advantages": [1.0]}, "'advantages' is unknown"),
        ({"loss": "ppo"}, "'logprobs' is missing"),
        ({"loss": "stable_reinforce"}, "needs the provenance"),
        ({"loss": "__import__"}, "not supported"),
    ],
)
def test_bad_data_fail_only_their_step(here, changes, why) -> None:
    model, other = here.alice.model(), here.bob.model()
    body = train_body(model, 2, 10, **changes)
    good = here.alice.forward_backward(model, 1, 10)
    bad = here.alice.post("forward_backward", content=json.dumps(body)).json()["request_id"]
    step = here.alice.optim_step(model, 3)
    requests = [here.bob.forward_backward(other, 1, 11), here.bob.optim_step(other, 2)]
    assert "error" not in here.alice.fetch(good)
    assert why in here.alice.fetch(bad)["error"]
    assert here.alice.fetch(step)["category"] == "user"
    assert all("error" not in here.bob.fetch(name) for name in requests)
    assert ("discard", "a1") in steps(here)
    assert ("optimizer_step", "a1") not in steps(here)
    assert "error" not in here.alice.fetch(here.alice.forward_backward(model, 4, 12))


def test_a_step_that_is_not_made_is_an_error(here) -> None:
    model = here.alice.model()
    here.alice.forward_backward(model, 1, 10)
    assert "not finite" in here.alice.fetch(here.alice.optim_step(model, 2, lr=13.0))["error"]
    here.alice.forward_backward(model, 3, 10)
    for number, lr in ((4, -1.0), (5, float("inf"))):
        content = f'{{"model_id": "{model}", "seq_id": {number}, "adam_params": {{"learning_rate": {lr}}}}}'
        name = here.alice.post("optim_step", content=content.replace("inf", "Infinity")).json()["request_id"]
        assert here.alice.fetch(name)["category"] == "user"
    assert steps(here)[-1] == ("discard", "a1")  # nothing is left for the step after it


def test_errors_of_creating_and_saving_have_their_category(here) -> None:
    session = here.alice.post("create_session", {}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 65}}
    assert here.alice.ask("create_model", body)["category"] == "user"
    assert here.service.tenancy.models == {}
    assert here.alice.post("create_model", {**body, "base_model": "/etc"}).status_code == 400
    model = here.alice.model()
    full = here.alice.ask("save_weights", {"model_id": model, "path": "disk-full", "seq_id": 1})
    assert full == {"error": "no space left", "category": "server"}
    saves = [{"model_id": model, "path": "one", "seq_id": number} for number in (2, 3)]
    assert here.alice.ask("save_weights", saves[0])["path"].endswith("/weights/one")
    assert "exists" in here.alice.ask("save_weights", saves[1])["error"]


def test_requests_over_the_limits_are_refused(tmp_path) -> None:
    limits = {"pending": 2, "tokens": 100, "models": 2, "samples": 3, "body_bytes": 4000}
    with served(tmp_path, limits=limits) as here:
        model, other, bobs = here.alice.model(), here.alice.model(), here.bob.model()
        here.backend.gate.clear()
        for number in (2, 3):
            here.alice.forward_backward(model, number, 10)
        refused = here.alice.post("forward_backward", train_body(model, 4, 10))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        here.alice.forward_backward(model, 1, 10)  # what others wait for is taken nevertheless
        assert here.alice.post("forward_backward", train_body(other, 1, *[1] * 98)).status_code == 429
        session = here.alice.post("create_session", {}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        assert here.alice.post("create_model", body).status_code == 429
        assert here.bob.post("forward_backward", train_body(bobs, 1, *[1] * 2000)).status_code == 413
        here.backend.gate.set()
        many = train_body(model, 5, 10)
        many["forward_backward_input"]["data"] *= 4
        assert here.alice.post("forward_backward", many).status_code == 413


def test_garbage_is_refused(here) -> None:
    model = here.alice.model()
    for content in (b"[" * 100_000, b"{", b"[]", b"\xff\xfe", b'{"model_id": 5}', b'{"seq_id": 1e999}'):
        for path in ("forward_backward", "optim_step", "create_model", "retrieve_future", "save_weights"):
            answer = here.alice.post(path, content=content)
            assert answer.status_code in (400, 404, 410, 422), (path, content[:10], answer.status_code)
    for number in (0, -1, 2**70, "1", True, 1.5):
        assert here.alice.post("optim_step", {"model_id": model, "seq_id": number}).status_code == 422
    assert steps(here) == []


# --- as time passes ---


def test_complete_saves_survive_a_restart_and_partial_ones_do_not(tmp_path) -> None:
    with served(tmp_path / "storage") as here:
        model = here.alice.model()
        path = here.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})["path"]
    half = next((tmp_path / "storage" / "alice").glob("*/weights")) / "half"  # the server was killed before its record
    half.mkdir()
    (half / "adapter_model.safetensors").write_bytes(b"123")
    with served(tmp_path / "storage") as here:
        assert here.alice.post("get_info", {"model_id": model}).status_code == 404
        assert [checkpoint["tinker_path"] for checkpoint in here.alice.get("checkpoints").json()["checkpoints"]] == [
            path
        ]
        session = here.alice.post("create_session", {}).json()["session_id"]
        load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        assert here.alice.ask("load_weights", load)["type"] == "load_weights"
        assert here.bob.get("checkpoints").json()["checkpoints"] == []


def test_checkpoints_expire(tmp_path) -> None:
    with served(tmp_path) as here:
        model = here.alice.model()
        save = {"model_id": model, "path": "short", "seq_id": 1, "ttl_seconds": 0}
        path = here.alice.ask("save_weights", save)["path"]
        assert here.alice.post("weights_info", {"tinker_path": path}).status_code == 404
        here.tick(601)
        assert list(tmp_path.glob("alice/*/weights/*")) == []


def test_requests_are_noted_but_not_their_keys(tmp_path) -> None:
    with served(tmp_path) as here:
        here.alice.model()
        here.client.post("/api/v1/create_session", json={})
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(entry["tenant"], entry["path"].rsplit("/", 1)[-1], entry["status"]) for entry in lines] == [
        ("alice", "create_session", 200),
        ("alice", "create_model", 200),
    ]
    assert not any(key in (tmp_path / "audit.jsonl").read_text() for key in KEYS.values())


def test_a_silent_session_ends_and_its_models_go(here) -> None:
    model, other = here.alice.model(), here.bob.model()
    here.tick(200)
    assert here.bob.post("session_heartbeat", {"session_id": other.partition(":")[0]}).status_code == 200
    here.tick(200)
    assert here.alice.post("session_heartbeat", {"session_id": model.partition(":")[0]}).status_code == 410
    assert here.alice.post("get_info", {"model_id": model}).status_code == 404
    assert here.bob.post("get_info", {"model_id": other}).json()["lora_rank"] == 4
    here.bob.fetch(here.bob.forward_backward(other, 1, 10))
    assert list(here.backend.adapters) == ["a2"]


def test_answers_are_forgotten_some_time_after_they_were_fetched(here) -> None:
    model = here.alice.model()
    name = here.alice.forward_backward(model, 1, 10)
    assert here.alice.fetch(name) == here.alice.fetch(name)
    here.tick(121)
    assert here.alice.post("retrieve_future", {"request_id": name}).status_code == 410
    assert "no longer kept" in here.alice.post("forward_backward", train_body(model, 1, 10)).text


def test_unloading_a_model_fails_its_waiting_requests(here) -> None:
    model = here.alice.model()
    early = [here.alice.forward_backward(model, 2, 10), here.alice.optim_step(model, 4)]
    assert here.alice.ask("unload_model", {"model_id": model}) == {"model_id": model, "type": "unload_model"}
    assert [here.alice.fetch(name)["category"] for name in early] == ["user", "user"]
    assert (here.backend.adapters, here.alice.post("get_info", {"model_id": model}).status_code) == ({}, 404)


def test_the_key_of_a_caller_is_not_in_any_answer(here) -> None:
    caller = Caller(here.client, KEYS["alice"])
    texts = [caller.post("create_session", {}).text, here.client.get("/metrics").text, caller.get("sessions").text]
    assert not any(key in text for text in texts for key in KEYS.values())
