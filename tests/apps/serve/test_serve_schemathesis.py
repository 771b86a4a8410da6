"""Schemathesis on every route of the service over a socket: valid and invalid requests, JSON and protobuf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from recording_backend import KEYS, served, train_body
from service_schema import PROTOBUF, description, operations
from test_serve_sockets import listening

from megascend.apps.serve.api import application, wire
from megascend.apps.serve.api.application import ABSENT

schemathesis = pytest.importorskip("schemathesis", reason="pip install 'megascend[test]'")

pytestmark = pytest.mark.nightly

EXAMPLES = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
KINDS = ("session", "model", "path", "sampler", "future", "kind", "name")
ROUTES = sorted(operations({kind: ["x"] for kind in KINDS}))
MODELS: list[str] = ["none"]
"""Names of models that the server has, for messages that get further than the first check."""


@st.composite
def messages(draw: Any, descriptor: Any = None, depth: int = 6) -> Any:
    """Draw any message that a description allows: fields are omitted or set, with values at the ends of their ranges."""
    descriptor = descriptor or wire.messages_of_client().ForwardBackwardRequest.DESCRIPTOR
    message = descriptor._concrete_class()
    for field in descriptor.fields:
        if field.name not in ("model_id", "seq_id") and (not depth or not draw(st.booleans())):
            continue
        inside = field.message_type
        if inside is not None and inside.GetOptions().map_entry:
            keys = st.sampled_from(["target_tokens", "weights", "advantages", "logprobs", "beta", "x"])
            for key in draw(st.lists(keys, max_size=3)):
                value = inside.fields_by_name["value"]
                if value.message_type is None:
                    getattr(message, field.name)[key] = draw(scalars(value))
                else:
                    getattr(message, field.name)[key].CopyFrom(draw(messages(value.message_type, depth - 1)))
        elif inside is not None and field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(messages(inside, depth - 1), max_size=2)))
        elif inside is not None:
            getattr(message, field.name).CopyFrom(draw(messages(inside, depth - 1)))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(scalars(field), max_size=3)))
        else:
            setattr(message, field.name, draw(scalars(field)))
    return message


def scalars(field: Any) -> st.SearchStrategy[Any]:
    """Draw values of a field that is not a message."""
    if field.name == "seq_id":
        return st.one_of(st.integers(4, 2**31 - 1), st.integers(4, 2**31 - 1), st.sampled_from([0, 1, -1]))
    numbers = {
        field.TYPE_INT32: st.sampled_from([0, 1, 2, 3, -1, 2**31 - 1, -(2**31)]),
        field.TYPE_INT64: st.sampled_from([0, 1, 2, 4, -1, 2**62, 2**63 - 1, -(2**63)]),
        field.TYPE_UINT32: st.sampled_from([0, 1, 2**32 - 1]),
    }
    if field.type in numbers:
        return numbers[field.type]
    if field.type == field.TYPE_ENUM:
        return st.sampled_from([0, 1, 2, 3, 99])
    if field.type == field.TYPE_BOOL:
        return st.booleans()
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        return st.sampled_from([0.0, 0.5, -1.0, 1e300, float("nan"), float("inf")])
    if field.type == field.TYPE_BYTES:
        words = st.lists(st.sampled_from([0, 1, 5, 99, 2**31 - 1]), max_size=6)
        return st.one_of(
            words.map(lambda numbers: b"".join(number.to_bytes(4, "little") for number in numbers)),
            words.map(lambda numbers: b"".join(number.to_bytes(8, "little") for number in numbers)),
            st.binary(max_size=9),
        )
    if field.name == "model_id":
        return st.sampled_from([*MODELS[:1] * 9, "none"])
    return st.one_of(st.sampled_from(["cross_entropy", "ppo", "gspo", "stable_reinforce"]), st.text(max_size=8))


@st.composite
def bodies(draw: Any) -> bytes:
    """Generate a message as bytes, corrupted in a third of the cases."""
    content = bytearray(draw(messages()).SerializeToString())
    if draw(st.integers(0, 2)) == 0:
        for _ in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, len(content)))
            content[start : start + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(content)


schemathesis.openapi.media_type(PROTOBUF, bodies())


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    patch = pytest.MonkeyPatch()
    patch.setattr(application, "LONG_POLL_S", 0.01)
    limits = {"models": 4000, "sessions": 100_000, "pending": 4000}
    with listening(tmp_path_factory.mktemp("storage"), max_models=4000, limits=limits) as url:
        yield url
        patch.undo()


def names(address: str) -> dict[str, list[str]]:
    """Create a session with a model, a checkpoint, a sampler and a future: other requests may have ended earlier ones."""
    with httpx.Client(base_url=f"{address}/api/v1", headers={"X-API-Key": KEYS["alice"]}) as client:

        def post(path: str, body: Any) -> Any:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def ask(path: str, body: Any) -> Any:
            name = post(path, body)["request_id"]
            while (answer := client.post("retrieve_future", json={"request_id": name})).status_code == 408:
                pass
            assert answer.status_code == 200, answer.text
            return answer.json()

        session = post("create_session", {})["session_id"]
        create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        model = ask("create_model", create)["model_id"]
        path = ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})["path"]
        other = ask("save_weights_for_sampler", {"model_id": model, "path": "one", "seq_id": 2})["path"]
        sampler = post(
            "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": other}
        )
        future = post("forward_backward", train_body(model, 3, 10))["request_id"]
    MODELS[:] = [model]
    return {
        "session": [session], "model": [model], "path": [path, other], "sampler": [sampler["sampling_session_id"]],
        "future": [future], "kind": ["weights", "sampler_weights"], "name": ["one"],
    }  # fmt: skip


CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_request_is_answered_with_an_error_of_the_server(address: str, method: str, path: str, mode: str) -> None:
    ask(address, method, path, schemathesis.GenerationMode(mode), "application/json", EXAMPLES)


def test_no_message_is_answered_with_an_error_of_the_server(address: str) -> None:
    ask(
        address,
        "POST",
        "forward_backward",
        schemathesis.GenerationMode.POSITIVE,
        PROTOBUF,
        settings(EXAMPLES, max_examples=300),
    )


def ask(address: str, method: str, path: str, mode: Any, media_type: str, examples: settings) -> None:
    """Send requests to a route, and hold the answers against the description."""
    schemathesis.checks.load_all_checks()
    checks = [schemathesis.checks.CHECKS.get_one(name) for name in CHECKS]
    document = description(names(address))
    body = document["paths"][f"/api/v1/{path}"][method.lower()].get("requestBody")
    if body is not None:
        body["content"] = {media_type: body["content"][media_type]}
    operation = schemathesis.openapi.from_dict(document)[f"/api/v1/{path}"][method]
    headers, answers = {"X-API-Key": KEYS["alice"]}, Counter[int]()
    with httpx.Client(base_url=address, headers=headers) as client:

        @examples
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: Any) -> None:
            answer = case.call(base_url=address, headers=headers)
            answers[answer.status_code] += 1
            case.validate_response(answer, checks=checks)
            if answer.status_code == 200 and "json" in answer.headers["content-type"][0]:
                check_promise(client, answer.json().get("request_id"))

        try:
            call()
        except Unsatisfiable:
            pytest.skip("nothing in this request could be wrong")
    print(f"{method} {path}, {media_type}, {mode.value}: {dict(answers)}")


def check_promise(client: httpx.Client, name: Any) -> None:
    """Check that a promised answer arrives, and is no server error."""
    if isinstance(name, str):
        response = client.post("/api/v1/retrieve_future", json={"request_id": name})
        assert response.status_code in (200, 408, 410), response.text
        assert "internal" not in response.text, response.text


def test_every_route_is_described(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        routes = {
            (method, route.path.removeprefix("/api/v1/"))
            for route in service.client.app.routes  # type: ignore[attr-defined]
            for method in route.methods - {"HEAD"}
            if route.path.startswith("/api/v1/")
        }
    assert routes - set(ABSENT) - {("GET", "healthz")} == set(ROUTES)


@EXAMPLES
@given(data=st.data())
def test_messages_of_the_strategy_are_read_back(data: Any) -> None:
    """Check that drawn messages parse with the client's package, so that refusals come from the service."""
    message = data.draw(messages())
    assert type(message).FromString(message.SerializeToString()).ByteSize() == message.ByteSize()
