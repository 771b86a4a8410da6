"""Reduction of all ranks' reports: a pure function, so that all ranks reach the same result."""

from __future__ import annotations

import pytest

from megascend import Parallel, Sample
from megascend.errors import DataError
from megascend.runtime.topology.topology import Topology, plan
from megascend.training.batch.agreement import RankReport, reconcile, report
from megascend.training.batch.losses import BUILT_IN
from megascend.training.batch.results import TokenCounts

TALLY = TokenCounts(weight=10.0, units=0, trained=12, tokens=20)


def entry(checksum: int = 7, **changes) -> RankReport:
    values = {"problem": None, "micro_batches": 2, "counts": {"": TALLY}, "checksums": {"input_ids": checksum}}
    return RankReport(**(values | changes))


def layout(world_size: int, **sizes: int) -> Topology:
    return plan(Parallel(**sizes), world_size)


def test_sums_count_every_data_parallel_rank_once():
    topology = layout(8, tensor=2, context=2)  # data 2: ranks 0-3 and 4-7
    first, second = entry(checksum=1), entry(checksum=2, counts={"": TokenCounts(2.5, 3, 4, 5)}, micro_batches=4)
    agreed = reconcile([first] * 4 + [second] * 4, topology)
    assert agreed.counts == {"": TokenCounts(weight=12.5, units=3, trained=16, tokens=25)}
    assert agreed.micro_batches == 4


def test_adapters_are_counted_separately_and_in_one_order_on_all_ranks():
    counts = {"a": TokenCounts(1.0, 0, 1, 2), "b": TokenCounts(2.0, 1, 3, 4), "c": TokenCounts(5.0, 0, 6, 7)}
    first = entry(counts={"b": counts["b"], "a": counts["a"]}, checksum=1)
    second = entry(counts={"c": counts["c"], "b": counts["b"]}, checksum=2)
    agreed = reconcile([first, second], layout(2))
    assert agreed.counts == {"a": counts["a"], "b": TokenCounts(4.0, 2, 6, 8), "c": counts["c"]}
    assert list(agreed.counts) == ["a", "b", "c"]


def test_pipeline_ranks_of_one_replica_count_once():
    topology = layout(4, pipeline=2)  # rank 0 and 2 are stages of replica 0
    agreed = reconcile([entry(checksum=1), entry(checksum=2), entry(checksum=1), entry(checksum=2)], topology)
    assert agreed.counts == {"": TALLY + TALLY}


@pytest.mark.parametrize(
    ("pipeline", "virtual", "planned", "agreed"),
    [(2, 2, 1, 2), (2, 2, 2, 2), (2, 2, 3, 4), (4, 2, 5, 8), (2, 1, 3, 3), (4, 1, 1, 1)],
)
def test_the_interleaved_schedule_gets_whole_rounds(pipeline, virtual, planned, agreed):
    topology = layout(pipeline, pipeline=pipeline, virtual_pipeline=virtual)
    assert reconcile([entry(micro_batches=planned)] * pipeline, topology).micro_batches == agreed


def test_a_rank_without_samples_does_not_stop_the_others():
    agreed = reconcile([entry(), entry(micro_batches=0, counts={}, checksum=0)], layout(2))
    assert (agreed.micro_batches, agreed.counts) == (2, {"": TALLY})


def test_empty_batch_on_every_rank_raises_data_error():
    empty = entry(micro_batches=0, counts={}, checksum=0)
    with pytest.raises(DataError, match="the batch is empty on every rank"):
        reconcile([empty] * 2, layout(2))


def test_first_problem_is_raised_with_its_rank_and_others_are_counted():
    with pytest.raises(DataError, match=r"^rank 1: sample 3 is too long$"):
        reconcile([entry(), entry(problem="sample 3 is too long")], layout(2))
    bad = entry(problem="sample 0 is odd")
    with pytest.raises(DataError, match=r"^rank 2: sample 0 is odd \(2 ranks have problems\)$"):
        reconcile([entry(), entry(), bad, bad], layout(4))


def test_problem_takes_precedence_over_a_mismatch():
    with pytest.raises(DataError, match="rank 1: too long"):
        reconcile([entry(checksum=1), entry(problem="too long", checksum=0)], layout(2, tensor=2))


@pytest.mark.parametrize(
    ("sizes", "world_size", "checksums", "ranks"),
    [
        ({"tensor": 2}, 2, [1, 2], "0 and 1"),
        ({"pipeline": 2}, 2, [1, 2], "0 and 1"),
        ({"context": 2}, 2, [1, 2], "0 and 1"),
        ({"tensor": 2}, 4, [1, 1, 2, 3], "2 and 3"),
        ({"pipeline": 2}, 4, [1, 2, 1, 3], "1 and 3"),
    ],
)
def test_ranks_of_one_replica_must_have_the_same_samples(sizes, world_size, checksums, ranks):
    with pytest.raises(DataError, match=f"ranks {ranks} differ only in tensor, pipeline or context"):
        reconcile([entry(checksum=value) for value in checksums], layout(world_size, **sizes))


