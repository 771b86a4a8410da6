"""Shapes that micro batches are padded to: few, large enough, and never much larger."""

import random
from itertools import pairwise

import pytest

from megascend.training.batch.step_shapes import StepShape, adapter_ends, boundaries, step_shape, token_bucket


def test_buckets_are_few_and_at_most_a_quarter_larger():
    buckets = [token_bucket(tokens) for tokens in range(1, 8193)]
    assert all(bucket >= tokens for tokens, bucket in enumerate(buckets, 1))
    assert all(bucket <= 1.25 * tokens + 1 for tokens, bucket in enumerate(buckets, 1) if tokens >= 512)
    assert sorted(set(buckets)) == [
        128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192
    ]  # fmt: skip


def test_one_sample_needs_no_segments():
    assert step_shape("forward", [300], adapters=1, rank=8) == StepShape("forward", 384, 1, 0, 384, 1, 8, False)
    assert step_shape("forward", [64], adapters=0, rank=0, entropy=True) == StepShape(
        "forward", 128, 1, 0, 128, 0, 0, True
    )


def test_rows_stay_rows_where_nothing_is_padded():
    assert step_shape("forward", [256] * 3, rows=3, adapters=0, rank=0) == StepShape(
        "forward", 768, 3, 0, 256, 0, 0, False
    )
    assert step_shape("forward", [256] * 3, rows=3, adapters=1, rank=8).rows == 3
    assert step_shape("forward", [256] * 3, rows=3, adapters=2, rank=8).rows == 1, "tokens of an adapter lie together"
    assert step_shape("forward", [250] * 3, rows=3, adapters=0, rank=0).rows == 1, (
        "rows of odd lengths would be many shapes"
    )
    assert step_shape("forward", [256] * 3, rows=0, adapters=0, rank=0).rows == 1, "it came packed"


@pytest.mark.parametrize("seed", range(20))
def test_segments_cover_all_tokens_within_the_longest(seed):
    generator = random.Random(seed)
    adapters = generator.choice((1, 2, 4, 8))
    lengths = [generator.randint(1, generator.choice((4, 60, 900))) for _ in range(generator.randint(2, 20))]
    shape = step_shape("cross_entropy", lengths, adapters=adapters, rank=16)
    starts = boundaries(lengths, shape)
    sizes = [stop - start for start, stop in pairwise(starts)]
    assert len(sizes) == shape.samples
    assert sizes[: len(lengths)] == lengths
    assert sizes[len(lengths)] == shape.tokens - sum(lengths), "padding is a segment of its own"
    assert not any(sizes[len(lengths) + 1 :])
    assert max(sizes) <= shape.longest <= shape.tokens


def test_one_sample_for_each_adapter_is_one_shape_for_any_number_of_them():
    shapes = {step_shape("cross_entropy", [100] * 4 + [1] * n, adapters=8, rank=16) for n in range(1, 5)}
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("counts", "ends"),
    [([5, 0, 7, 0], [5, 5, 64, 64]), ([0, 0, 0, 9], [0, 0, 0, 64]), ([9, 0], [64, 64]), ([64, 0], [64, 64])],
)
def test_padding_belongs_to_the_last_adapter_that_has_tokens(counts, ends):
    shape = StepShape("cross_entropy", 64, 1, 4, 64, len(counts), 8, entropy=False)
    assert adapter_ends(counts, shape) == ends
