"""The order in which samples come, and what tells samples from others."""

from __future__ import annotations

import json

import pytest

from megascend.batch.sample import Sample
from megascend.data.order import batches, fingerprint_of
from megascend.errors import DataError


def test_every_epoch_holds_every_sample_once() -> None:
    stream = batches(range(10), 4, seed=1, shuffle=True)
    drawn = [sample for _ in range(5) for sample in next(stream)]
    first, second = drawn[:10], drawn[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert stream.epochs == 2.0


def test_the_seed_decides_the_order() -> None:
    def order(seed: int, shuffle: bool = True) -> list[int]:
        return next(batches(range(50), 50, seed, shuffle))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1, shuffle=False) == list(range(50))


@pytest.mark.parametrize("done", [0, 1, 3, 7])
def test_a_resumed_stream_goes_on_where_it_stood(done: int) -> None:
    stream = batches(range(10), 4, seed=3, shuffle=True)
    for _ in range(done):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = batches(range(10), 4, seed=3, shuffle=True)
    resumed.load_state_dict(state)
    assert [next(resumed) for _ in range(6)] == [next(stream) for _ in range(6)]


def test_a_stream_does_not_resume_on_other_data() -> None:
    state = batches(range(10), 4, seed=3, shuffle=True).state_dict()
    with pytest.raises(DataError, match=r"seed was 3, and is 4|seed was 3 when"):
        batches(range(10), 4, seed=4, shuffle=True).load_state_dict(state)
    with pytest.raises(DataError, match="samples was 10"):
        batches(range(11), 4, seed=3, shuffle=True).load_state_dict(state)
    with pytest.raises(DataError, match="fingerprint was  when it was saved and is other now"):
        batches(range(10), 4, seed=3, shuffle=True, fingerprint="other").load_state_dict(state)

    with pytest.raises(DataError, match="no training samples"):
        batches([], 4, seed=3, shuffle=True)


def test_a_fingerprint_tells_token_ids_and_weights_apart():
    of = [Sample.causal([1, 2, 3, 4]), Sample.causal([5, 6, 7])]
    others = ([of[1], of[0]], [of[0]], [of[0], Sample.causal([5, 6, 8])], [of[0], Sample.causal([5, 6, 7], 2)])
    assert fingerprint_of(of) == fingerprint_of([Sample.causal([1, 2, 3, 4]), Sample.causal([5, 6, 7])])
    assert len({fingerprint_of(of), *map(fingerprint_of, others)}) == 5
