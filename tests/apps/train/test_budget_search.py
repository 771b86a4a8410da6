"""The search for the largest token budget that fits, with synthetic memory curves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megascend.apps.train.token_budget import BUDGET_MULTIPLE, MAX_TRIALS, BudgetSearch, largest_fitting

Peak = Callable[[int], float]


def search(
    peaks: list[Peak], limit: float, smallest: int = 100, largest: int = 1_000_000
) -> tuple[int | None, list[int]]:
    """Return the budget on which ranks with these memory curves agree, and the trials."""
    ranks = [BudgetSearch(smallest, largest, limit, before=peak(0)) for peak in peaks]
    trials, proposal = [], ranks[0].first(4096)
    while proposal:
        trials.append(proposal)
        fits = all(peak(proposal) <= limit for peak in peaks)
        for rank, peak in zip(ranks, peaks, strict=True):
            rank.add(proposal, peak(proposal), fits)
        proposal = min(rank.next() or 0 for rank in ranks)
    assert len({rank.best for rank in ranks}) == 1
    return ranks[0].best, trials


def linear(tokens: int) -> float:
    return 30e9 + 2.2e6 * tokens


def with_chunks(tokens: int) -> float:
    """Return the peak with output logits that stop growing at 4096 tokens."""
    return 30e9 + 2e6 * tokens + 3e5 * min(tokens, 4096)


def bent(tokens: int) -> float:
    """Return a peak that grows faster than linearly."""
    return 30e9 + 2e6 * tokens + max(0.0, 8e6 * (tokens - 20_000))


@pytest.mark.parametrize("peak", [linear, with_chunks], ids=["line", "chunks"])
def test_few_trials_approach_the_limit_from_below(peak: Peak):
    best, trials = search([peak], 130e9)
    assert best is not None
    assert 0.9 * 130e9 < peak(best) <= 130e9
    assert all(peak(tokens) <= 130e9 for tokens in trials)
    assert len(trials) <= 4
    assert best % BUDGET_MULTIPLE == 0


def test_failed_trial_is_followed_by_smaller_ones():
    best, trials = search([bent], 130e9)
    assert best is not None
    assert bent(best) <= 130e9 < bent(max(trials))
    assert 4096 < best < max(trials)
    assert len(trials) <= MAX_TRIALS


def test_ranks_agree_on_the_smallest_budget():
    best, trials = search([linear, lambda tokens: 60e9 + 2.2e6 * tokens], 130e9)
    single, _ = search([lambda tokens: 60e9 + 2.2e6 * tokens], 130e9)
    assert best == single
    assert all(60e9 + 2.2e6 * tokens <= 130e9 for tokens in trials)


def test_budget_is_at_most_the_step_size():
    assert search([linear], 130e9, largest=9000) == (9000, [4096, 9000])
    assert search([linear], 130e9, largest=3000) == (3000, [3000])


def test_budget_is_at_least_the_longest_sample():
    best, trials = search([linear], 45e9, smallest=5000)
    assert trials[0] == 5000
    assert best is not None
    assert best >= 5000


def test_budget_when_little_or_nothing_fits():
    assert search([linear], 31e9) == (256, [4096, 256])
    assert search([linear], 30.1e9) == (None, [4096, 100])


def test_out_of_memory_tries_the_smallest():
    memory = BudgetSearch(100, 10_000, 50e9, 30e9)
    memory.add(4096, float("inf"), fits=False)
    assert memory.next() == 100


def test_prediction_is_the_largest_that_fits():
    for limit in (100, 5000, 5001, 123_456, 10**6):
        budget = largest_fitting(100, 200_000, lambda tokens, limit=limit: tokens <= limit)
        assert budget <= max(limit, 100)
        assert budget > min(limit, 200_000) - 2 * BUDGET_MULTIPLE or budget == 100
