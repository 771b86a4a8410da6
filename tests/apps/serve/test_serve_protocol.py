"""Every request of the installed client is answered; unsupported routes are named."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from megascend.apps.sampling.request import SampleResult
from megascend.apps.serve.api.application import ABSENT
from megascend.apps.serve.api.bodies import SampleBody
from megascend.apps.serve.samplers.messages import SampleAnswer, sample_request_of, targets_of

CALL = re.compile(r"""\.?_?(post|get|put|delete|request)\(\s*(?:"([A-Z]+)",\s*)?f?"/api/v1/([^"]+)\"""")
IDS = {"checkpoint_id": "weights/one"}


def calls_of_the_client() -> set[tuple[str, str]]:
    """List (method, path under /api/v1) of every call in the client's package, with names in place of ids."""
    tinker = pytest.importorskip("tinker", reason="the client needs Python 3.11")
    calls = set()
    for file in Path(tinker.__file__).parent.rglob("*.py"):
        if not file.stem.endswith("_test"):
            for kind, method, path in CALL.findall(file.read_text("utf-8")):
                calls.add((method or kind.upper(), re.sub(r"\{(\w+)\}", lambda m: IDS.get(m[1], "x"), path)))
    return calls


def test_every_call_of_the_client_has_a_route(system) -> None:
    calls = calls_of_the_client()
    assert {("POST", "forward_backward"), ("PUT", "training_runs/x/checkpoints/weights/one/ttl")} <= calls
    assert len(calls) > 40
    model = system.alice.model()
    for method, path in sorted(calls):
        route = path.replace("training_runs/x", f"training_runs/{model}").replace(
            "sessions/x", f"sessions/{model.partition(':')[0]}"
        )
        answer = system.client.request(method, f"/api/v1/{route}", json={}, headers=system.alice.headers)
        detail = "" if answer.status_code < 300 else answer.json().get("detail", "")
        assert answer.status_code < 500, (method, path, answer.text)
        assert detail not in ("not found", "not allowed"), (method, path)


def test_unsupported_routes_are_named_with_status_400(system) -> None:
    for method, path in ABSENT:
        route = path.format(model="m", kind="weights", name="n", session="s")
        answer = system.client.request(method, f"/api/v1/{route}", json={}, headers=system.alice.headers)
        assert (answer.status_code, path in answer.json()["detail"]) == (400, True)


def test_a_checkpoints_time_is_set_and_taken_away(system) -> None:
    model = system.alice.model()
    system.alice.ask("save_weights", {"model_id": model, "path": "one", "seq_id": 1})
    route = f"/api/v1/training_runs/{model}/checkpoints/weights/one/ttl"
    for seconds, expires in ((3600, True), (None, False)):
        answer = system.client.put(route, json={"ttl_seconds": seconds}, headers=system.alice.headers)
        assert answer.status_code == 204
        (checkpoint,) = system.alice.get("checkpoints").json()["checkpoints"]
        assert (checkpoint["expires_at"] is not None) == expires
    assert system.client.put(route, json={"ttl_seconds": 0}, headers=system.bob.headers).status_code == 404
    system.client.put(route, json={"ttl_seconds": 0}, headers=system.alice.headers)
    assert system.alice.get("checkpoints").json()["checkpoints"] == []
    system.tick(601)
    assert list(system.service.checkpoints.root.glob("alice/*/weights/*")) == []


SAMPLE = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}, "num_samples": 1}


def test_requests_of_a_sampler_are_asked_for_all_at_once(system) -> None:
    session = system.alice.post("create_session", {}).json()["session_id"]
    sampler = system.alice.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0})
    name = sampler.json()["sampling_session_id"]
    joined = [system.alice.post("join_sampling_session", {"sampling_session_id": name}).json() for _ in range(2)]
    assert [item["client_counter"] for item in joined] == [1, 2]
    target = {"type": "sampling_session", "sampling_session_id": name, "cloned_sampler_id": 0}

    def poll(observed: int, clone: int = 0, **values):
        body = {"target": {**target, "cloned_sampler_id": clone}, "prev_cursor": observed, **values}
        return system.alice.post("retrieve_futures", body).json()

    assert poll(0, timeout=0) == {"completions": [], "cursor": 0}
    answers = []
    waits = threading.Thread(target=lambda: answers.append(poll(0)))
    waits.start()
    promises = [
        system.alice.post("asample", {**SAMPLE, "sampling_session_id": name, "seq_id": n}).json() for n in (1, 2, 10**9)
    ]
    ids = [item["request_id"] for item in promises]
    waits.join(20)
    assert answers[0]["completions"][0]["request_id"] == ids[0]
    for item in ids:
        system.alice.fetch(item)
    completed = poll(0)
    assert [(item["request_id"], item["state"]) for item in completed["completions"]] == [
        (item, "finished") for item in ids[:2]
    ]
    assert [item["request_id"] for item in poll(0, clone=1)["completions"]] == ids[2:]
    assert poll(completed["cursor"], timeout=0, retrieved_request_ids=ids) == {
        "completions": [],
        "cursor": completed["cursor"],
    }
    system.tick(121)
    assert system.alice.post("retrieve_future", {"request_id": ids[2]}).status_code == 410
    assert system.service.futures.completions._logs == {}
    assert system.bob.post("retrieve_futures", {"target": target}).status_code == 410


