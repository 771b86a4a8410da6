"""Slices of any run of a flattened tensor, compared with index arrays; slices that other ranks write."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascend.training.checkpoint.slices import TensorSlices, slices_of_run


def inside(part, shape):
    """Return the flat indices of a slice's elements in its order, taken from an array of all indices."""
    indices = numpy.arange(math.prod(shape)).reshape(shape)
    return indices[tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))].reshape(-1)


@st.composite
def runs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@settings(max_examples=500, deadline=None)
@given(runs())
def test_slices_of_run_cover_exactly_the_run(run):
    shape, start, stop = run
    parts = list(slices_of_run(shape, start, stop))
    covered = [index for part in parts for index in inside(part, shape)]
    assert covered == list(range(start, stop))  # in order, each exactly once
    assert len(parts) <= 2 * len(shape) - 1
    for part in parts:
        assert len(part.offsets) == len(part.sizes) == len(shape)
        assert all(size > 0 for size in part.sizes)
        assert (part.start, part.stop) == (inside(part, shape)[0], inside(part, shape)[-1] + 1)


def test_run_between_row_interiors_needs_the_most_slices():
    assert [part.sizes for part in slices_of_run((3, 3, 3), 1, 26)] == [
        (1, 1, 2),
        (1, 2, 3),
        (1, 3, 3),
        (1, 2, 3),
        (1, 1, 2),
    ]


def test_scalar_is_one_slice():
    (part,) = slices_of_run((), 0, 1)
    assert (part.offsets, part.sizes, part.start, part.stop) == ((), (), 0, 1)
    assert list(slices_of_run((), 0, 0)) == []


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 2)])
def test_empty_tensor_has_no_slices(shape):
    assert list(slices_of_run(shape, 0, 0)) == []


def test_slices_without_replicas_are_those_that_this_rank_writes():
    tensor = TensorSlices((6,), torch.float32, may_differ=True)
    for start, replica in ((0, False), (2, True), (4, False)):
        tensor.add((start,), torch.full((2,), float(start)), replica=replica)
    written = tensor.without_replicas()
    assert [(offsets, values.tolist()) for offsets, values in written.slices] == [((0,), [0, 0]), ((4,), [4, 4])]
    assert (written.shape, written.dtype, written.may_differ) == ((6,), torch.float32, True)
    assert len(tensor.slices) == 3, "the original, which loads fill, keeps all of them"
    assert TensorSlices.whole(torch.ones(3), replica=True).without_replicas().slices == []
