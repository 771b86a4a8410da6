"""The service's routes on a backend that records: order, tenants, limits, failures, checkpoints."""

from __future__ import annotations

import json
import shutil
import time
from typing import Any

import pytest
from recording_backend import KEYS, Caller, Served, served, train_body

from megascend.apps.serve.api import application
from megascend.apps.serve.checkpoints import run_directory
from megascend.apps.serve.service import MAX_AHEAD
from support.waiting import wait_until

OPEN = {"/healthz", "/readyz", "/api/v1/healthz", "/metrics", "/"}


def steps(system: Served) -> list[Any]:
    """Return the backend calls of steps."""
    return [call[:2] for call in system.backend.calls if call[0] in ("forward_backward", "optimizer_step", "discard")]


# --- order ---


def test_requests_run_in_the_clients_order_however_they_arrive(system) -> None:
    model = system.alice.model()
    third = system.alice.optim_step(model, 3)
    second = system.alice.forward_backward(model, 2, 20)
    assert steps(system) == []
    first = system.alice.forward_backward(model, 1, 10)
    answers = [system.alice.fetch(name) for name in (third, second, first)]
    assert steps(system) == [
        ("forward_backward", ("a1", [[10]])),
        ("forward_backward", ("a1", [[20]])),
        ("optimizer_step", "a1"),
    ]
    assert [answer["metrics"].get("loss:sum") for answer in answers] == [None, 20.0, 10.0]
    assert answers[2]["loss_fn_outputs"][0]["logprobs"] == {"data": [-10.0], "dtype": "float32", "shape": [1]}
    assert answers[2]["metrics"] == {"loss:sum": 10.0, "kl:mean": 0.5}  # what is not finite is left out


def test_a_request_that_is_sent_again_is_done_once(system) -> None:
    model = system.alice.model()
    names = [system.alice.forward_backward(model, 1, 10) for _ in range(3)]
    names += [system.alice.optim_step(model, 2) for _ in range(3)]
    for name in names:
        system.alice.fetch(name)
    assert len(set(names)) == 2
    assert [kind for kind, _ in steps(system)] == ["forward_backward", "optimizer_step"]
    session, body = model.partition(":")[0], {"model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    assert system.alice.ask("create_model", {"session_id": session, **body})["model_id"] == model
    assert len(system.backend.adapters) == 1
    other = system.alice.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    assert (other.status_code, "was a forward_backward" in other.text) == (400, True)


def test_another_programs_request_under_a_used_number_is_refused(system) -> None:
    """Two programs that share a model number their requests from 1: the second one gets no answer, not the first one's."""
    model = system.alice.model()
    session = model.partition(":")[0]
    create = {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 8}}
    save = {"model_id": model, "path": "one", "seq_id": 3}
    path = system.alice.ask("save_weights_for_sampler", {"model_id": model, "path": "s", "seq_id": 1})["path"]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    name = system.alice.post("create_sampling_session", sampler).json()["sampling_session_id"]
    sample = {"sampling_session_id": name, "seq_id": 0, "num_samples": 1, "sampling_params": {"max_tokens": 2}}
    prompts = [{"chunks": [{"type": "encoded_text", "tokens": [token]}]} for token in (5, 6)]
    pairs = [
        ("create_model", create, create | {"lora_config": {"rank": 4}}),
        ("forward_backward", train_body(model, 2, 10), train_body(model, 2, 11)),
        ("save_weights", save, save | {"path": "two"}),
        ("optim_step", *({"model_id": model, "seq_id": 4, "adam_params": {"learning_rate": lr}} for lr in (0.1, 0.2))),
        ("forward_backward", train_body(model, 5, 1000), train_body(model, 5, 10)),  # the first one fails
        ("asample", *(sample | {"prompt": prompt} for prompt in prompts)),
    ]
    for route, first, _ in pairs:
        system.alice.ask(route, first)
    before = list(system.backend.calls)
    for route, _, second in pairs:
        refused = system.alice.post(route, second)
        assert (refused.status_code, "earlier request with another content" in refused.text) == (400, True), route
    other = system.alice.post("create_sampling_session", {**sampler, "model_path": None})
    assert (other.status_code, f"samples from {path}, not from the base model" in other.text) == (400, True)
    assert system.alice.post("create_sampling_session", sampler).status_code == 200
    assert system.backend.calls == before