def test_requests_are_cancelled_only_by_their_tenant(system) -> None:
    model = system.alice.model()
    system.backend.gate.clear()
    step = system.alice.forward_backward(model, 1, 10)  # holds the ranks
    while system.service._inbox._commands:
        pass
    system.alice.forward_backward(model, 2, 10)
    request = system.alice.post("asample", SAMPLE).json()["request_id"]
    assert system.bob.post("cancel_future", {"request_id": request}).status_code == 204
    assert [type(item).__name__ for item in system.service._inbox._commands] == ["ForwardBackward", "Respond"]
    for item in (request, step, "nothing"):
        assert system.alice.post("cancel_future", {"request_id": item}).status_code == 204
    system.backend.gate.set()
    assert system.alice.fetch(request)["error"] == "the client has cancelled this request"
    assert "error" not in system.alice.fetch(step)


def sample_body(**values):
    return {**SAMPLE, "prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, **values}


DENSE = {"data": [7, -1, 5, 6], "dtype": "int64", "shape": [2, 2]}
SPARSE = {
    "data": [4, 9],
    "dtype": "int64",
    "shape": [2, 50],
    "sparse_crow_indices": [0, 0, 2],
    "sparse_col_indices": [3, 40],
}


@pytest.mark.parametrize(
    ("tensor", "rows", "computed", "answered"),
    [
        (DENSE, ((7, -1), (5, 6)), ((-1.0, 0.0), (-2.0, -3.0)), [-1.0, 0.0, -2.0, -3.0]),
        (SPARSE, ((-1, -1), (4, 9)), ((0.0, 0.0), (-2.0, -3.0)), [-2.0, -3.0]),
    ],
)
def test_target_logprobs_of_a_prompt_keep_their_layout(tensor, rows, computed, answered) -> None:
    conversion = pytest.importorskip("tinker.proto.response_conv", reason="the client needs Python 3.11")
    body = sample_body(target_prompt_logprobs=tensor, prompt_alt_tokens_k=2)
    request = sample_request_of(SampleBody.read(body), None, 9)
    assert (request.target_tokens, request.prompt_draws) == (rows, 2)
    draws = (((8, -0.5), (9, -1.5)), ((3, -2.5), (3, -2.5)))
    result = SampleResult((), (None, -1.0, -2.0), (None, ((1, -1.0),), ((2, -2.0),)), computed, draws)
    answer = SampleAnswer(result, None, targets_of(tensor))
    read = conversion.deserialize_sample_response(answer.protobuf())
    target_scores, alternatives = read.target_prompt_logprobs, read.prompt_alt_tokens
    assert list(target_scores.data) == answered
    assert (target_scores.shape, target_scores.sparse_crow_indices) == (
        tensor["shape"],
        tensor.get("sparse_crow_indices"),
    )
    assert (list(alternatives.tokens.data), alternatives.tokens.shape) == ([8, 9, 3, 3], [2, 2])
    assert list(alternatives.logprobs.data) == [-0.5, -1.5, -2.5, -2.5]
    assert read.topk_prompt_logprobs == [None, [(1, -1.0)], [(2, -2.0)]]
    tensor_json = answer.json()["target_prompt_logprobs"]
    assert (tensor_json["shape"], tensor_json["data"]) == (tensor["shape"], list(target_scores.data))


def test_whole_numbers_may_be_floats() -> None:
    body = sample_body(sampling_params={"max_tokens": 1, "top_k": 4.0, "seed": 7.0})
    params = sample_request_of(SampleBody.read(body), None, 9).params
    assert (params.top_k, params.seed) == (4, 7)
    assert all(isinstance(value, int) for value in (params.top_k, params.seed))
