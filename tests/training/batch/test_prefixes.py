"""Samples with common prefixes are computed together: rows are the distinct prefixes of the samples, however the tree looks."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascend import Sample
from megascend.training.batch.images import ImageSources
from megascend.training.batch.packing import plan_micro_batches
from megascend.training.batch.prefixes import KEYS_PER_TOKEN, PrefixPlan, plan_prefixes

NO_LIMIT = 10**6


def sample(ids: list[int], **fields) -> Sample:
    return Sample(input_ids=ids, target_ids=ids, weights=[1.0] * len(ids), **fields)


def plan(
    samples: list[Sample], limit: int = NO_LIMIT, minimum: int | None = 1, pairs=None, kinds=None
) -> PrefixPlan | None:
    count = len(samples)
    return plan_prefixes(samples, kinds or [""] * count, pairs or [None] * count, limit, minimum)


def members_by_unit(planned: PrefixPlan) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for index in sorted(range(len(planned.order)), key=planned.order.__getitem__):
        members.setdefault(planned.unit[index], []).append(index)
    return list(members.values())


def distinct_prefixes(samples: list[Sample]) -> int:
    return len({tuple(sample.input_ids[: end + 1].tolist()) for sample in samples for end in range(len(sample))})


# Few tokens, so that forks are frequent at every depth.
token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=2, max_size=12)


@given(token_lists)
@settings(deadline=None)
def test_computed_tokens_are_the_distinct_prefixes(lists: list[list[int]]) -> None:
    samples = [sample(ids) for ids in lists]
    planned = plan(samples)
    computed = sum(map(len, lists)) if planned is None else sum(planned.costs([len(ids) for ids in lists]))
    assert computed == distinct_prefixes(samples)


@given(token_lists, st.integers(1, 30), st.integers(1, 4))
@settings(deadline=None)
def test_units_keep_the_limits_and_their_common_tokens_are_equal(
    lists: list[list[int]], limit: int, minimum: int
) -> None:
    samples = [sample(ids) for ids in lists]
    planned = plan(samples, limit, minimum)
    if planned is None:
        return
    costs = planned.costs([len(ids) for ids in lists])
    for members in members_by_unit(planned):
        if len(members) > 1:
            assert sum(costs[index] for index in members) <= limit
            assert sum(len(lists[index]) for index in members) <= KEYS_PER_TOKEN * limit
        assert planned.common[members[0]] == 0
        for before, index in pairwise(members):
            common = planned.common[index]
            assert common == 0 or common >= minimum
            assert lists[before][:common] == lists[index][:common]


def test_auto_shares_only_long_prefixes_that_are_worth_it() -> None:
    prefix = list(range(64))
    branches = [sample(prefix + [number]) for number in range(4)]
    planned = plan(branches, minimum=None)
    assert planned is not None
    assert sorted(planned.common) == [0, 64, 64, 64]
    assert plan([sample(prefix[:63] + [100 + number, 0]) for number in range(4)], minimum=None) is None
    other = [sample([1000 + number] * 2000) for number in range(2)]
    assert plan([*branches, *other], minimum=None) is None


def test_a_group_above_the_limit_is_cut_and_each_part_computes_the_prompt() -> None:
    prompt = list(range(100, 110))
    samples = [sample(prompt + [number] * 5) for number in range(6)]
    planned = plan(samples, limit=20)
    assert planned is not None
    assert [len(members) for members in members_by_unit(planned)] == [2, 2, 2]
    assert sum(planned.costs([15] * 6)) == 3 * 20


def test_pairs_stay_together_and_share_with_other_pairs_of_their_prompt() -> None:
    prompt = list(range(100, 110))
    samples = [sample(prompt + [number] * 3) for number in range(4)]
    planned = plan(samples, pairs=["a", "b", "b", "a"])
    assert planned is not None
    assert members_by_unit(planned) == [[0, 1, 2, 3]]
    cut = plan(samples, limit=18, pairs=["a", "b", "b", "a"])
    assert cut is not None
    assert sorted(map(sorted, members_by_unit(cut))) == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("fields", "kinds", "common"),
    [
        ({}, ["", ""], 3),
        ({}, ["one", "two"], 0),
        ({"images": ImageSources((Path("picture"),), Path("."))}, ["", ""], 0),
        ({"routed_experts": torch.tensor([[[0]], [[1]], [[2]], [[0]]])}, ["", ""], 0),
    ],
    ids=["same", "other adapters", "images", "experts of one"],
)
def test_what_makes_equal_tokens_different(fields, kinds, common) -> None:
    planned = plan([sample([7, 8, 9, 1]), sample([7, 8, 9, 2], **fields)], kinds=kinds)
    assert (0 if planned is None else sum(planned.common)) == common


def test_prefix_ends_where_replayed_experts_differ() -> None:
    experts = [torch.tensor([[[0]], [[number]], [[2]]]) for number in (0, 1)]
    planned = plan([sample([7, 8, 9], routed_experts=routed) for routed in experts])
    assert planned is not None
    assert sum(planned.common) == 1


def test_micro_batch_gathers_no_more_keys_than_its_budget_allows() -> None:
    # Two groups of 32 tokens and 32 responses of one: 128 tokens to compute, with 2,112 keys.
    groups = (range(32), range(100, 132))
    samples = [sample([*prompt, number]) for prompt in groups for number in range(32)]
    lengths = [len(sample) for sample in samples]
    planned = plan(samples, limit=128)
    assert planned is not None
    assert sum(lengths) - sum(planned.common) == 128
    for members in plan_micro_batches(planned.costs(lengths), planned.unit, 128, packing=True):
        assert sum(lengths[index] for index in members) <= KEYS_PER_TOKEN * 128
