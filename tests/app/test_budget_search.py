"""The search for the largest token budget that fits, on memories that are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megascend.app.token_budget import STEP, TRIALS, BudgetSearch, predicted

Peak = Callable[[int], float]


def search(
    peaks: list[Peak], limit: float, smallest: int = 100, largest: int = 1_000_000
) -> tuple[int | None, list[int]]:
    """What ranks with these memories agree on, and what they have tried."""
    ranks = [BudgetSearch(smallest, largest, limit, before=peak(0)) for peak in peaks]
    tried, proposal = [], ranks[0].first(4096)
    while proposal:
        tried.append(proposal)
        fits = all(peak(proposal) <= limit for peak in peaks)
        for rank, peak in zip(ranks, peaks, strict=True):
            rank.add(proposal, peak(proposal), fits)
        proposal = min(rank.next() or 0 for rank in ranks)
    assert len({rank.best for rank in ranks}) == 1
    return ranks[0].best, tried


def linear(tokens: int) -> float:
    return 30e9 + 2.2e6 * tokens


def with_chunks(tokens: int) -> float:
    """The output head's logits stop growing at 4096 tokens."""
    return 30e9 + 2e6 * tokens + 3e5 * min(tokens, 4096)


def bent(tokens: int) -> float:
    """More than a line promises."""
    return 30e9 + 2e6 * tokens + max(0.0, 8e6 * (tokens - 20_000))


@pytest.mark.parametrize("peak", [linear, with_chunks], ids=["line", "chunks"])
def test_a_few_trials_come_close_to_the_limit_from_below(peak: Peak):
    best, tried = search([peak], 130e9)
    assert best is not None
    assert 0.9 * 130e9 < peak(best) <= 130e9
    assert all(peak(tokens) <= 130e9 for tokens in tried)
    assert len(tried) <= 4
    assert best % STEP == 0


def test_a_trial_that_does_not_fit_is_followed_by_smaller_ones():
    best, tried = search([bent], 130e9)
    assert best is not None
    assert bent(best) <= 130e9 < bent(max(tried))
    assert 4096 < best < max(tried)
    assert len(tried) <= TRIALS


def test_ranks_agree_on_the_one_with_least_room():
    best, tried = search([linear, lambda tokens: 60e9 + 2.2e6 * tokens], 130e9)
    alone, _ = search([lambda tokens: 60e9 + 2.2e6 * tokens], 130e9)
    assert best == alone
    assert all(60e9 + 2.2e6 * tokens <= 130e9 for tokens in tried)


def test_no_more_than_a_step_can_use():
    assert search([linear], 130e9, largest=9000) == (9000, [4096, 9000])
    assert search([linear], 130e9, largest=3000) == (3000, [3000])


def test_at_least_the_longest_sample():
    best, tried = search([linear], 45e9, smallest=5000)
    assert tried[0] == 5000
    assert best is not None
    assert best >= 5000


def test_what_does_not_fit_at_all():
    assert search([linear], 31e9) == (256, [4096, 256])
    assert search([linear], 30.1e9) == (None, [4096, 100])


def test_memory_that_runs_out_ends_with_the_smallest():
    memory = BudgetSearch(100, 10_000, 50e9, 30e9)
    memory.add(4096, float("inf"), fits=False)
    assert memory.next() == 100


def test_a_prediction_is_the_largest_that_fits():
    for limit in (100, 5000, 5001, 123_456, 10**6):
        found = predicted(100, 200_000, lambda tokens, limit=limit: tokens <= limit)
        assert found <= max(limit, 100)
        assert found > min(limit, 200_000) - 2 * STEP or found == 100
