"""Properties of the micro-batch plan for any samples; plans equal those of the plain algorithms, with far fewer steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascend.errors import DataError
from megascend.training.batch.packing import plan_micro_batches, shard, split_to

BUDGET = 100


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=30))
    pairs = [None] * len(lengths)
    for start in range(0, len(lengths) - 1, 2):
        if draw(st.booleans()):
            pairs[start] = pairs[start + 1] = f"pair {start}"
    return lengths, pairs, draw(st.booleans())


def cost(lengths, members, packing):
    """Count the tokens of a micro batch, padding included."""
    selected = [lengths[index] for index in members]
    return sum(selected) if packing else max(selected, default=0) * len(selected)


def check_plan(plan, lengths, pairs, packing):
    assert sorted(index for members in plan for index in members) == list(range(len(lengths)))
    for members in plan:
        assert cost(lengths, members, packing) <= BUDGET
    for pair in set(pairs) - {None}:
        shared = [set(members) & {i for i, p in enumerate(pairs) if p == pair} for members in plan]
        assert sorted(map(len, shared))[-1] == 2


@given(batches())
def test_every_sample_is_in_one_micro_batch_within_the_budget(batch):
    lengths, pairs, packing = batch
    check_plan(plan_micro_batches(lengths, pairs, BUDGET, packing), lengths, pairs, packing)


@given(batches(), st.integers(1, 40))
def test_splitting_reaches_the_count_and_breaks_no_rule(batch, count):
    lengths, pairs, packing = batch
    plan = plan_micro_batches(lengths, pairs, BUDGET, packing)
    parts = split_to(plan, count, lengths, pairs)
    assert len(parts) == max(count, len(plan))
    check_plan(parts, lengths, pairs, packing)


@given(batches(), st.integers(1, 8))
def test_shares_cover_the_list_and_are_balanced(batch, parts):
    lengths, pairs, _ = batch
    shares = shard(lengths, pairs, parts)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= 100  # the heaviest unit: a pair of two samples of 50


def test_a_sample_over_the_budget_names_the_setting():
    with pytest.raises(DataError, match=r"sample 1 needs 120 tokens.*batching\.micro_batch_tokens=100"):
        plan_micro_batches([10, 120], [None, None], BUDGET, packing=True)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("lengths", "pairs"), [([100], [None]), ([50, 50], ["pair", "pair"])])
def test_budget_is_the_most_that_fits(lengths, pairs, packing):
    assert plan_micro_batches(lengths, pairs, BUDGET, packing) == [list(range(len(lengths)))]
    with pytest.raises(DataError, match=r"over batching\.micro_batch_tokens=99"):
        plan_micro_batches(lengths, pairs, BUDGET - 1, packing)


# --- the same algorithms, written out: every sum is formed again at every look ---


def tokens(lengths, members):
    return sum(lengths[index] for index in members)
