"""Properties of the micro-batch plan for any samples; plans equal those of the plain algorithms, with far fewer steps."""

import random
import sys

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


def units_written_out(pairs):
    return [
        [index] if pair is None else [other for other, value in enumerate(pairs) if value == pair]
        for index, pair in enumerate(pairs)
        if pair is None or pairs.index(pair) == index
    ]


def first_fit_written_out(lengths, pairs, budget, packing, kinds=None):
    plan = []
    for unit in sorted(units_written_out(pairs), key=lambda unit: max(lengths[index] for index in unit), reverse=True):
        for members in plan:
            same_kind = packing or kinds is None or kinds[members[0]] == kinds[unit[0]]
            if same_kind and cost(lengths, members + unit, packing) <= budget:
                members += unit
                break
        else:
            plan.append(list(unit))
    return plan


def split_written_out(plan, count, lengths, pairs):
    plan = [list(members) for members in plan]
    all_units = units_written_out(pairs)
    while len(plan) < count:
        units = [
            list({all_units.index(u): u for i in members for u in all_units if i in u}.values()) for members in plan
        ]
        divisible = [position for position, inside in enumerate(units) if len(inside) > 1]
        if not divisible:
            plan.append([])
            continue
        position = max(divisible, key=lambda position: tokens(lengths, plan[position]))
        halves = [[], []]
        for unit in sorted(units[position], key=lambda unit: tokens(lengths, unit), reverse=True):
            halves[tokens(lengths, halves[0]) > tokens(lengths, halves[1])] += unit
        plan = plan[:position] + plan[position + 1 :] + halves
    return plan


def shares_written_out(lengths, pairs, parts):
    shares = [[] for _ in range(parts)]
    for unit in sorted(units_written_out(pairs), key=lambda unit: tokens(lengths, unit), reverse=True):
        min(shares, key=lambda share: tokens(lengths, share)).extend(unit)
    return [sorted(share) for share in shares]


@given(batches(), st.integers(1, 40), st.integers(1, 8), st.data())
def test_plans_are_those_of_the_algorithms_written_out(batch, count, parts, data):
    lengths, pairs, packing = batch
    kinds = None
    if data.draw(st.booleans()):
        letters = data.draw(st.lists(st.sampled_from("abc"), min_size=len(lengths), max_size=len(lengths)))
        kinds = [letters[index if pair is None else pairs.index(pair)] for index, pair in enumerate(pairs)]
    budget = data.draw(st.integers(BUDGET, 400))
    plan = plan_micro_batches(lengths, pairs, budget, packing, kinds)
    assert plan == first_fit_written_out(lengths, pairs, budget, packing, kinds)
    assert split_to(plan, count, lengths, pairs) == split_written_out(plan, count, lengths, pairs)
    assert shard(lengths, pairs, parts) == shares_written_out(lengths, pairs, parts)


class Counted(list):
    """Lengths that count how often one is read."""

    reads = 0

    def __getitem__(self, index):
        Counted.reads += 1
        return super().__getitem__(index)


def steps_of(function):
    """Count the lines that run and the lengths that are read."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    Counted.reads, before = 0, sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines + Counted.reads


def work(count, packing):
    """Count the steps of planning, of splitting to twice as many micro batches, and of sharding ``count`` samples."""
    lengths = Counted(random.Random(0).randint(1, 1000) for _ in range(count))
    pairs = [index // 2 if index % 4 < 2 else None for index in range(count)]
    plan = plan_micro_batches(lengths, pairs, 4000, packing)
    return [
        steps_of(lambda: plan_micro_batches(lengths, pairs, 4000, packing)),
        steps_of(lambda: split_to(plan, 2 * len(plan), lengths, pairs)),
        steps_of(lambda: shard(lengths, pairs, count // 64)),
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_work_grows_with_the_samples_and_not_with_their_square(packing):
    for small, large in zip(work(500, packing), work(4000, packing), strict=True):
        assert large < 8 * 2 * small, "eight times the samples, and less than twice as many steps for each"
