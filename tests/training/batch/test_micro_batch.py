"""Layout arithmetic of a micro batch: lengths divide, context ranks share all tokens, columns agree."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascend import Candidates, Sample
from megascend.training.batch.losses import BUILT_IN
from megascend.training.batch.micro_batch import SequenceLayout, build, unpack

pytestmark = pytest.mark.usefixtures("megatron_imported")
CPU = torch.device("cpu")
some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6)
combinations = {
    "packing": st.booleans(),
    "context": st.sampled_from([1, 2, 4]),
    "tensor": st.sampled_from([1, 2, 4]),
    "lengths": some_lengths,
}
quick = settings(max_examples=60, deadline=None)


def make(lengths: list[int], offset: int = 1) -> list[Sample]:
    """Build samples whose columns are different functions of one running number."""
    samples, start = [], offset
    for length in lengths:
        ids = torch.arange(start, start + length)
        samples.append(
            Sample(ids, ids + 1000, ids + 0.25, advantages=ids + 0.5, extra={"extra": ids + 0.75}),
        )
        start += length
    return samples


def on_every_rank(lengths, packing, context, tensor, **options):
    samples = make(lengths)
    return [
        build(samples, range(len(lengths)), SequenceLayout(packing, context, rank, tensor), None, CPU, **options)
        for rank in range(context)
    ]


@quick
@given(**combinations)
def test_local_tokens_are_divisible_by_the_layout(packing, context, tensor, lengths):
    for batch in on_every_rank(lengths, packing, context, tensor):
        rows, columns = batch.input_ids.shape
        count = rows * columns
        assert count == sum(batch.padded_lengths) // context
        # Sequence parallelism divides the sequence dimension of the rank's tokens.
        assert columns % tensor == 0
        for padded, length in zip(batch.padded_lengths, lengths, strict=True):
            assert padded >= length
            assert context == 1 or padded % (2 * context) == 0
        if batch.packed is None:
            assert len(set(batch.padded_lengths)) == 1
            assert rows == len(lengths)
        else:
            assert rows == 1
            boundaries = [0, *torch.tensor(batch.padded_lengths).cumsum(0).tolist()]
            assert batch.packed.cu_seqlens_q.tolist() == batch.packed.cu_seqlens_kv.tolist() == boundaries
            assert batch.packed.cu_seqlens_q.dtype == torch.int32
            assert batch.packed.max_seqlen_q == max(batch.padded_lengths)


@quick
@given(**combinations)
def test_packing_pads_no_more_than_it_must(packing, context, tensor, lengths):
    batch = on_every_rank(lengths, packing, context, tensor)[0]
    unit = 2 * context if context > 1 else 1
    if packing:
        wasted = sum(batch.padded_lengths) - sum(lengths)
        # Each sample is padded to its multiple, and the batch once to the tensor ranks'.
        assert wasted < len(lengths) * unit + max(unit, context) * tensor
    else:
        assert max(batch.padded_lengths) - max(lengths) < unit * tensor


@quick
@given(**combinations)
def test_context_ranks_hold_every_token_exactly_once(packing, context, tensor, lengths):
    batches = on_every_rank(lengths, packing, context, tensor)
    places = torch.cat([batch.token_index for batch in batches])
    assert places.sort().values.tolist() == list(range(sum(batches[0].padded_lengths)))
    assert len({len(batch.token_index) for batch in batches}) == 1
    assert all(batch.padded_lengths == batches[0].padded_lengths for batch in batches)


@quick
@given(**combinations)
def test_columns_belong_to_the_same_token(packing, context, tensor, lengths):
    samples = make(lengths)
    for batch in on_every_rank(lengths, packing, context, tensor):
        ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        real = ids > 0
        assert torch.equal(batch.targets[real], ids[real] + 1000)
        assert torch.equal(batch.weights[real], ids[real] + 0.25)
        assert torch.equal(batch.fields["advantages"][real], ids[real] + 0.5)
        assert torch.equal(batch.fields["extra"][real], ids[real] + 0.75)
        assert batch.weights[~real].tolist() == [0.0] * int((~real).sum())
        expected = [
            int(samples[number].input_ids[0]) + position
            for number, position in zip(batch.sample, positions, strict=True)
        ]
        assert ids[real].tolist() == torch.tensor(expected)[real].tolist()
        starts = torch.tensor([0, *batch.padded_lengths]).cumsum(0)[batch.sample]
        assert torch.equal(batch.token_index, starts + positions)


@quick
@given(**combinations)
def test_unpacking_undoes_it(packing, context, tensor, lengths):
    batches = on_every_rank(lengths, packing, context, tensor)
    padded = torch.zeros(sum(batches[0].padded_lengths))
    for batch in batches:
        padded[batch.token_index] = batch.fields["extra"]
    for values, sample in zip(unpack(padded, batches[0]), make(lengths), strict=True):
        assert torch.equal(values, sample.extra["extra"])


def test_planned_lengths_match_the_batch():
    """Compare with ``padded_length``, which the planner budgets with; the batch may add only the tensor ranks' remainder."""
    for packing, context, tensor in ((True, 2, 1), (False, 2, 2), (False, 1, 4), (True, 1, 1)):
        layout = SequenceLayout(packing, context, 0, tensor)
        for lengths in ([5], [7, 3], [16, 16, 2]):
            batch = build(make(lengths), range(len(lengths)), layout, None, CPU)
            planned = [layout.padded_length(length) for length in lengths]
            expected = planned if packing else [max(planned)] * len(lengths)
            assert batch.padded_lengths == expected


