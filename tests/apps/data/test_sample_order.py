"""Order of samples, and fingerprints that distinguish them."""

from __future__ import annotations

import json

import pytest

from megascend.apps.data.order import Batches, batches, fingerprint_of
from megascend.errors import DataError
from megascend.training.batch.sample import Sample


def test_every_epoch_holds_every_sample_once() -> None:
    stream = batches(range(10), 4, seed=1, shuffle=True)
    draws = [sample for _ in range(5) for sample in next(stream)]
    first, second = draws[:10], draws[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert stream.progress.epochs == 2.0


def test_the_seed_decides_the_order() -> None:
    def order(seed: int, shuffle: bool = True) -> list[int]:
        return next(batches(range(50), 50, seed, shuffle))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1, shuffle=False) == list(range(50))


@pytest.mark.parametrize("drawn", [0, 1, 3, 7])
def test_resumed_stream_continues_at_its_position(drawn: int) -> None:
    stream = batches(range(10), 4, seed=3, shuffle=True)
    for _ in range(drawn):
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


BEFORE = {
    "data (data.path)": "a",
    "chat template": "b",
    "date in the chat template": "2024-02-29",
    "tokenizer.json": "c",
}
CHANGES = {
    "data": ({"data (data.path)": "x"}, r"\. The data changed, by: data \(data\.path\)\. Bring back"),
    "template": ({"chat template": "x"}, r"The samples changed and the data did not, by: chat template\. Bring back"),
    "tokenizer": ({"tokenizer.json": "x"}, r"the data did not, by: tokenizer\.json\."),
    "date": (
        {"date in the chat template": "2024-03-01"},
        r"the data did not, by: date in the chat template \(2024-02-29 -> 2024-03-01\)\..*; template_date: 2024-02-29 is that",
    ),
    "data and template": (
        {"data (data.path)": "x", "chat template": "x"},
        r"The data changed, by: data .*, chat template\.",
    ),
    "unknown": ({}, r"and is two now\. Bring back"),
}


def changed_stream(count: int, **changes: str) -> Batches[int]:
    """Build a stream whose samples differ from those of :data:`BEFORE`, and which may continue with them."""
    return batches(range(count), 4, 3, True, "two", sources=BEFORE | changes, on_changed="continue")


@pytest.mark.parametrize("change", CHANGES)
def test_changed_samples_and_changed_data_are_distinguished(change: str) -> None:
    sources, message = CHANGES[change]
    state = json.loads(json.dumps(batches(range(10), 4, 3, True, "one", sources=BEFORE).state_dict()))
    stream = batches(range(10), 4, 3, True, "two", sources=BEFORE | sources, on_changed="error")
    with pytest.raises(DataError, match="cannot resume the data order: fingerprint was one.*" + message) as caught:
        stream.load_state_dict(state)
    assert "data.on_changed: continue" in str(caught.value)
    del state["sources"]  # earlier versions did not write sources
    with pytest.raises(DataError, match=r"fingerprint was one when it was saved and is two now\. Bring back"):
        stream.load_state_dict(state)


def test_stream_continues_with_changed_samples() -> None:
    """Continue at the same position if the number of samples, and so the order, is equal; else begin a new epoch."""
    stream = batches(range(10), 4, 3, True, "one", sources=BEFORE)
    for _ in range(4):
        next(stream)
    state = stream.state_dict()
    same = changed_stream(10, **{"chat template": "x"})
    same.load_state_dict(state)
    assert "by: chat template" in same.changes
    assert [next(same) for _ in range(3)] == [next(stream) for _ in range(3)]
    extra = changed_stream(12)
    extra.load_state_dict(state)
    assert extra.changes.endswith("; a new epoch begins")
    assert extra.progress.epochs == 2.0
    assert sorted(next(extra) + next(extra) + next(extra)) == list(range(12))
    with pytest.raises(DataError, match="shuffle was True"):
        batches(range(10), 4, 3, False, "one", on_changed="continue").load_state_dict(state)


def test_fingerprint_depends_on_order_token_ids_and_weights():
    first, second = Sample.causal([1, 2, 3, 4]), Sample.causal([5, 6, 7])
    variants = ([second, first], [first], [first, Sample.causal([5, 6, 8])], [first, Sample.causal([5, 6, 7], 2)])
    expected = fingerprint_of([first, second])
    assert expected == fingerprint_of([Sample.causal([1, 2, 3, 4]), Sample.causal([5, 6, 7])])
    assert len({expected, *map(fingerprint_of, variants)}) == 5


def test_changed_sources_raise_without_on_changed() -> None:
    """Refuse a changed chat template that leaves RL prompts' fingerprint equal; resume checkpoints without sources."""
    state = batches(range(4), 2, seed=1, shuffle=True, fingerprint="a", sources={"chat template": "x"}).state_dict()
    same = batches(range(4), 2, seed=1, shuffle=True, fingerprint="a", sources={"chat template": "x"})
    same.load_state_dict(state)
    other = batches(range(4), 2, seed=1, shuffle=True, fingerprint="a", sources={"chat template": "y"})
    with pytest.raises(DataError, match=r"cannot resume the data order: .* by: chat template$"):
        other.load_state_dict(state)
    other.load_state_dict(state | {"sources": {}})
    chosen = batches(range(4), 2, 1, True, "a", sources={"chat template": "y"}, on_changed="error")
    chosen.load_state_dict(state)
