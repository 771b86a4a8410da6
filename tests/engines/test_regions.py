"""Any run of a flattened tensor is a few chunks, held against index arrays."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascend.engines.regions import chunks


def inside(chunk, shape):
    """Flat indices of a chunk's elements, in its own order, from an array of all indices."""
    indices = numpy.arange(math.prod(shape)).reshape(shape)
    return indices[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))].reshape(-1)


@st.composite
def runs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@settings(max_examples=500, deadline=None)
@given(runs())
def test_boxes_are_exactly_the_run(run):
    shape, start, stop = run
    found = list(chunks(shape, start, stop))
    covered = [index for chunk in found for index in inside(chunk, shape)]
    assert covered == list(range(start, stop))  # in order, each once, none beside
    assert len(found) <= 2 * len(shape) - 1
    for chunk in found:
        assert len(chunk.offsets) == len(chunk.sizes) == len(shape)
        assert all(size > 0 for size in chunk.sizes)
        assert (chunk.start, chunk.stop) == (inside(chunk, shape)[0], inside(chunk, shape)[-1] + 1)


def test_every_run_of_a_small_tensor():
    shape = (2, 3, 2)
    for start in range(13):
        for stop in range(start, 13):
            assert [i for chunk in chunks(shape, start, stop) for i in inside(chunk, shape)] == list(range(start, stop))


@pytest.mark.parametrize("shape", [(5,), (4, 6), (2, 3, 4, 5), (1, 1, 7)])
def test_a_whole_tensor_is_one_box(shape):
    (chunk,) = chunks(shape, 0, math.prod(shape))
    assert (chunk.offsets, chunk.sizes) == ((0,) * len(shape), shape)


def test_the_most_boxes_are_needed_where_a_run_begins_and_ends_inside_rows():
    assert [chunk.sizes for chunk in chunks((3, 3, 3), 1, 26)] == [
        (1, 1, 2),
        (1, 2, 3),
        (1, 3, 3),
        (1, 2, 3),
        (1, 1, 2),
    ]


def test_a_number_without_dimensions():
    (chunk,) = chunks((), 0, 1)
    assert (chunk.offsets, chunk.sizes, chunk.start, chunk.stop) == ((), (), 0, 1)
    assert list(chunks((), 0, 0)) == []


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 2)])
def test_a_tensor_of_no_elements_has_no_boxes(shape):
    assert list(chunks(shape, 0, 0)) == []
