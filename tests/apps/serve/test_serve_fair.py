"""Sampling of one tenant continues under any load of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recording_backend import Caller, Served, served

from megascend.apps.sampling.request import SampleRequest, SamplingParams
from megascend.apps.serve.scheduler.commands import Respond
from megascend.apps.serve.scheduler.runner import SampleTurns


def saved(caller: Caller, count: int) -> list[str]:
    """Return the paths of checkpoints of a new model."""
    model = caller.model()
    bodies = [{"model_id": model, "path": f"c{number}", "seq_id": number} for number in range(1, count + 1)]
    return [caller.ask("save_weights_for_sampler", body)["path"] for body in bodies]


def sampled(caller: Caller, path: str | None, token: int = 5) -> Any:
    """Send a request to sample from a checkpoint, or from the base model."""
    body: dict[str, Any] = {"prompt": {"chunks": [{"tokens": [token]}]}, "sampling_params": {"max_tokens": 2}}
    return caller.post("asample", body if path is None else {**body, "model_path": path})


def fetched(caller: Caller, answer: Any) -> list[int]:
    assert answer.status_code == 200, answer.text
    return caller.fetch(answer.json()["request_id"])["sequences"][0]["tokens"]


def loads(server: Served) -> list[str]:
    return [call[1] for call in server.backend.calls if call[0] == "load"]


def test_a_tenant_that_samples_from_all_it_may_leaves_room_for_another(tmp_path: Path) -> None:
    with served(tmp_path, max_samplers=3, limits={"samplers": 2}) as service:
        paths, bobs = saved(service.alice, 3), saved(service.bob, 1)[0]
        service.backend.sampling.clear()
        pending = [sampled(service.alice, path) for path in (paths[0], paths[1], paths[0])]
        refused = sampled(service.alice, paths[2])
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "2 saved models of yours" in refused.text
        his = sampled(service.bob, bobs)
        service.backend.sampling.set()
        assert fetched(service.bob, his) == [6, 7]
        assert [fetched(service.alice, response) for response in pending] == [[6, 7]] * 3
        assert fetched(service.alice, sampled(service.alice, paths[2])) == [6, 7], "waiting has helped"


def test_tenant_evicts_only_its_adapters(tmp_path: Path) -> None:
    with served(tmp_path, max_samplers=3, limits={"samplers": 3}) as service:
        paths, bobs = saved(service.alice, 5), saved(service.bob, 1)[0]
        assert fetched(service.bob, sampled(service.bob, bobs)) == [6, 7]
        for path in paths * 2:
            assert fetched(service.alice, sampled(service.alice, path)) == [6, 7]
        before = loads(service)
        assert fetched(service.bob, sampled(service.bob, bobs)) == [6, 7]
        assert loads(service) == before, "bob's was still there"
        assert len(service.backend.adapters) == 2 + 3, "models in training, and saved ones"


def test_tenant_without_an_adapter_gets_one_over_anothers_share(tmp_path: Path) -> None:
    with served(tmp_path, max_samplers=4, limits={"samplers": 4}) as service:
        paths, bobs = saved(service.alice, 5), saved(service.bob, 2)
        service.backend.sampling.clear()
        pending = [sampled(service.alice, path) for path in paths[:4]]
        assert sampled(service.bob, bobs[0]).status_code == 429, "all are being sampled from"
        for path in (paths[0], paths[1], paths[4]):
            refused = sampled(service.alice, path)
            assert (refused.status_code, "your share is 2" in refused.text) == (429, True)
        pending += [sampled(service.alice, path) for path in paths[2:4]]
        service.backend.sampling.set()
        assert [fetched(service.alice, response) for response in pending] == [[6, 7]] * 6
        service.backend.sampling.clear()
        pending = [sampled(service.alice, path) for path in paths[2:4]]
        his = sampled(service.bob, bobs[0])
        assert his.status_code == 200
        pending.append(sampled(service.alice, paths[1]))
        assert pending[-1].status_code == 200, "nobody waits any more"
        service.backend.sampling.set()
        assert fetched(service.bob, his) == [6, 7]
        assert [fetched(service.alice, response) for response in pending] == [[6, 7]] * 3


def test_reserved_adapter_slot_expires(tmp_path: Path) -> None:
    with served(tmp_path, max_samplers=2, limits={"samplers": 2}) as service:
        paths, bobs = saved(service.alice, 2), saved(service.bob, 1)
        service.backend.sampling.clear()
        pending = [sampled(service.alice, path) for path in paths]
        assert sampled(service.bob, bobs[0]).status_code == 429
        assert sampled(service.alice, paths[0]).status_code == 429
        service.tick(11)
        pending.append(sampled(service.alice, paths[0]))
        service.backend.sampling.set()
        assert [fetched(service.alice, response) for response in pending] == [[6, 7]] * 3


def respond(number: int, tenant: str, responses: int = 1) -> Respond:
    return Respond(number, "p", SampleRequest([1], SamplingParams(1), num_samples=responses), tenant)


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ("a1 a1 a1 a1 a1 b1", [[0, 5, 1, 2], [3, 4]]),
        ("a1 a1 a1 b1 b1 b1", [[0, 3, 1, 4], [2, 5]]),
        ("a3 b2 b1 a1", [[0, 3], [1, 2]]),  # a request that does not fit waits, and so do those behind it
        ("a9 b1 a1 b1", [[0], [1, 2, 3]]),  # requests that are too large to share a batch run alone
        ("b1 b1 b1 b1 b1 a9", [[0, 1, 2, 3], [5], [4]]),
    ],
)
def test_tenants_take_turns(waiting: str, expected: list[list[int]]) -> None:
    left = [respond(number, code[0], int(code[1])) for number, code in enumerate(waiting.split())]
    turns, order = SampleTurns(), []
    while left:
        selected = turns.take(left, 4)
        order.append([command.number for command in selected])
        left = [command for command in left if command not in selected]
    assert order == expected