def test_missing_request_fails_only_its_step(system) -> None:
    model, other = system.alice.model(), system.bob.model()
    late = [system.alice.forward_backward(model, 2, 20), system.alice.optim_step(model, 3)]
    after = [system.alice.forward_backward(model, 4, 30), system.alice.optim_step(model, 5)]
    system.bob.fetch(system.bob.forward_backward(other, 1, 40))
    system.tick(121)
    for name in late:
        answer = system.alice.fetch(name)
        assert (answer["category"], "request 1 of this model did not arrive" in answer["error"]) == ("user", True)
    assert all("error" not in system.alice.fetch(name) for name in after)
    assert steps(system)[-2:] == [("forward_backward", ("a1", [[30]])), ("optimizer_step", "a1")]


def test_request_far_ahead_of_its_models_order_is_refused(system) -> None:
    model = system.alice.model()
    for number in (1 + MAX_AHEAD + 1, 2**61):
        refused = system.alice.post("forward_backward", train_body(model, number, 10))
        assert (refused.status_code, "ahead of 1" in refused.text) == (422, True)
    last = system.alice.forward_backward(model, 1 + MAX_AHEAD, 10)
    system.tick(121)
    system.alice.post("session_heartbeat", {"session_id": model.partition(":")[0]})
    assert "did not arrive" in system.alice.fetch(last)["error"]


# --- authentication ---


def test_only_health_and_metrics_are_open(system) -> None:
    routes = [(route.path, method) for route in system.client.app.routes for method in route.methods or ()]
    for path, method in routes:
        target = (
            path.replace("{kind}", "weights").replace("{model}", "m").replace("{name}", "n").replace("{session}", "s")
        )
        for key in (None, "tml-wrong-0123456789abcdef", "", "tml-alice-0123456789abcdeF"):
            answer = system.client.request(method, target, headers={} if key is None else {"X-API-Key": key})
            is_open = path in OPEN or (
                path == "/status" and key is None
            )  # which has no names then (test_serve_status.py)
            assert answer.status_code == (200 if is_open else 401) or path == "/readyz", (path, method, key)


@pytest.mark.parametrize("content_type", ["application/json", "application/x-protobuf"])
def test_request_of_an_unknown_model_is_refused_before_it_is_read(
    system, monkeypatch: pytest.MonkeyPatch, content_type: str
) -> None:
    """Samples and images of megabytes must cost nothing where the model is another tenant's."""
    from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

    def read(*arguments: object) -> None:
        raise AssertionError("the request was read")

    monkeypatch.setattr("megascend.apps.serve.api.wire._with_data", read)
    monkeypatch.setattr("megascend.apps.serve.samplers.adapters.prompt_of", read)
    model = system.alice.model()
    session = model.partition(":")[0]
    content = json.dumps(train_body(model, 1, 10)).encode()
    if content_type != "application/json":
        content = ForwardBackwardRequest(model_id=model, seq_id=1).SerializeToString()
    headers = {**system.bob.headers, "content-type": content_type}
    refused = system.client.post("/api/v1/forward_backward", content=content, headers=headers)
    assert (refused.status_code, "unknown or removed model" in refused.text) == (404, True)
    sample = {"sampling_session_id": f"{session}:sample:0", "seq_id": 0, "num_samples": 1, "sampling_params": {}}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    assert system.bob.post("asample", {**sample, "prompt": prompt}).status_code == 410
    assert system.alice.post("asample", {**sample, "prompt": prompt}).status_code == 404  # no such sampler


