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