def test_report_counts_weights_and_tokens():
    samples = [
        Sample([1, 2, 3], [2, 3, 4], [0.0, 0.5, 2.0]),
        Sample([9], [8], [1.0]),
    ]
    result = report(samples, 3, ["", ""], None)
    count_ = TokenCounts(weight=3.5, units=0, trained=3, tokens=4, mtp_weight=2.5)
    assert (result.problem, result.micro_batches, result.counts) == (None, 3, {"": count_})
    assert result.checksums.keys() == {"input_ids", "target_ids", "weights", "adapter"}
    assert report([], 0, [], None) == RankReport(None)


def test_pair_counts_once_for_its_adapter():
    samples = [Sample([1], [2], [1.0], pair=pair, chosen=chosen) for pair in (1, 2) for chosen in (True, False)]
    counts = report(samples, 1, ["a", "a", "b", "b"], BUILT_IN["dpo"]).counts
    assert {name: (count_.units, count_.tokens) for name, count_ in counts.items()} == {"a": (1, 2), "b": (1, 2)}


def test_report_sums_weights_in_float64():
    """Sum in float64: a million weights of 1e-3 plus one of 1e5 would lose digits in float32."""
    large = Sample([1], [1], [1e5])
    small = Sample([1] * 100_000, [1] * 100_000, [1e-3] * 100_000)
    assert report([large, small], 1, ["", ""], None).counts[""].weight == pytest.approx(1e5 + 100, rel=1e-9)


def test_other_token_ids_or_another_order_are_another_checksum():
    a, b = Sample([1, 2], [2, 3], [1, 1]), Sample([2, 1], [2, 3], [1, 1])
    lists = ([a], [b], [a, b], [b, a], [a, a])
    checksums = {report(samples, 1, [""] * len(samples), None).checksums["input_ids"] for samples in lists}
    assert len(checksums) == 5


def test_other_adapters_are_another_checksum():
    a = Sample([1, 2], [2, 3], [1, 1])
    reports = [report([a, a], 1, list(names), None).checksums for names in ("ab", "ba", "aa")]
    assert len({checksums["adapter"] for checksums in reports}) == 3
    assert len({checksums["input_ids"] for checksums in reports}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"target_ids": [2, 4]},
        {"weights": [1.0, 0.5]},
        {"advantages": [0.0, 1.0]},
        {"old_logprobs": [-1.0, -2.0]},
        {"ref_logprobs": [-1.0, -3.0]},
        {"extra": {"teacher": [0.5, 0.25]}},
        {"pair": "p", "chosen": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_is_compared_and_the_one_that_differs_is_named(change):
    same = {
        "input_ids": [1, 2],
        "target_ids": [2, 3],
        "weights": [1.0, 1.0],
        "advantages": [0.0, 0.0],
        "old_logprobs": [-1.0, -1.0],
        "ref_logprobs": [-1.0, -1.0],
        "extra": {"teacher": [0.5, 0.5]},
        "pair": "p",
        "chosen": True,
    }
    reports = [report([Sample(**fields)], 1, [""], None) for fields in (same, same | change)]
    reconcile([reports[0]] * 2, layout(2, tensor=2))
    name = "teacher" if "extra" in change else next(iter(change))
    with pytest.raises(DataError, match=rf"ranks 0 and 1 .*\(their {name} differ\)"):
        reconcile(reports, layout(2, tensor=2))


def test_a_field_that_one_rank_lacks_is_a_difference():
    with_it, baseline = (
        report([Sample([1], [2], [1.0], advantages=values)], 1, [""], None) for values in ([0.0], None)
    )
    with pytest.raises(DataError, match="their advantages differ"):
        reconcile([with_it, baseline], layout(2, context=2))


def test_pairs_may_be_called_by_objects_of_this_process():
    def samples():
        pair = object()
        return [Sample([1], [2], [1.0], pair=pair, chosen=chosen) for chosen in (True, False)]

    reconcile([report(samples(), 1, ["", ""], BUILT_IN["dpo"]) for _ in range(2)], layout(2, tensor=2))


@pytest.mark.parametrize(("weight", "name"), [(1e37, ""), (1e31, "alice"), (1e-38, "")])
def test_weights_that_float32_cannot_sum_are_an_error(weight, name):
    count_ = TokenCounts(weight=weight, units=0, trained=1, tokens=1)
    with pytest.raises(DataError, match=rf"sum to {weight:g}.*float32".replace("+", r"\+")):
        reconcile([entry(counts={name: count_})], layout(1))