def test_a_published_checkpoint_is_everybodys_to_load_and_only_its_owners_to_delete(system) -> None:
    model = system.alice.model()
    path = system.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})["path"]
    route = f"training_runs/{model}/checkpoints/weights/one"
    assert system.alice.get(f"{route}/publish", "POST").status_code == 204
    session = system.bob.post("create_session", {}).json()["session_id"]
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    assert system.bob.ask("load_weights", load) == {
        "model_id": f"{session}:train:0",
        "type": "load_weights",
        "path": None,
    }
    assert system.backend.calls[-1] == ("load", "a2", True)
    assert system.bob.get(f"{route}/archive").content[:2] == b"\x1f\x8b"
    assert system.bob.get(route, "DELETE").status_code == 404
    assert system.alice.get(f"{route}/publish", "DELETE").status_code == 204
    assert system.bob.get(f"{route}/archive").status_code == 404
    assert system.alice.get(route, "DELETE").status_code == 204
    assert system.alice.get(f"training_runs/{model}/checkpoints").json() == {"checkpoints": []}


@pytest.mark.parametrize(
    "name", ["../one", "a/b", "..", ".hidden", "a..b", "x" * 101, "a\x00b", "/etc/x", "a\n", "", "one.json"]
)
def test_a_name_is_never_a_path(system, tmp_path, name) -> None:
    model = system.alice.model()
    answer = system.alice.ask("save_weights", {"model_id": model, "path": name, "seq_id": 1})
    assert answer["category"] == "user"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["audit.jsonl"]
    for path in (f"tinker://{model}/weights/{name}", f"tinker://../{model}/weights/a", f"file:///{name}", name):
        assert system.alice.post("weights_info", {"tinker_path": path}).status_code in (400, 404, 422)
    assert "error" not in system.alice.fetch(system.alice.forward_backward(model, 2, 10))


# --- what fails, and how ---


def test_record_that_cannot_be_written_fails_its_save(system) -> None:
    model = system.alice.model()
    record = run_directory(system.service.checkpoints.root, "alice", model) / "weights" / "one.json"
    record.mkdir(parents=True)  # in its way
    answer = system.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})
    assert (answer["category"], "cannot be written: Is a directory" in answer["error"]) == ("server", True)


def test_bad_data_fail_only_their_step(system) -> None:
    model, other = system.alice.model(), system.bob.model()
    body = train_body(model, 2, 10, weights=[1.0, 2.0])
    good = system.alice.forward_backward(model, 1, 10)
    bad = system.alice.post("forward_backward", content=json.dumps(body)).json()["request_id"]
    step = system.alice.optim_step(model, 3)
    requests = [system.bob.forward_backward(other, 1, 11), system.bob.optim_step(other, 2)]
    assert "error" not in system.alice.fetch(good)
    assert "the same shape" in system.alice.fetch(bad)["error"]
    assert system.alice.fetch(step)["category"] == "user"
    assert all("error" not in system.bob.fetch(name) for name in requests)
    assert ("discard", "a1") in steps(system)
    assert ("optimizer_step", "a1") not in steps(system)
    assert "error" not in system.alice.fetch(system.alice.forward_backward(model, 4, 12))


def test_a_step_that_is_not_made_is_an_error(system) -> None:
    model = system.alice.model()
    system.alice.forward_backward(model, 1, 10)
    assert "not finite" in system.alice.fetch(system.alice.optim_step(model, 2, lr=13.0))["error"]
    system.alice.forward_backward(model, 3, 10)
    for number, lr in ((4, -1.0), (5, float("inf"))):
        content = f'{{"model_id": "{model}", "seq_id": {number}, "adam_params": {{"learning_rate": {lr}}}}}'
        name = system.alice.post("optim_step", content=content.replace("inf", "Infinity")).json()["request_id"]
        assert system.alice.fetch(name)["category"] == "user"
    assert steps(system)[-1] == ("discard", "a1")  # nothing is left for the step after it


