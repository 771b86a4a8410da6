"""Order and time of pipeline schedules: compared with Megatron's own tables and with hand computations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise, product

import pytest

from megascend.apps.plan.pipeline import Durations, TimedPass, balanced_chunks, least_seconds, simulate, step_seconds
from megascend.runtime.topology.schedule import layers_in_flight, stage_order

UNIT = Durations((1.0,), (2.0,))


def ends_without_overlap(spans: list[TimedPass], stage: int) -> bool:
    passes = sorted((span for span in spans if span.stage == stage), key=lambda span: span.start)
    return all(before.end <= after.start for before, after in pairwise(passes))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 8), (4, 3)])
def test_plain_schedule_has_the_bubble_of_the_formula(stages: int, micro_batches: int) -> None:
    # Narayanan et al. 2021, section 2.2.1: m + p - 1 passes of each kind.
    seconds = step_seconds([UNIT] * stages, micro_batches, 0.0, overlaps=False)
    assert seconds == pytest.approx((micro_batches + stages - 1) * 3.0)


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 5, 16)])
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, chunks: int, micro_batches: int) -> None:
    part = Durations((1.0 / chunks,) * chunks, (2.0 / chunks,) * chunks)
    seconds = step_seconds([part] * stages, micro_batches, 0.0, overlaps=True)
    assert seconds == pytest.approx(3.0 * micro_batches + (stages - 1) * 3.0 / chunks)


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"), [(2, 1, 1), (3, 1, 7), (5, 1, 3), (2, 3, 4), (4, 2, 4), (4, 3, 16)]
)
def test_no_step_is_faster_than_its_bound(stages: int, chunks: int, micro_batches: int) -> None:
    generator = random.Random(stages + chunks)
    for transfer in (0.0, 0.5):
        durations = [
            Durations(*(tuple(generator.uniform(0.1, 2.0) for _ in range(chunks)) for _ in range(2)))
            for _ in range(stages)
        ]
        seconds = simulate(durations, micro_batches, transfer, overlaps=chunks > 1)[-1].end
        bound = least_seconds(durations, micro_batches, transfer)
        busiest = micro_batches * max(stage.total for stage in durations)
        assert busiest <= bound <= seconds * (1 + 1e-9)
        if micro_batches == 1 and chunks == 1 and not transfer:
            assert bound == pytest.approx(seconds)


def test_every_pass_runs_once_and_waits_for_its_neighbour() -> None:
    stages, chunks, micro_batches = 4, 3, 8
    spans = simulate([Durations((1.0,) * chunks, (2.0,) * chunks)] * stages, micro_batches, 0.5, overlaps=True)
    assert len(spans) == len({(s.stage, s.forward, s.chunk, s.micro_batch) for s in spans}) == 2 * stages * chunks * 8
    assert all(ends_without_overlap(spans, stage) for stage in range(stages))
    ends = {(s.stage, s.forward, s.chunk, s.micro_batch): s.end for s in spans}
    for span in spans:
        if span.forward and span.stage:
            assert span.start >= ends[span.stage - 1, True, span.chunk, span.micro_batch] + 0.5
        if not span.forward and span.stage < stages - 1:
            assert span.start >= ends[span.stage + 1, False, span.chunk, span.micro_batch] + 0.5


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(2, 1, 8), (4, 1, 2), (4, 2, 8), (4, 3, 32)])
def test_layers_in_flight_are_those_of_the_papers_formula(stages: int, chunks: int, micro_batches: int) -> None:
    # Narayanan et al. 2021, section 2.2, for chunks of one size.
    for stage in range(stages):
        passes = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1 if chunks > 1 else stages - stage
        expected = 5 * min(passes, micro_batches * chunks)
        assert layers_in_flight(stage, stages, (5,) * chunks, micro_batches) == expected


def test_layers_in_flight_of_uneven_chunks() -> None:
    # The first stage runs both chunks of both micro batches before a backward pass.
    assert layers_in_flight(0, 2, (1, 10), 2) == 22
    # The last one keeps two micro batches of its first chunk and one of its second.
    assert layers_in_flight(1, 2, (1, 10), 2) == 12
    assert layers_in_flight(1, 2, (10, 1), 2) == 21


@pytest.mark.usefixtures("megatron_imported")
@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 5, 12)])
def test_interleaved_order_is_that_of_megatrons_table(stages: int, chunks: int, micro_batches: int) -> None:
    from megatron.core.pipeline_parallel import schedules

    table = schedules.get_schedule_table(micro_batches, chunks, stages)
    for stage in range(stages):
        order = stage_order(stage, stages, chunks, micro_batches)
        forwards = [(index, chunk) for forward, chunk, index in order if forward]
        backwards = [(index, chunks - 1 - chunk) for forward, chunk, index in order if not forward]
        assert forwards == table
        assert backwards == table
        # schedules.get_pp_rank_microbatches, which needs process groups: two for each later stage, and whole rounds.
        warmup = min(2 * (stages - stage - 1) + (chunks - 1) * stages, micro_batches * chunks)
        assert [forward for forward, _, _ in order[: warmup + 2]] == [True] * (warmup + 1) + [
            warmup == micro_batches * chunks
        ]


def divisions(layers: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """Yield every division of layers over chunks of which only the first and the last one may be empty."""
    for inner in product(range(1, layers + 1), repeat=chunks - 2):
        for first in range(layers - sum(inner) + 1):
            yield first, *inner, layers - sum(inner) - first


def busiest(sizes: tuple[int, ...], layers: tuple[float, ...], first: float, last: float, stages: int) -> float:
    borders = [0, *accumulate(sizes)]
    times = [sum(layers[start:end]) for start, end in pairwise(borders)]
    times[0] += first
    times[-1] += last
    return max(sum(times[stage::stages]) for stage in range(stages))


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize(("first", "last"), [(0.0, 0.0), (0.25, 0.5), (0.25, 2.25)])
def test_balanced_chunks_are_the_best_of_all_divisions(stages: int, chunks: int, first: float, last: float) -> None:
    for dense, count in ((0, 7), (0, 10), (3, 9)):
        layers = (0.5,) * dense + (1.0,) * (count - dense)
        sizes = balanced_chunks(layers, first, last, stages, chunks)
        assert sizes is not None
        assert sum(sizes) == count
        assert min(sizes[1:-1], default=1) >= 1
        best = min(busiest(other, layers, first, last, stages) for other in divisions(count, stages * chunks))
        # Layers of two kinds are balanced step by step, to half a layer.
        assert busiest(sizes, layers, first, last, stages) <= best + (0.5 if dense else 1e-9)


def test_too_few_layers_for_a_pipeline_have_no_division() -> None:
    assert balanced_chunks((1.0,) * 2, 0.0, 0.0, 4, 1) == (0, 1, 1, 0)
    assert balanced_chunks((1.0,), 0.0, 0.0, 4, 1) is None
