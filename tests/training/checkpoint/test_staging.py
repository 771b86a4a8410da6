"""Staged copies do not follow their source, and staging memory is reused."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascend.training.checkpoint import staging
from megascend.training.checkpoint.slices import TensorSlices
from megascend.training.checkpoint.staging import ALIGNMENT, Staging

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int64),
    *(torch.bool, torch.complex64, torch.float8_e4m3fn),
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Shrink the blocks, so that tests cross block boundaries."""
    monkeypatch.setattr(staging, "BLOCK", 2**12)


def shards(*tensors):
    """Build the slices of one tensor, in the form that staging reads."""
    entry = TensorSlices((1,), tensors[0].dtype if tensors else torch.float32)
    for number, tensor in enumerate(tensors):
        entry.add((number,), tensor)
    return entry


def values(state):
    return {
        name: [part for _, part in entry.slices] for name, entry in state.items() if isinstance(entry, TensorSlices)
    }


def random(shape, dtype):
    """Build a tensor of random bytes."""
    size = torch.empty(shape, dtype=dtype).numel() * torch.empty((), dtype=dtype).element_size()
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


def same(first, second):
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))
    )


def addresses(state):
    """Return the address range of every non-empty tensor."""
    flat = [part for parts in values(state).values() for part in parts if part.numel()]
    return [(part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()) for part in flat]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (7,), (3, 5), (1, 1, 13, 1), (2, 3, 4, 5)], ids=str)
def test_staged_copies_do_not_follow_their_source(dtype, shape):
    source = random(shape, dtype)
    before, tail = source.clone(), random((3,), torch.float32)
    copied = Staging(page_locked=False).copy({"a": shards(source, source), "b": shards(tail)})
    tail_before = tail.clone()
    source.view(-1).view(torch.uint8).fill_(1)
    tail.zero_()
    assert all(same(part, before) for part in values(copied)["a"])
    assert same(values(copied)["b"][0], tail_before)
    assert copied["a"].slices[1][0] == (1,)
    assert (copied["a"].shape, copied["a"].dtype) == ((1,), dtype)


def test_non_contiguous_tensors_are_copied_by_value():
    base = torch.arange(60.0).view(3, 4, 5)
    odd = [base.permute(2, 0, 1), base[:, ::2], base[1, 1:3, 2], base.new_ones(1).expand(4, 3), base[..., None]]
    before = [part.clone() for part in odd]
    copied = values(Staging(page_locked=False).copy({"a": shards(*odd)}))["a"]
    base.fill_(-1)
    assert all(same(part, expected) for part, expected in zip(copied, before, strict=True))


def test_parameters_are_staged_without_their_graph():
    parameter = torch.nn.Parameter(torch.ones(4))
    (copied,) = values(Staging(page_locked=False).copy({"a": shards(parameter)}))["a"]
    assert not copied.requires_grad
    assert copied.tolist() == [1.0] * 4


def test_objects_and_settings_pass_through():
    entry = TensorSlices((4,), torch.float32, may_differ=True)
    state = {"random/0": {"python": (1, 2)}, "none": None, "a": entry}
    copied = Staging(page_locked=False).copy(state)
    assert copied["random/0"] is state["random/0"]
    assert copied["none"] is None
    assert list(copied) == list(state)
    assert copied["a"].may_differ
    assert copied["a"] is not entry


def test_prepared_memory_is_used_by_the_copy(monkeypatch):
    sizes, allocate = [], Staging._allocate
    monkeypatch.setattr(Staging, "_allocate", lambda self, size: (sizes.append(size), allocate(self, size))[1])
    staged, state = Staging(page_locked=False), {"a": shards(torch.rand(1500), torch.rand(10)), "b": None}
    staged.prepare(state)
    staged.prepare(state)  # the first call may still be running
    copied = staged.copy(state)
    assert sizes == [6000, 64]  # no more than needed, although a block may be larger
    assert same(values(copied)["a"][0], state["a"].slices[0][1])
    staged.copy(state)
    assert sizes == [6000, 64]


def test_prepare_calls_do_not_overlap(monkeypatch):
    active, peak, allocate = [0], [0], Staging._allocate

    def slowly(self, size):
        active[0] += 1
        peak[0] = max(peak[0], active[0])
        threading.Event().wait(0.05)
        active[0] -= 1
        return allocate(self, size)

    monkeypatch.setattr(Staging, "_allocate", slowly)
    staged, state = Staging(page_locked=False), {"a": shards(torch.rand(5000), torch.rand(5000))}
    for _ in range(3):
        staged.prepare(state)
    copied = staged.copy(state)
    assert peak == [1]
    assert same(values(copied)["a"][1], state["a"].slices[1][1])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.just(()), st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple), st.just((1500,))),
            st.sampled_from(DTYPES),
        ),
        max_size=25,
    )
)
def test_no_two_tensors_share_memory(parts):
    tensors = [random(shape, dtype) for shape, dtype in parts]
    state = {str(number): shards(tensor) for number, tensor in enumerate(tensors)}
    staged = Staging(page_locked=False)
    for _ in range(2):
        copied = staged.copy(state)
        spans = sorted(addresses(copied))
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
        blocks = [(block.data_ptr(), block.data_ptr() + block.numel()) for block in staged._blocks]
        assert all(any(low <= start and stop <= high for low, high in blocks) for start, stop in spans)
        assert all(
            (start - low) % ALIGNMENT == 0 for start, stop in spans for low, high in blocks if low <= start < high
        )
        assert all(same(values(copied)[str(number)][0], tensor) for number, tensor in enumerate(tensors))