def test_members_are_taken_in_the_order_given():
    samples = make([3, 2, 4])
    batch = build(samples, [2, 0], SequenceLayout(), None, CPU)
    assert batch.members == [2, 0]
    assert batch.input_ids.tolist() == [[6, 7, 8, 9, 1, 2, 3]]
    assert batch.sample.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.lengths == [4, 3]


def test_a_filler_counts_nothing():
    for batch in on_every_rank([5, 3], True, 2, 1, dummy=True):
        assert batch.weights.tolist() == [0.0] * len(batch.weights)
        assert batch.input_ids.any()


def test_only_fields_that_every_sample_has_are_kept():
    first, second = make([3, 2])
    second.advantages = None
    batch = build([first, second], [0, 1], SequenceLayout(), None, CPU)
    assert set(batch.fields) == {"extra"}


def test_pairs_are_positions_among_the_members():
    make_one = partial(Sample, ref_logprobs=[0.0])
    samples = [
        make_one([1], [1], [1], pair="a", chosen=False),
        make_one([2], [2], [1], pair="b", chosen=True),
        make_one([3], [3], [1], pair="b", chosen=False),
        make_one([4], [4], [1], pair="a", chosen=True),
    ]
    batch = build(samples, [3, 0, 1, 2], SequenceLayout(), BUILT_IN["dpo"], CPU)
    assert batch.pairs.tolist() == [[0, 1], [2, 3]]
    assert build(samples, [0, 1], SequenceLayout(), BUILT_IN["cross_entropy"], CPU).pairs.shape == (0, 2)


@quick
@given(**combinations)
def test_mtp_targets_are_each_samples_own_shifted_by_one(packing, context, tensor, lengths):
    samples = make(lengths)
    batches = on_every_rank(lengths, packing, context, tensor, mtp=True)
    total = sum(batches[0].padded_lengths)
    joined = {name: torch.zeros(total) for name in ("input_ids", "targets", "weights", "padding")}
    for batch in batches:
        assert batch.mtp is not None
        assert batch.mtp.input_ids.shape == batch.input_ids.shape
        for name, values in joined.items():
            values[batch.token_index] = getattr(batch.mtp, name).flatten().float()
    columns = {"input_ids": "input_ids", "targets": "target_ids", "weights": "weights"}
    for name, column in columns.items():
        for sample, values in zip(samples, unpack(joined[name], batches[0]), strict=True):
            assert values.tolist() == [*getattr(sample, column)[1:].tolist(), 0]
    assert [values.tolist() for values in unpack(joined["padding"], batches[0])] == [
        [0.0] * (length - 1) + [1.0] for length in lengths
    ]
    real = sum(lengths) - len(lengths)
    assert int((joined["padding"] == 0).sum()) == int((joined["weights"] != 0).sum()) == real


@quick
@given(**combinations)
def test_candidates_stay_with_their_token(packing, context, tensor, lengths):
    """Samples have 1, 2 or 3 slots; narrower ones and padding have unused slots."""
    samples = make(lengths)
    for number, sample in enumerate(samples):
        ids = 3 * sample.input_ids[:, None] + torch.arange(1 + number % 3)
        sample.candidates = Candidates(ids, -5 - ids / 1000)
    width = min(3, len(lengths))
    for rank in range(context):
        layout = SequenceLayout(packing, context, rank, tensor)
        batch = build(samples, range(len(lengths)), layout, BUILT_IN["forward_kl"], CPU)
        assert batch.candidate_ids.shape == batch.teacher_logprobs.shape == (len(batch.targets), width)
        slots = 1 + batch.sample % 3
        used = (torch.arange(width) < slots[:, None]) & ~batch.padding[:, None]
        expected = torch.where(used, 3 * batch.input_ids.flatten()[:, None] + torch.arange(width), -1)
        assert batch.candidate_ids.tolist() == expected.tolist()
        torch.testing.assert_close(batch.teacher_logprobs, torch.where(used, -5 - expected / 1000, 0.0))
        assert build(samples, range(len(lengths)), layout, BUILT_IN["cross_entropy"], CPU).candidate_ids is None
