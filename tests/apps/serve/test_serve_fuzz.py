"""Random requests to every route: no internal error, no stack trace, and always an answer."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording_backend import Served, served

from megascend.apps.serve.api import application, wire

pytestmark = pytest.mark.nightly

EXAMPLES = settings(
    max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    patch = pytest.MonkeyPatch()
    patch.setattr(application, "LONG_POLL_S", 0.01)
    with served(tmp_path_factory.mktemp("storage"), limits={"models": 8, "sessions": 1000}) as server:
        yield server
        patch.undo()
        assert server.bob.fetch(server.bob.forward_backward(server.bob.model(), 1, 10))["metrics"]["loss:sum"] == 10


@pytest.fixture(scope="module")
def ids(system: Served) -> list[str]:
    """Return names that the server knows, for requests that pass the first check."""
    model = system.alice.model()
    session = model.partition(":")[0]
    path = system.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})["path"]
    sampler = system.alice.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0})
    future = system.alice.forward_backward(model, 2, 10)
    return [model, session, path, sampler.json()["sampling_session_id"], future, "tiny", "weights", "one"]


FIELDS = re.findall(
    r"\w+",
    """
    session_id model_id model_seq_id seq_id base_model lora_config rank seed train_mlp train_attn train_unembed
    optimizer_config type adam_params learning_rate beta1 eps path tinker_path ttl_seconds overwrite kind
    sampling_session_seq_id model_path optimizer sampling_session_id prompt chunks tokens sampling_params max_tokens
    temperature top_p top_k stop num_samples prompt_logprobs topk_prompt_logprobs topk_sample_logprobs
    target_prompt_logprobs prompt_alt_tokens_k prompt_logprobs_last_n record_stability_info request_id target prev_cursor
    timeout retrieved_request_ids cloned_sampler_id user_metadata forward_backward_input forward_input data loss_fn
    loss_fn_config loss_fn_inputs model_input target_tokens weights logprobs advantages dtype shape sparse_crow_indices
    sparse_col_indices
    """,
)
NUMBERS = st.one_of(
    st.integers(-3, 12), st.integers(), st.floats(), st.sampled_from([2**31, 2**53, 2**62, 2**63, 2**64, 10**400, -0.0, 1e308])
)  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=20), st.sampled_from(["int64", "float32", "encoded_text", "cross_entropy", "ppo", "gspo", "adamw"])
)


def values(names: list[str]) -> st.SearchStrategy[Any]:
    leaves = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.sampled_from(names))
    keys = st.one_of(st.sampled_from(FIELDS), st.text(max_size=5))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(keys, inner, max_size=6)),
        max_leaves=20,
    )


def check(answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    assert "Traceback" not in answer.text
    if (
        answer.status_code >= 400
        and answer.headers.get("content-type") == "application/json"
        and answer.status_code != 408
    ):
        assert set(answer.json()) == {"detail", "category"}


def finished(system: Served, answer: Any) -> None:
    """Check that a promised answer arrives, and is no server error."""
    if answer.status_code == 200 and answer.headers.get("content-type") == "application/json":
        name = answer.json().get("request_id") if isinstance(answer.json(), dict) else None
        response = system.alice.post("retrieve_future", {"request_id": name}) if isinstance(name, str) else None
        if response is not None and response.status_code == 200:
            assert response.json().get("category") != "server" or response.json()["error"] == "no space left", (
                response.text
            )


def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


@given(data=st.data())
@EXAMPLES
def test_any_json_at_any_route(system, ids, data) -> None:
    table = sorted({(m, r.path) for r in system.client.app.routes for m in (r.methods or set()) - {"HEAD"}})  # type: ignore[union-attr]
    method, path = data.draw(st.sampled_from(table))
    segment = st.one_of(st.sampled_from(ids), st.text(string.printable.replace("/", ""), min_size=1, max_size=20))
    names = {
        name: data.draw(segment) for name in ("model", "session", "kind", "name", "sampler") if f"{{{name}}}" in path
    }
    body = data.draw(
        st.one_of(
            values(ids).map(encode), st.dictionaries(st.sampled_from(FIELDS), values(ids)).map(encode), st.binary()
        )
    )
    headers = {
        **system.alice.headers,
        **data.draw(st.sampled_from([{}, {"content-encoding": "zstd"}, {"content-type": wire.PROTOBUF}])),
    }
    route = path.format(
        **{name: value.replace("%", "%25").replace("?", "%3f").replace("#", "%23") for name, value in names.items()}
    )
    answer = system.client.request(method, route.encode("unicode_escape").decode(), content=body, headers=headers)
    if path not in ("/readyz",):
        check(answer)
    finished(system, answer)


@given(data=st.data())
@EXAMPLES
def test_requests_that_are_nearly_right(system, ids, data) -> None:
    """Change one value of a good request."""
    model, session, path, sampler = ids[:4]
    chunk = {"type": "encoded_text", "tokens": [1, 2]}
    tensor = {"data": [1, 2], "dtype": "int64", "shape": [2]}
    sparse = {"data": [1], "dtype": "int64", "shape": [1, 4], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]}
    datum = {
        "model_input": {"chunks": [chunk]},
        "loss_fn_inputs": {"target_tokens": tensor, "weights": {**tensor, "dtype": "float32"}},
    }
    params = {"max_tokens": 1, "temperature": 1.0, "stop": ["a", 1], "top_k": 2, "top_p": 0.5, "seed": 1}
    good = {
        "create_model": {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}},
        "forward_backward": {
            "model_id": model, "seq_id": None,
            "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {}},
        },
        "optim_step": {"model_id": model, "seq_id": None, "adam_params": {"learning_rate": 0.1, "beta1": 0.9}},
        "save_weights": {"model_id": model, "path": "one", "seq_id": None, "ttl_seconds": 5, "overwrite": True},
        "load_weights": {"model_id": model, "path": path, "seq_id": None, "optimizer": True},
        "asample": {
            "sampling_session_id": sampler, "seq_id": None, "prompt": {"chunks": [chunk]}, "sampling_params": params,
            "num_samples": 1, "target_prompt_logprobs": sparse, "prompt_alt_tokens_k": 1, "topk_prompt_logprobs": 1,
        },
        "retrieve_futures": {"target": {"sampling_session_id": sampler, "cloned_sampler_id": 0}, "prev_cursor": 0, "timeout": 0},
    }  # fmt: skip
    route = data.draw(st.sampled_from(sorted(good)))
    body = json.loads(json.dumps(good[route]))
    branch = body
    while True:  # to a place in it
        key = data.draw(st.sampled_from(list(branch) if isinstance(branch, dict) else range(len(branch))))
        if not isinstance(branch[key], dict | list) or not branch[key] or data.draw(st.booleans()):
            break
        branch = branch[key]
    branch[key] = data.draw(values(ids))
    answer = system.alice.post(route, content=encode(body))
    check(answer)
    finished(system, answer)


@st.composite
def messages(draw: Any, model: str, descriptor: Any = None, depth: int = 6) -> Any:
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
                    getattr(message, field.name)[key] = draw(scalars(value, model))
                else:
                    getattr(message, field.name)[key].CopyFrom(draw(messages(model, value.message_type, depth - 1)))
        elif inside is not None and field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(messages(model, inside, depth - 1), max_size=2)))
        elif inside is not None:
            getattr(message, field.name).CopyFrom(draw(messages(model, inside, depth - 1)))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(scalars(field, model), max_size=3)))
        else:
            setattr(message, field.name, draw(scalars(field, model)))
    return message


def scalars(field: Any, model: str) -> st.SearchStrategy[Any]:
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
        return st.sampled_from([*[model] * 9, "none"])
    return st.one_of(st.sampled_from(["cross_entropy", "ppo", "gspo", "stable_reinforce"]), st.text(max_size=8))


@given(data=st.data())
@EXAMPLES
def test_any_protobuf(system, ids, data) -> None:
    """Send any message that the client's description allows; change, cut, double or insert bytes in a third of them."""
    content = bytearray(data.draw(messages(ids[0])).SerializeToString())
    changes = data.draw(st.integers(1, 4)) if data.draw(st.integers(0, 2)) == 0 else 0
    for _ in range(changes):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, min(len(content), start + 20)))
        content[start:end] = data.draw(st.one_of(st.binary(max_size=12), st.just(bytes(content[start:end]) * 2)))
    answer = system.alice.post("forward_backward", content=bytes(content), headers={"content-type": wire.PROTOBUF})
    check(answer)
    finished(system, answer)
