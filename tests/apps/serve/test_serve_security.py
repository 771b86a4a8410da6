"""Hostile requests get cheap refusals that reveal nothing of others and leave a line in the audit log."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import tarfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zstandard
from recording_backend import KEYS, Served, served, train_body

import megascend
from megascend.apps.serve import server, tenancy
from megascend.apps.serve.api import reading, wire
from megascend.apps.serve.api.application import ABSENT
from megascend.apps.serve.api.catalogue import MAX_DOWNLOADS
from megascend.apps.serve.api.guard import Audit
from megascend.apps.serve.api.reading import MAX_CONTAINERS
from megascend.apps.serve.checkpoints import new_session
from megascend.apps.serve.errors import RequestRefusedError
from megascend.apps.serve.scheduler import futures
from megascend.config.serve import ServeConfig
from megascend.errors import ConfigError

PROTOBUF = {"content-type": "application/x-protobuf"}


def routes(system: Served) -> set[tuple[str, str]]:
    """List (method, path under /api/v1) of all routes that need a key."""
    served_routes = {(m, r.path) for r in system.client.app.routes for m in r.methods or () if m != "HEAD"}  # type: ignore[union-attr]
    return {
        (m, path.removeprefix("/api/v1/"))
        for m, path in served_routes
        if path.startswith("/api/v1/") and "healthz" not in path
    }


# --- what belongs to others ---

OWNED_ROUTES = {
    "client/config", "client/dynamic_config", "create_session", "telemetry", "get_server_capabilities", "training_runs",
    "checkpoints", "sessions",
}  # fmt: skip
"""Routes that name nothing."""


def requests_for(ids: dict[str, str], caller_session: str) -> list[tuple[str, str, Any]]:
    """Build (method, path, body) of a request to every route that takes ids, with another tenant's ids.

    Args:
        caller_session: a session of the caller.
    """
    model, session = ids["model"], ids["session"]
    checkpoint = "training_runs/{model}/checkpoints/{kind}/{name}"
    lora = {"session_id": session, "model_seq_id": 7, "base_model": "tiny", "lora_config": {"rank": 4}}
    sample = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}, "num_samples": 1}
    path = f"tinker://{model}/weights/one"
    load = {"model_seq_id": 1, "path": path, "optimizer": False}
    return [
        ("POST", "session_heartbeat", {"session_id": session}),
        ("POST", "create_model", lora),
        ("POST", "unload_model", {"model_id": model}),
        ("POST", "get_info", {"model_id": model}),
        ("POST", "forward_backward", train_body(model, 3, 10)),
        ("POST", "forward", {"model_id": model, "forward_input": {"data": [], "loss_fn": "cross_entropy"}}),
        ("POST", "optim_step", {"model_id": model, "seq_id": 3}),
        ("POST", "save_weights", {"model_id": model, "path": "two", "seq_id": 3}),
        ("POST", "save_weights_for_sampler", {"model_id": model, "path": "two", "seq_id": 3}),
        ("POST", "load_weights", {"session_id": session, **load}),
        ("POST", "load_weights", {"session_id": caller_session, **load}),
        ("POST", "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0}),
        (
            "POST",
            "create_sampling_session",
            {"session_id": caller_session, "sampling_session_seq_id": 0, "model_path": path},
        ),
        ("POST", "asample", {"sampling_session_id": ids["sampler"], "seq_id": 1, **sample}),
        ("POST", "asample", {"model_path": path, **sample}),
        ("POST", "retrieve_future", {"request_id": ids["future"]}),
        ("POST", "weights_info", {"tinker_path": path}),
        ("GET", "samplers/{sampler}", None),
        ("GET", "training_runs/{model}", None),
        ("GET", "training_runs/{model}/checkpoints", None),
        ("DELETE", checkpoint, None),
        ("POST", f"{checkpoint}/publish", None),
        ("DELETE", f"{checkpoint}/publish", None),
        ("GET", f"{checkpoint}/archive", None),
        ("PUT", f"{checkpoint}/ttl", {"ttl_seconds": 0}),
        ("POST", "join_sampling_session", {"sampling_session_id": ids["sampler"]}),
        ("POST", "retrieve_futures", {"target": {"sampling_session_id": ids["sampler"]}, "timeout": 0}),
        ("POST", "cancel_future", {"request_id": ids["future"]}),
        ("GET", "sessions/{session}", None),
        ("POST", "sessions/{session}/finish", None),
    ]


def test_ids_of_other_tenants_look_unknown(system) -> None:
    model = system.alice.model()
    session = model.partition(":")[0]
    future = system.alice.forward_backward(model, 1, 10)
    system.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 2})  # waits for both
    sampler = system.alice.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0})
    real = {
        "model": model, "session": session, "future": future,
        "sampler": sampler.json()["sampling_session_id"],
    }  # fmt: skip
    none = new_session()
    made_up = {kind: name.replace(session, none) for kind, name in real.items()}
    bobs_session = system.bob.post("create_session", {}).json()["session_id"]
    before = list(system.backend.calls)
    requests = requests_for(real, bobs_session)
    assert {(method, path) for method, path, _ in requests} == {
        route for route in routes(system) - set(ABSENT) if route[1] not in OWNED_ROUTES
    }
    for real_request, unknown_request in zip(requests, requests_for(made_up, bobs_session), strict=True):
        answers = []
        for ids, (method, path, body) in ((real, real_request), (made_up, unknown_request)):
            target = path.format(**ids, kind="weights", name="one")
            answer = system.client.request(method, f"/api/v1/{target}", json=body, headers=system.bob.headers)
            answers.append(
                (answer.status_code, answer.text.replace(session, "S").replace(none, "S"), set(answer.headers))
            )
        assert answers[0] == answers[1], real_request
        if real_request[1].endswith("checkpoints"):
            assert json.loads(answers[0][1]) == {"checkpoints": []}
        elif real_request[1] not in ("asample", "cancel_future"):
            assert answers[0][0] in (404, 410), real_request
    assert system.backend.calls == before


def test_ids_cannot_be_guessed(system) -> None:
    """Use 128 random bits, so that the time to look up an id on disk reveals nothing."""
    assert len({new_session() for _ in range(100)}) == 100
    assert len(new_session()) == len("s-") + 32
    assert len({system.service.new_label("sample") for _ in range(100)}) == 100


def test_damaged_record_affects_only_its_owner(system) -> None:
    model = system.alice.model()
    path = system.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})["path"]
    next(system.service.checkpoints.root.rglob("one.json")).write_text("{")
    assert system.alice.post("weights_info", {"tinker_path": path}).status_code == 500
    assert system.bob.post("weights_info", {"tinker_path": path}).status_code == 404


# --- bodies ---


def test_decompression_bombs_are_refused(system) -> None:
    model = system.alice.model()
    zeros = zstandard.ZstdCompressor().compress(bytes(2**27))
    lies = zstandard.ZstdCompressor(write_content_size=True).compress(b"a" * 100)
    lies = lies[:5] + b"\x07" + lies[6:]  # another size than is inside
    needs_memory = zstandard.ZstdCompressionParameters(window_log=27)
    wide = zstandard.ZstdCompressor(compression_params=needs_memory).compressobj()
    wide_frame = wide.compress(b"a" * 2**24) + wide.flush()
    message = wire.messages_of_client().ForwardBackwardRequest
    datum = message(model_id=model).data.add()
    datum.loss_fn_inputs["target_tokens"].shape.extend([1] * 400_000)
    many = message(model_id=model, loss_fn="cross_entropy")
    many.data.add().loss_fn_inputs["target_tokens"].CopyFrom(datum.loss_fn_inputs["target_tokens"])
    for content, headers, expected in (
        (zeros, {"content-encoding": "zstd"}, 413),
        (lies, {"content-encoding": "zstd"}, 400),
        (wide_frame, {"content-encoding": "zstd"}, 400),
        (zeros[:100], {"content-encoding": "zstd"}, 400),
        (b"text", {"content-encoding": "zstd"}, 400),
        (zeros, {"content-encoding": "gzip"}, 415),
        (zeros, {"content-encoding": "zstd, zstd"}, 415),
        (many.SerializeToString(), {}, 413),  # numbers in a row
        (b"\x30\x01" * 400_000, {}, 413),  # one field again and again
        (b"\x1b" * 1000, {}, 400),
    ):
        answer = system.alice.post("forward_backward", content=content, headers={**PROTOBUF, **headers})
        assert answer.status_code == expected, (content[:8], answer.text)
    for content, expected in (
        (b'{"a":' + b"[{}," * MAX_CONTAINERS, 413),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
        (b'{"model_id": ' + b"1" * 5000 + b"}", 400),
    ):
        assert system.alice.post("forward_backward", content=content).status_code == expected, content[:20]
    assert (
        system.alice.post("create_session", content=b'{"tags": ["' + b"a" * reading.SMALL + b'"]}').status_code == 413
    )
    assert system.backend.calls == [("add", "a1")]


def test_bodies_at_a_time_are_bounded_for_each_tenant_and_for_all() -> None:
    bodies = reading.Bodies(100)
    with bodies.reserve("alice") as first, bodies.reserve("alice") as second:
        first(250)
        second(150)
        with pytest.raises(RequestRefusedError) as refused:
            second(1)
        assert refused.value.status == 429
        with ExitStack() as stack:
            for number in range(3):
                stack.enter_context(bodies.reserve(f"other {number}"))(400)
            with pytest.raises(RequestRefusedError), bodies.reserve("bob") as late:
                late(1)
    with bodies.reserve("alice") as repeated:
        repeated(400)


def test_retained_state_of_a_tenant_is_bounded(system, monkeypatch) -> None:
    monkeypatch.setattr(futures, "MAX_ANSWERS", 3)
    monkeypatch.setattr(tenancy, "MAX_SAMPLERS", 2)
    session = system.alice.post("create_session", {}).json()["session_id"]
    for number in (0, 1, 2, 2):
        system.alice.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": number})
    assert system.alice.get(f"sessions/{session}").json()["sampler_ids"] == [f"{session}:sample:{n}" for n in (1, 2)]
    bobs_request = system.bob.forward_backward(system.bob.model(), 1, 10)
    model = system.alice.model()
    names = [
        system.alice.forward_backward(model, number, 10, weights=[1.0, 2.0]) for number in (1, 2, 3, 4)
    ]  # which fail
    while system.service.futures.pending(model):
        time.sleep(0.01)
    for path, body in (("forward_backward", train_body(model, 5, 10)), ("asample", SAMPLE)):
        refused = system.alice.post(path, body)
        assert (refused.status_code, "fetch some first" in refused.text) == (429, True), path
    assert all(system.alice.fetch(name)["category"] == "user" for name in names), (
        "answers not fetched are never dropped"
    )
    system.alice.ask("optim_step", {"model_id": model, "seq_id": 5})
    system.tick(1)
    assert {name: len(account.answers) for name, account in system.service.futures._accounts.items()} == {
        "alice": 3,
        "bob": 2,
    }
    assert system.bob.fetch(bobs_request)["metrics"]["loss:sum"] == 10


SAMPLE = {
    "model_path": "tinker://s/sampler_weights/x",
    "prompt": {"chunks": [{"tokens": [1]}]},
    "sampling_params": {"max_tokens": 1},
}

HOSTILE = (
    b"", b"null", b"[]", b'"a"', b"{", b"\xff\xfe\x00", b'{"session_id": null}', b'{"model_id": "\\ud800", "path": "\\udfff"}',
    b'{"session_id": {"a": 1}, "model_id": [], "request_id": {}, "path": 1e999, "seq_id": NaN, "tinker_path": "\\u0000"}',
    b'{"session_id": "a", "session_id": 1, "user_metadata": {"\\ud800": "\\udc00"}, "seq_id": -1, "seq_id": 9999999999999999999}',
)  # fmt: skip


def test_no_body_is_too_strange_for_any_route(system) -> None:
    for method, path in sorted(routes(system)):
        route = path.format(model="m", session="s", kind="weights", name="n", sampler="x")
        for body in HOSTILE:
            answer = system.client.request(method, f"/api/v1/{route}", content=body, headers=system.alice.headers)
            assert answer.status_code < 500, (method, path, body, answer.text)
            assert "Traceback" not in answer.text
    assert system.backend.calls == []


def test_text_with_lone_surrogates_is_returned_unchanged(system) -> None:
    body = b'{"user_metadata": {"a": "\\ud800\\u0000<b>"}}'
    session = system.alice.post("create_session", content=body).json()["session_id"]
    assert system.alice.get(f"sessions/{session}").json()["user_metadata"] == {"a": "\ud800\x00<b>"}


NAMES = (
    "..",
    "%2e%2e",
    "..%2f..",
    "a%2fb",
    "a%00",
    "%c0%ae%c0%ae",
    "\uff0e\uff0e",
    "one%0a",
    "x" * 5000,
    "%ff",
    "a\\b",
    "one\u0660",
)


def test_no_id_in_a_path_leaves_the_storage(system, tmp_path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "secret").mkdir()
    model = system.alice.model()
    system.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})
    for name in NAMES:
        for route in (
            f"training_runs/{model}/checkpoints/weights/{name}/archive",
            f"training_runs/{model}/checkpoints/{name}/one/archive",
            f"training_runs/{name}/checkpoints/weights/one/archive",
            f"training_runs/{model}{name}/checkpoints",
            f"training_runs/{name}",
            f"sessions/{name}",
            f"samplers/{name}",
        ):
            assert system.alice.get(route).status_code in (400, 404, 405, 410), route
    run = next((tmp_path / "storage" / "alice").iterdir())
    (run / "weights" / "two").symlink_to(tmp_path / "secret")  # without a record: not a checkpoint of the server
    assert system.alice.get(f"training_runs/{model}/checkpoints/weights/two/archive").status_code == 404


def test_an_archive_holds_the_checkpoints_files_and_nothing_else(system, tmp_path) -> None:
    model = system.alice.model()
    system.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})
    directory = next((tmp_path / "storage" / "alice").rglob("weights/one"))
    (tmp_path / "secret").write_text("secret")
    (directory / "link").symlink_to(tmp_path / "secret")
    (directory / "folder").mkdir()
    (directory / "folder" / "inside").write_text("secret")
    os.mkfifo(directory / "pipe")
    answer = system.alice.get(f"training_runs/{model}/checkpoints/weights/one/archive")
    assert (answer.status_code, int(answer.headers["content-length"])) == (200, len(answer.content))
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        entries = tar.getmembers()
        assert [entry.name for entry in entries] == ["adapter_model.safetensors"]
        assert tar.extractfile(entries[0]).read() == b"12345"  # type: ignore[union-attr]
    assert (entries[0].uid, entries[0].uname, entries[0].gname, entries[0].mode) == (0, "", "", 0o644)


def test_a_tenants_downloads_at_a_time_are_bounded(system, monkeypatch) -> None:
    """Bound downloads, because a slow reader keeps a temporary file."""
    model = system.alice.model()
    system.alice.ask("save_weights", {"model_id": model, "path": "one"})
    route = f"training_runs/{model}/checkpoints/weights/one/archive"
    for _ in range(2 * MAX_DOWNLOADS):
        assert system.alice.get(route).status_code == 200
    assert system.service.downloads["alice"] == 0, "what was sent does not count"
    monkeypatch.setattr("megascend.apps.serve.api.catalogue.pack", lambda directory: 1 / 0)
    assert system.alice.get(route).status_code == 500
    assert system.service.downloads["alice"] == 0
    monkeypatch.undo()
    system.service.downloads["alice"] = MAX_DOWNLOADS
    assert system.alice.get(route).status_code == 429
    system.service.downloads["alice"] = 0
    assert system.alice.get(route).status_code == 200


# --- keys ---


def test_a_request_has_one_key_in_one_header(system) -> None:
    good, bad = KEYS["alice"], "tml-wrong-0123456789abcdef"
    for headers in (
        [("X-API-Key", bad), ("X-API-Key", good)], [("X-API-Key", good), ("X-API-Key", bad)], [("X-API-Key", good)] * 2,
        [("X-API-Key", f"{good},{good}")], [("Authorization", f"Bearer {good}")], [("X-API-Key", "tml-\xe9")], [("Cookie", good)],
    ):  # fmt: skip
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        assert system.client.get("/api/v1/sessions", headers=raw).status_code == 401, headers  # type: ignore[arg-type]


def test_public_host_requires_keys(tmp_path) -> None:
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org", ""):
        with pytest.raises(ConfigError, match="reachable from other machines"):
            server.keys_of(ServeConfig(model=tmp_path, host=host), {})


# --- what is noted ---


def test_the_audit_log_cannot_be_forged(tmp_path) -> None:
    with served(tmp_path) as service:
        for headers in (
            {"host": "x/api/v1/telemetry?"}, {"host": "["}, {"host": "a\tb"}, {"x-forwarded-for": "6.6.6.6"},
            {"x-forwarded-prefix": "/telemetry"},
        ):  # fmt: skip
            assert service.alice.post("create_session", {}, headers=headers).status_code == 200
        for path in (
            'n%0a{"tenant": "bob"}',
            "telemetry%3fcreate_session",
            "n%23telemetry%00",
            "m/checkpoints/weights/telemetry",
        ):
            service.alice.get(f"training_runs/{path}", "DELETE" if "/" in path else "GET")
        service.client.post("/api/v1/create_session", json={}, headers={"X-API-Key": "tml-nobody-0123456789"})
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [entry["path"].rsplit("/", 1)[-1] for entry in lines[:5]] == ["create_session"] * 5
    assert len(lines) == 9
    assert {(entry["tenant"], entry["from"]) for entry in lines} == {("alice", "testclient")}
    assert {entry["status"] for entry in lines[:5]} == {200}
    assert not any(key in (tmp_path / "audit.jsonl").read_text() for key in KEYS.values())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_requests_are_answered_while_the_audit_log_cannot_be_written(tmp_path, caplog) -> None:
    (tmp_path / "audit.jsonl").symlink_to("/dev/full")  # a full disk
    with served(tmp_path) as server:
        model = server.alice.model()
        assert "error" not in server.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})
        route = f"training_runs/{model}/checkpoints/weights/one"
        assert server.alice.get(route, "DELETE").status_code == 204  # which makes room
    assert caplog.text.count("audit log") == 1


def test_audit_log_continues_behind_a_partial_entry(tmp_path, caplog) -> None:
    audit, limits = Audit(tmp_path / "audit.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)

    def write(*statuses: int) -> None:
        for status in statuses:
            audit.write("alice", "POST", "/api/v1/optim_step", status, "")

    write(201)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "audit.jsonl").stat().st_size + 10, limits[1]))
        write(202, 203)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    write(204, 205)
    audit.close()
    first, partial, *later = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in (first, *later)] == [201, 204, 205]
    assert len(partial) == 10
    assert "entries of 2 requests are missing" in caplog.text


def test_internal_error_reveals_nothing_and_is_audited(tmp_path, monkeypatch) -> None:
    with served(tmp_path) as server:

        def fail(*_: Any) -> None:
            raise RuntimeError(f"password {tmp_path}")

        monkeypatch.setattr(server.service.tenancy, "open_session", fail)
        answer = server.alice.post("create_session", {})
    assert (answer.status_code, answer.json()) == (
        500,
        {"detail": "internal error (RuntimeError)", "category": "server"},
    )
    assert json.loads((tmp_path / "audit.jsonl").read_text())["status"] == 500


# --- code ---

RISKY = re.compile(
    r"(?<![\w.])(?:eval|exec|compile|__import__)\((?!\))|\b(?:os\.system|pickle\.loads?|marshal\.loads?|torch\.load|yaml\.\w*load)\("
    r"|\bshell=|\ballow_pickle="
)
SAFE = re.compile(r"torch\.load\([^\n]*weights_only=True|yaml\.load\(text, (?:yaml)?_loader\(\)")  # SafeLoaders
BETWEEN_RANKS = {"runtime/distributed/objects.py"}
"""Pickles travel between the ranks of a job, which one user has started."""


def test_neither_requests_nor_checkpoints_run_code() -> None:
    """Check all modules but those of users' tests, which start programs."""
    root = Path(megascend.__file__).parent
    risky = []
    for file in root.rglob("*.py"):
        name = file.relative_to(root).as_posix()
        if name not in BETWEEN_RANKS and not name.startswith("testing/"):
            risky += [
                (name, line.strip())
                for line in file.read_text("utf-8").splitlines()
                if RISKY.search(SAFE.sub("", line))
            ]
    assert risky == []
