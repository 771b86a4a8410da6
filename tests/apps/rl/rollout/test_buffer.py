"""Bounded staleness: no group older than the bound is returned, in any order of answers, and none is lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascend.apps.rl.rollout.buffer import RolloutBuffer
from megascend.apps.rl.rollout.group import Trajectory, TrajectoryGroup
from megascend.errors import ConfigError, DataError


def group(number: int, version: int) -> TrajectoryGroup:
    response = Trajectory((5, 6), (1, 2), (-0.5, -0.1), 1.0, "stop", version, version + 1)
    return TrajectoryGroup(number, (response,))


def fill(buffer: RolloutBuffer, step: int, version: int) -> list[int]:
    """Dispatch prompts until the buffer is full; return their numbers."""
    numbers = []
    for _ in range(buffer.room(step, version)):
        dispatch = buffer.next_retry(version) or buffer.dispatch({"prompt": "p"}, version)
        numbers.append(dispatch.number)
    return numbers


def test_without_lag_trainer_and_engines_take_turns() -> None:
    buffer = RolloutBuffer(batch=2, max_lag=0)
    assert fill(buffer, 0, 0) == [0, 1]
    buffer.finished(group(1, 0))
    assert buffer.take(0) is None
    buffer.finished(group(0, 0))
    assert [item.number for item in buffer.take(0) or ()] == [0, 1]
    assert buffer.room(1, 0) == 0, "the trainer is learning: a sample drawn now would be a step late"
    assert fill(buffer, 1, 1) == [2, 3]


def test_in_order_waits_for_the_slowest_group() -> None:
    buffer = RolloutBuffer(batch=2, max_lag=1, in_order=True)
    fill(buffer, 0, 0)
    for number in (1, 2, 3):
        buffer.finished(group(number, 0))
    assert buffer.take(0) is None
    buffer.finished(group(0, 0), equal=True)
    assert [item.number for item in buffer.take(0) or ()] == [1, 2]
    assert buffer.counts.equal == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.booleans(), st.integers(0, 10**6))
def test_no_group_is_older_than_the_bound_and_every_prompt_is_accounted_for(
    batch: int, max_lag: int, sync_every: int, in_order: bool, seed: int
) -> None:
    sync_every = min(sync_every, max_lag + 1)
    draw = random.Random(seed)
    buffer = RolloutBuffer(batch, max_lag, in_order=in_order)
    flying: list[tuple[int, int]] = []
    step = version = failures = idle = 0
    while step < 12:
        for _ in range(buffer.room(step, version)):
            dispatch = buffer.next_retry(version) or buffer.dispatch({}, version)
            flying.append((dispatch.number, version))
        for _ in range(draw.randint(0, len(flying))):
            number, since = flying.pop(draw.randrange(len(flying)))
            fate = draw.random()
            if fate < 0.1:
                buffer.failed(number)
                failures += 1
            elif fate < 0.3:
                buffer.finished(group(number, since), equal=True)
            else:
                buffer.finished(group(number, since))
        if draw.random() < 0.1:  # a checkpoint, and a new process that continues from it
            state = json.loads(json.dumps(buffer.state_dict()))
            buffer = RolloutBuffer(batch, max_lag, in_order=in_order)
            buffer.load_state_dict(state)
            flying.clear()
        groups = buffer.take(step)
        if groups is not None:
            assert len(groups) == batch
            assert all(0 <= step - item.version <= max_lag for item in groups)
            if in_order:
                assert [item.number for item in groups] == sorted(item.number for item in groups)
            step += 1
            version = step - step % sync_every
        idle = 0 if groups is not None else idle + 1
        assert idle < 400, "the trainer waits forever"
    counts, state = buffer.counts, buffer.state_dict()
    ready, waiting = len(state["ready"]), len(state["waiting"])
    assert counts.learned == 12 * batch
    assert counts.dispatched == counts.learned + counts.stale + counts.equal + ready + waiting


def test_the_state_survives_json_exactly() -> None:
    buffer = RolloutBuffer(batch=2, max_lag=1)
    fill(buffer, 0, 0)
    odd = Trajectory((9, 9), (7,), (-0.1 - 0.2,), 1 / 3, "length", 0, 0, sampled=(True,), rewards={"exact": 0.1})
    buffer.finished(TrajectoryGroup(2, (odd, odd)))
    state: dict[str, Any] = json.loads(json.dumps(buffer.state_dict()))
    repeated = RolloutBuffer(batch=2, max_lag=1)
    repeated.load_state_dict(state)
    assert repeated.state_dict() == buffer.state_dict()
    assert repeated.room(0, 0) == 3  # one group is ready, and no prompt is in flight
    assert [repeated.next_retry(5) for _ in range(4)][-1] is None
    assert repeated.room(0, 0) == 0


def test_invalid_buffer_calls_raise_errors() -> None:
    with pytest.raises(ConfigError, match="batch >= 1"):
        RolloutBuffer(0, 0)
    buffer = RolloutBuffer(1, 0)
    fill(buffer, 0, 3)
    with pytest.raises(DataError, match="missed an update"):
        buffer.finished(group(0, 2))
    buffer.finished(group(0, 3))
    with pytest.raises(DataError, match="answered twice"):
        buffer.finished(group(0, 3))
    with pytest.raises(DataError, match="one log-probability a token"):
        Trajectory((5,), (1, 2), (-0.5,), 0.0, "stop", 0, 0)
