"""Frames of object collectives: comparison, content, and messages for ranks that are out of step. No processes."""

from __future__ import annotations

import pytest

from megascend.errors import CheckpointError, MegascendError, OutOfStepError
from megascend.runtime.distributed.frames import SIZE, Position, aligned_frames, encode

pytestmark = pytest.mark.waiting

FOLDER = Position("gather_objects", "world", 12, 3, "save('a')", "save")


def test_long_texts_are_cut_but_compared_completely() -> None:
    first, second = (Position("agree", "world", 1, 1, "ü" * 5000 + end) for end in "ab")
    assert len(encode(first, b"content")) == SIZE
    assert aligned_frames([encode(first, b"1"), encode(first, b"2")], [0, 1], 0)[1].length == 1
    with pytest.raises(OutOfStepError):
        aligned_frames([encode(first, b""), encode(second, b"")], [0, 1], 0)


def test_foreign_bytes_raise_out_of_step_error() -> None:
    with pytest.raises(OutOfStepError, match="rank 1: data from rank 0 is not a frame of an object collective"):
        aligned_frames([b"\1" * SIZE, encode(FOLDER, b"")], [0, 1], 1)


def test_refusal_is_raised_on_all_ranks_with_its_class() -> None:
    refused = Position("agree", "world", 12, 3, "save('a')", "save", ("CheckpointError", "no room"))
    with pytest.raises(CheckpointError, match=r"^rank 0: no room$"):
        aligned_frames(
            [encode(refused, b""), encode(FOLDER, b"")], [0, 1], 1
        )  # the collectives need not match for a refusal
    strange = Position("agree", "world", 12, 3, "save('a')", "save", ("annotations", "rank 9: no class"))
    with pytest.raises(MegascendError, match=r"^rank 9: no class$"):
        aligned_frames([encode(strange, b""), encode(FOLDER, b"")], [0, 1], 1)
    other = Position("agree", "world", 12, 3, "load('a')", "", ("CheckpointError", "none there"))
    with pytest.raises(
        OutOfStepError, match=r"load\('a'\) .*, where it raised CheckpointError: none there; rank 1 is in save"
    ):
        aligned_frames([encode(other, b""), encode(FOLDER, b"")], [0, 1], 1)