def test_errors_of_creating_and_saving_have_their_category(system) -> None:
    session = system.alice.post("create_session", {}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 65}}
    assert system.alice.ask("create_model", body)["category"] == "user"
    assert system.service.tenancy.models == {}
    assert system.alice.post("create_model", {**body, "base_model": "/etc"}).status_code == 400
    model = system.alice.model()
    full = system.alice.ask("save_weights", {"model_id": model, "path": "disk-full", "seq_id": 1})
    assert full == {"error": "no space left", "category": "server"}
    saves = [{"model_id": model, "path": "one", "seq_id": number} for number in (2, 3)]
    assert system.alice.ask("save_weights", saves[0])["path"].endswith("/weights/one")
    assert "exists" in system.alice.ask("save_weights", saves[1])["error"]


def test_requests_over_the_limits_are_refused(tmp_path) -> None:
    limits = {"pending": 2, "tokens": 100, "models": 2, "samples": 3, "body_bytes": 4000}
    with served(tmp_path, limits=limits) as service:
        model, other, bobs = service.alice.model(), service.alice.model(), service.bob.model()
        service.backend.gate.clear()
        for number in (2, 3):
            service.alice.forward_backward(model, number, 10)
        refused = service.alice.post("forward_backward", train_body(model, 4, 10))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        service.alice.forward_backward(model, 1, 10)  # what others wait for is taken nevertheless
        assert service.alice.post("forward_backward", train_body(other, 1, *[1] * 98)).status_code == 429
        session = service.alice.post("create_session", {}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        assert service.alice.post("create_model", body).status_code == 429
        assert service.bob.post("forward_backward", train_body(bobs, 1, *[1] * 2000)).status_code == 413
        service.backend.gate.set()
        many = train_body(model, 5, 10)
        many["forward_backward_input"]["data"] *= 4
        assert service.alice.post("forward_backward", many).status_code == 413


def test_saves_in_progress_keep_to_the_quota(tmp_path) -> None:
    with served(tmp_path / "storage", limits={"storage_bytes": 12}) as service:
        model, checkpoints = service.alice.model(), service.service.checkpoints
        requests = [{"model_id": model, "path": f"p{number}", "seq_id": number} for number in range(1, 6)]
        late = list(reversed(requests))  # the first arrives last, and releases the others: all are in progress at once
        names = [service.alice.post("save_weights", body).json()["request_id"] for body in late][::-1]
        answers = [service.alice.fetch(name) for name in names]  # 5 bytes each
        assert ["12 are allowed" in answer.get("error", "") for answer in answers] == [False, False, True, True, True]
        assert {answer["category"] for answer in answers[2:]} == {"user"}
        assert checkpoints.total_bytes("alice") == 10
        assert len(list((tmp_path / "storage").rglob("*.safetensors"))) == 2
        again = {"model_id": model, "path": "p1", "seq_id": 6, "overwrite": True}
        assert "error" not in service.alice.ask("save_weights", again), (
            "a replacement takes the place of its predecessor"
        )
        service.alice.get(f"training_runs/{model}/checkpoints/weights/p1", "DELETE")
        assert "error" not in service.alice.ask("save_weights", {"model_id": model, "path": "p7", "seq_id": 7})
        assert "error" not in service.bob.ask(
            "save_weights", {"model_id": service.bob.model(), "path": "p", "seq_id": 1}
        )
    with served(tmp_path / "storage", limits={"storage_bytes": 12}) as service:
        assert service.service.checkpoints.total_bytes("alice") == 10


def test_saves_in_progress_reserve_what_an_earlier_one_took(tmp_path) -> None:
    with served(tmp_path / "storage", limits={"storage_bytes": 12}) as service:
        model = service.alice.model()
        service.alice.ask("save_weights", {"model_id": model, "path": "first", "seq_id": 1})
        late = [{"model_id": model, "path": f"p{number}", "seq_id": number} for number in (4, 3, 2)]
        names = [service.alice.post("save_weights", body).json()["request_id"] for body in late][::-1]
        answers = [service.alice.fetch(name) for name in names]
        assert ["12 are allowed" in answer.get("error", "") for answer in answers] == [False, True, True]
        assert [call[0] for call in service.backend.calls].count("save") == 2, "nothing is written beyond the quota"
        service.alice.get(f"training_runs/{model}/checkpoints/weights/p2", "DELETE")
        assert "error" not in service.alice.ask("save_weights", {"model_id": model, "path": "p5", "seq_id": 5})


def test_server_whose_storage_is_gone_is_not_ready(tmp_path) -> None:
    with served(tmp_path / "storage", durable=True) as service:
        model = service.alice.model()
        service.service.ready = True
        assert service.client.get("/readyz").status_code == 200
        shutil.rmtree(tmp_path / "storage")
        assert service.client.get("/readyz").status_code == 503
        # SQLite goes on to write into its removed file.
        step = {"model_id": model, "seq_id": 1, "adam_params": {}}
        durability: Any = service.service.durability
        durability._writer._wait_s = 0.1
        assert service.alice.post("optim_step", step).status_code == 503


def test_deep_and_ambiguous_json_is_refused(system) -> None:
    """What is parsed in a shallow thread must be encoded on the event loop, and parsed again after a restart."""
    model = system.alice.model()
    start = f'{{"model_id": "{model}", "seq_id": 1, "adam_params": {{"learning_rate": 0.1'
    for content, reason in (
        (f'{start}}}, "x": {"[" * 100}{"]" * 100}}}', "more than 64 deep"),
        (f'{start}, "learning_rate": 0.2}}}}', "'learning_rate' twice"),
        (f'{start}}}, "x": [{"null," * 2**18}0]}}', "texts and constants"),
    ):
        answer = system.alice.post(
            "optim_step" if len(content) < 2**20 else "forward_backward", content=content.encode()
        )
        assert (answer.status_code in (400, 413), reason in answer.text) == (True, True), answer.text[:200]
    assert system.alice.post("optim_step", content=f"{start}}}}}".encode()).status_code == 200


# --- as time passes ---


def test_complete_saves_survive_a_restart_and_partial_ones_do_not(tmp_path) -> None:
    with served(tmp_path / "storage") as service:
        model = service.alice.model()
        path = service.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})["path"]
    half = next((tmp_path / "storage" / "alice").glob("*/weights")) / "half"  # the server was killed before its record
    half.mkdir()
    (half / "adapter_model.safetensors").write_bytes(b"123")
    with served(tmp_path / "storage") as service:
        assert service.alice.post("get_info", {"model_id": model}).status_code == 404
        assert [checkpoint["tinker_path"] for checkpoint in service.alice.get("checkpoints").json()["checkpoints"]] == [
            path
        ]
        session = service.alice.post("create_session", {}).json()["session_id"]
        load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        assert service.alice.ask("load_weights", load)["type"] == "load_weights"
        assert service.bob.get("checkpoints").json()["checkpoints"] == []


