"""Mixtures of several sources: shares of the samples, orders, positions, and samples of several stores as one."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from megascend.apps.data.findings import Findings
from megascend.apps.data.order import Batches, SourceTurns
from megascend.apps.data.store import Samples, hold_out, write_store
from megascend.errors import DataError
from megascend.training.batch.sample import Sample

WEIGHTS = [[1.0], [1, 1], [0.7, 0.2, 0.1], [3, 1], [100, 1, 1, 1, 7], [0.3, 0.3, 0.4], [1, 2, 3, 4, 5, 6, 7], [999, 1]]


def published_order(weights: list[float], draws: int) -> list[int]:
    """Recompute the rule of docs/data.md: of the sources below their share the one whose next draw is due first."""
    shares = [Fraction(str(weight)) / sum(Fraction(str(other)) for other in weights) for weight in weights]
    counts, order = [0] * len(shares), []
    for draw in range(1, draws + 1):
        due = [
            (Fraction(counts[i] + 1) / shares[i], i)
            for i in range(len(shares))
            if Fraction(counts[i]) < shares[i] * draw
        ]
        _, source = min(due)
        counts[source] += 1
        order.append(source)
    return order


@pytest.mark.parametrize("weights", WEIGHTS)
def test_sources_are_within_one_sample_of_their_share(weights: list[float]) -> None:
    turns = SourceTurns(weights)
    order = [next(turns) for _ in range(400)]
    assert order == published_order(weights, 400)
    for source, weight in enumerate(weights):
        share, count = Fraction(str(weight)) / sum(Fraction(str(other)) for other in weights), 0
        for draws, choice in enumerate(order, start=1):
            count += choice == source
            assert abs(count - share * draws) < 1


SOURCES = [range(7), range(100, 103), range(200, 220)]


def stream(weights: list[float | None], batch: int = 4, seed: int = 3, sizes: list[range] = SOURCES) -> Batches[int]:
    samples = [number for part in sizes for number in part]
    return Batches(samples, batch, seed, True, mixture=list(zip(sizes, weights, strict=True)), on_changed="continue")


def test_weighted_source_is_read_in_epochs_of_its_own() -> None:
    batches = stream([2, 1, 1])
    draws = [sample for _ in range(20) for sample in next(batches)]
    parts = [[sample for sample in draws if sample in part] for part in SOURCES]
    assert [len(part) for part in parts] == [40, 20, 20]
    for part, source in zip(parts, SOURCES, strict=True):
        epochs = [part[start : start + len(source)] for start in range(0, len(part) - len(source) + 1, len(source))]
        assert all(sorted(epoch) == list(source) for epoch in epochs)
        assert len(epochs) == 1 or len({tuple(epoch) for epoch in epochs}) > 1, "epochs differ in their order"
    assert batches.progress.source_epochs == pytest.approx([40 / 7, 20 / 3, 1.0])
    assert batches.progress.epochs == pytest.approx(80 / 30)
    other = stream([2, 1, 1], seed=4)
    assert [sample for _ in range(20) for sample in next(other)] != draws


def test_epoch_without_weights_has_every_sample_once() -> None:
    batches = stream([None] * 3, batch=10)
    for _ in range(3):
        assert sorted(next(batches) + next(batches) + next(batches)) == sorted(n for part in SOURCES for n in part)


@pytest.mark.parametrize("weights", [[2.5, 1, 0.5], [None, None, None]])
@pytest.mark.parametrize("count", [0, 1, 5, 23])
def test_mixture_resumes_at_its_position(weights: list[float | None], count: int) -> None:
    batches = stream(weights)
    for _ in range(count):
        next(batches)
    resumed = stream(weights)
    resumed.load_state_dict(json.loads(json.dumps(batches.state_dict())))
    assert [next(resumed) for _ in range(30)] == [next(batches) for _ in range(30)]
    assert resumed.progress.epochs == batches.progress.epochs
    assert resumed.progress.source_epochs == batches.progress.source_epochs


def test_mixture_of_other_weights_or_sources_is_not_resumed() -> None:
    batches = stream([2, 1, 1])
    next(batches)
    state = json.loads(json.dumps(batches.state_dict()))
    for other in (stream([3, 1, 1]), stream([2, 1], sizes=SOURCES[:2]), Batches(range(30), 4, 3, True)):
        with pytest.raises(DataError, match=r"weights of data\.sources was \[2, 1, 1\] when it was saved and is"):
            other.load_state_dict(state)
    # One source has more samples: each begins a new epoch, with shares counted from there.
    longer = stream([2, 1, 1], sizes=[range(9), *SOURCES[1:]])
    longer.load_state_dict(state)
    assert longer.changes == "samples was [7, 3, 20] when it was saved and is [9, 3, 20] now; a new epoch begins"
    draws = [sample for _ in range(6) for sample in next(longer)]
    assert [sum(sample in part for sample in draws) for part in SOURCES] == [12 - sum(d in (7, 8) for d in draws), 6, 6]
    assert {7, 8} < set(draws)


def store(path: Path, first: int, documents: int, *, pairs: bool = False) -> Samples:
    def samples(number: int) -> list[Sample]:
        tokens = [[first + number, side, 2] for side in range(2 if pairs else 1)]
        return [
            Sample.causal(ids, **({"pair": number, "chosen": side == 0} if pairs else {}))
            for side, ids in enumerate(tokens)
        ]

    sources = {f"data ({path.name})": path.name, "chat template": "x"}
    write_store(path, ((number, samples(number)) for number in range(documents)), Findings(), sources)
    return Samples.open(path)


def test_joined_stores_number_documents_and_pairs_through(tmp_path: Path) -> None:
    stores = [store(tmp_path / "a", 0, 3, pairs=True), store(tmp_path / "b", 10, 2, pairs=True)]
    joined = Samples.join(stores)
    assert [int(sample.input_ids[0]) for sample in joined] == [0, 0, 1, 1, 2, 2, 10, 10, 11, 11]
    assert [sample.pair for sample in joined] == joined.documents.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert joined.source_numbers.tolist() == [0] * 6 + [1] * 4
    assert joined.lengths.tolist() == joined.supervised.tolist() == [2] * 10
    assert joined.sources == {"data (a)": "a", "data (b)": "b", "chat template": "x"}
    learned, held_out = hold_out(joined, 0.4, seed=1)
    parts = [held_out.source_samples(number) for number in range(2)]
    assert [s.pair for part in parts for s in part] == [s.pair for s in held_out]
    assert {s.pair for s in learned} | {s.pair for s in held_out} == {0, 1, 2, 3, 4}
    assert joined.fingerprint not in {store.fingerprint for store in stores}
