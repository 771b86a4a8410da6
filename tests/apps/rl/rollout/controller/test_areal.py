"""AReaL's callbacks, from a stand-in that makes the calls of its trainers and workers (as of 2026-05-21)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from controller_doubles import ManualClock, Served

from megascend.apps.rl.rollout.controller.messages import BEARER

pytestmark = pytest.mark.waiting

META = {
    "type": "dataclass",
    "class_path": "areal.api.io_struct.WeightUpdateMeta",
    "data": {"type": "disk", "path": "/weights/weight_update_v1", "version": 1, "use_lora": False},
}


class ArealStandIn:
    """Client that posts like AReaL's ``infra.controller.rollout_callback.RolloutCallback`` and ``_send_callback``."""

    def __init__(self, controller_addr: str) -> None:
        self.controller_addr = controller_addr

    def post(self, endpoint: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = requests.post(f"http://{self.controller_addr}{endpoint}", json=payload or {}, timeout=60.0)
        answer.raise_for_status()
        return answer.json()

    def pause_generation(self) -> dict[str, Any]:
        return self.post("/callback/pause_generation")

    def continue_generation(self) -> dict[str, Any]:
        return self.post("/callback/continue_generation")

    def rollout_complete(self, task_id: int) -> dict[str, Any]:
        return self.post("/callback/rollout_complete", {"task_id": task_id})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def served(clock: ManualClock) -> Iterator[Served]:
    with Served(clock=clock, bearer=True) as served:
        yield served


@pytest.fixture
def areal(served: Served) -> ArealStandIn:
    return ArealStandIn(f"areal:{served.key.bearer_token(BEARER)}@{served.where}")


def test_a_trainer_pauses_and_continues_all_engines(served: Served, areal: ArealStandIn) -> None:
    for _ in range(2):
        assert areal.pause_generation() == {"status": "ok"}
        assert [engine.paused for engine in served.engines] == [True, True]
        assert served.state()[0] == ["AReaL"]
        assert areal.continue_generation() == {"status": "ok"}
        assert [engine.paused for engine in served.engines] == [False, False]
        assert served.state()[0] == []
    assert areal.continue_generation() == {"status": "ok"}  # nothing is paused


def test_a_trainer_that_is_gone_leaves_no_engine_paused(
    served: Served, areal: ArealStandIn, clock: ManualClock
) -> None:
    areal.pause_generation()
    served.thread.run(clock.advance(served.controller.limits.max_lease_s + 1))
    assert [engine.paused for engine in served.engines] == [False, False]
    assert served.state()[0] == []
    areal.pause_generation()  # the next trainer
    areal.continue_generation()
    assert [engine.paused for engine in served.engines] == [False, False]


def test_a_workers_callback_completes_the_rollout_of_its_number(served: Served, areal: ArealStandIn) -> None:
    with served.client() as client:
        client.expect(["7"], deadline_s=60)
        assert areal.rollout_complete(7) == {"status": "ok"}
        assert areal.rollout_complete(7) == {"status": "ok"}, "repeated by a worker that lost the answer"
        assert dict(client.results(["7"])) == {"7": {"task_id": 7}}
        assert areal.rollout_complete(7) == {"status": "ok"}, "and after its result was fetched"
        client.expect(["9"], deadline_s=60)
        client.fail("9", "out of memory")
    with pytest.raises(requests.HTTPError, match="400"):
        areal.rollout_complete(9)
    with pytest.raises(requests.HTTPError, match="400"):
        areal.rollout_complete(8)


@pytest.mark.parametrize("name", ["init_weights_group", "update_weights_xccl", "update_weights_disk"])
def test_updates_of_areal_are_refused(areal: ArealStandIn, name: str) -> None:
    with pytest.raises(requests.HTTPError, match="501") as raised:
        areal.post(f"/callback/{name}", {"meta": META, "param_specs": []})
    assert "WeightSync" in raised.value.response.json()["error"]


def test_strangers_and_owned_engines_are_refused(served: Served, areal: ArealStandIn) -> None:
    before = served.state()
    for address in (served.where, f"areal:{'0' * 64}@{served.where}", f"areal:@{served.where}"):
        with pytest.raises(requests.HTTPError, match="401"):
            ArealStandIn(address).pause_generation()
    assert served.state() == before
    with served.client() as client, client.claim("trainer"), pytest.raises(requests.HTTPError, match="500") as raised:
        areal.pause_generation()
    assert "belongs to 'trainer'" in raised.value.response.json()["error"]
    with Served() as closed, pytest.raises(requests.HTTPError, match="4"):  # bearer tokens are off
        ArealStandIn(f"areal:{closed.key.bearer_token(BEARER)}@{closed.where}").pause_generation()
