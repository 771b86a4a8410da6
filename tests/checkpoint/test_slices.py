"""Any run of a flattened tensor is a few slices, compared with index arrays."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascend.checkpoint.slices import slices_of_run


def inside(each, shape):
    """Flat indices of a slice's elements, in its own order, from an array of all indices."""
    indices = numpy.arange(math.prod(shape)).reshape(shape)
    return indices[tuple(slice(o, o + s) for o, s in zip(each.offsets, each.sizes, strict=True))].reshape(-1)


@st.composite
def runs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@settings(max_examples=500, deadline=None)
@given(runs())
def test_slices_of_run_cover_exactly_the_run(run):
    shape, start, stop = run
    found = list(slices_of_run(shape, start, stop))
    covered = [index for each in found for index in inside(each, shape)]
    assert covered == list(range(start, stop))  # in order, each once, none beside
    assert len(found) <= 2 * len(shape) - 1
    for each in found:
        assert len(each.offsets) == len(each.sizes) == len(shape)
        assert all(size > 0 for size in each.sizes)
        assert (each.start, each.stop) == (inside(each, shape)[0], inside(each, shape)[-1] + 1)


def test_every_run_of_a_small_tensor():
    shape = (2, 3, 2)
    for start in range(13):
        for stop in range(start, 13):
            assert [i for each in slices_of_run(shape, start, stop) for i in inside(each, shape)] == list(
                range(start, stop)
            )


@pytest.mark.parametrize("shape", [(5,), (4, 6), (2, 3, 4, 5), (1, 1, 7)])
def test_whole_tensor_is_one_slice(shape):
    (each,) = slices_of_run(shape, 0, math.prod(shape))
    assert (each.offsets, each.sizes) == ((0,) * len(shape), shape)


def test_run_inside_rows_needs_the_most_slices():
    assert [each.sizes for each in slices_of_run((3, 3, 3), 1, 26)] == [
        (1, 1, 2),
        (1, 2, 3),
        (1, 3, 3),
        (1, 2, 3),
        (1, 1, 2),
    ]


def test_a_number_without_dimensions():
    (each,) = slices_of_run((), 0, 1)
    assert (each.offsets, each.sizes, each.start, each.stop) == ((), (), 0, 1)
    assert list(slices_of_run((), 0, 0)) == []


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 2)])
def test_empty_tensor_has_no_slices(shape):
    assert list(slices_of_run(shape, 0, 0)) == []