def test_checkpoint_saved_again_is_not_removed_with_its_expired_record(tmp_path, monkeypatch) -> None:
    with served(tmp_path, session_timeout_s=10_000) as service:
        model = service.alice.model()
        save = {"model_id": model, "path": "latest"}
        route = f"training_runs/{model}/checkpoints/weights/latest"
        service.alice.ask("save_weights", {**save, "seq_id": 1, "ttl_seconds": 0})
        save_adapter, statuses = service.backend.save_adapter, []

        def save_and_wait(*arguments: Any, **options: Any) -> None:
            save_adapter(*arguments, **options)
            # Before its record is written, which takes as long as the training batch behind it.
            service.tick(601)
            statuses.append(service.alice.get(route, "DELETE").status_code)

        monkeypatch.setattr(service.backend, "save_adapter", save_and_wait)
        path = service.alice.ask("save_weights", {**save, "seq_id": 2})["path"]
        assert service.alice.post("weights_info", {"tinker_path": path}).status_code == 200
        service.alice.ask("save_weights", {**save, "seq_id": 3, "overwrite": True})
        assert service.alice.post("weights_info", {"tinker_path": path}).status_code == 200
        assert statuses == [404, 409]
        assert service.alice.get(route, "DELETE").status_code == 204


def test_a_silent_session_ends_and_its_models_go(system) -> None:
    model, other = system.alice.model(), system.bob.model()
    system.tick(200)
    assert system.bob.post("session_heartbeat", {"session_id": other.partition(":")[0]}).status_code == 200
    system.tick(200)
    assert system.alice.post("session_heartbeat", {"session_id": model.partition(":")[0]}).status_code == 410
    assert system.alice.post("get_info", {"model_id": model}).status_code == 404
    assert system.bob.post("get_info", {"model_id": other}).json()["lora_rank"] == 4
    system.bob.fetch(system.bob.forward_backward(other, 1, 10))
    assert list(system.backend.adapters) == ["a2"]


