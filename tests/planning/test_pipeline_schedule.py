"""Order and time of pipeline schedules: compared with Megatron's own tables and with hand computations."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megascend.planning.pipeline import Durations, TimedPass, simulate, stage_order, step_seconds

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


def test_slowest_stage_sets_the_pace() -> None:
    slow = Durations((2.0,), (4.0,))
    # The last stage has a forward pass before it, and the first one's backward pass after it.
    assert step_seconds([UNIT, slow], 10, 0.0, overlaps=False) == pytest.approx(1.0 + 10 * 6.0 + 2.0)


def test_transfers_delay_each_hop() -> None:
    seconds = step_seconds([UNIT] * 2, 1, 0.25, overlaps=True)
    assert seconds == pytest.approx(1.0 + 0.25 + 1.0 + 2.0 + 0.25 + 2.0)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (3, 1), (4, 2)])
def test_few_rounds_tell_the_time_of_many(stages: int, chunks: int) -> None:
    durations = [Durations((1.0 + 0.3 * stage,) * chunks, (2.0 + 0.1 * stage,) * chunks) for stage in range(stages)]
    for micro_batches in (20 * stages, 20 * stages + (1 if chunks == 1 else 0)):
        simulated = simulate(durations, micro_batches, 0.1, overlaps=chunks > 1)[-1].end
        assert step_seconds(durations, micro_batches, 0.1, overlaps=chunks > 1) == pytest.approx(simulated)


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