def test_sessions_end_after_an_error_of_an_earlier_sweep(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(application, "TICK_S", 0.01)
    with served(tmp_path / "storage", log="none") as service:
        shutil.rmtree(tmp_path / "storage")  # unmounted, say
        service.clock.now += application.SWEEP_S + 1
        wait_until(lambda: "timeouts could not be applied" in caplog.text)
        (tmp_path / "storage").mkdir()
        service.alice.post("create_session", {})
        service.clock.now += service.service.settings.session_timeout_s + 1
        wait_until(lambda: not service.service.tenancy.sessions)


def test_sessions_survive_a_server_that_could_not_hear_their_clients(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(application, "TICK_S", 0.1)
    monkeypatch.setattr(application, "LATE_S", 1.0)
    with served(tmp_path) as service:
        model = service.alice.model()
        early = service.alice.forward_backward(model, 2, 10)
        portal = service.client.portal
        assert portal is not None

        def stop_loop(seconds: float) -> None:
            service.clock.now += 400
            time.sleep(seconds)

        portal.call(stop_loop, 1.5)  # a suspended process, or a file system that does not answer
        time.sleep(0.5)  # several ticks
        assert service.alice.post("get_info", {"model_id": model}).status_code == 200
        service.alice.forward_backward(model, 1, 10)
        assert "error" not in service.alice.fetch(early)
        portal.call(stop_loop, 0.0)
        wait_until(lambda: not service.service.tenancy.sessions)


def test_answers_are_forgotten_some_time_after_they_were_fetched(system) -> None:
    model = system.alice.model()
    name = system.alice.forward_backward(model, 1, 10)
    assert system.alice.fetch(name) == system.alice.fetch(name)
    system.tick(121)
    assert system.alice.post("retrieve_future", {"request_id": name}).status_code == 410
    assert "no longer kept" in system.alice.post("forward_backward", train_body(model, 1, 10)).text


def test_model_is_not_replaced_once_the_answer_to_its_creation_is_dropped(system) -> None:
    model = system.alice.model()
    system.tick(121)
    body = {"model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    refused = system.alice.post("create_model", {"session_id": model.partition(":")[0], **body})
    assert (refused.status_code, "no longer kept" in refused.text) == (400, True)
    assert list(system.backend.adapters) == [system.service.tenancy.models[model].adapter] == ["a1"]


def test_unloading_a_model_fails_its_waiting_requests(system) -> None:
    model = system.alice.model()
    early = [system.alice.forward_backward(model, 2, 10), system.alice.optim_step(model, 4)]
    assert system.alice.ask("unload_model", {"model_id": model}) == {"model_id": model, "type": "unload_model"}
    assert [system.alice.fetch(name)["category"] for name in early] == ["user", "user"]
    # sent again by a client that lost the response
    assert system.alice.ask("unload_model", {"model_id": model}) == {"model_id": model, "type": "unload_model"}
    assert system.bob.post("unload_model", {"model_id": model}).status_code == 404
    session, body = model.partition(":")[0], {"model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    assert system.alice.ask("create_model", {"session_id": session, **body})["model_id"] == model
    assert system.alice.ask("unload_model", {"model_id": model})["type"] == "unload_model"
    assert (system.backend.adapters, system.alice.post("get_info", {"model_id": model}).status_code) == ({}, 404)


def test_the_key_of_a_caller_is_not_in_any_answer(system) -> None:
    caller = Caller(system.client, KEYS["alice"])
    texts = [caller.post("create_session", {}).text, system.client.get("/metrics").text, caller.get("sessions").text]
    assert not any(key in text for text in texts for key in KEYS.values())
