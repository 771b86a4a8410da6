"""Existing checkpoints, their order of preference, and their removal."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.retention import Retention, by_preference, superseded

ARABIC = "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661"
"""Digits that ``int`` and ``\\d`` accept, and that must not count as a step."""


def add(retention, *steps):
    """Write directories that a retention takes for complete checkpoints."""
    for step in steps:
        (retention.path(step) / "adapters").mkdir(parents=True)
        (retention.path(step) / manifest.NAME).write_text("{}")


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


# --- pure functions ---


@pytest.mark.parametrize(
    ("steps", "latest", "expected"),
    [
        ([], None, []),
        ([], 5, [5]),
        ([1, 2, 3], None, [3, 2, 1]),
        ([1, 2, 3], 3, [3, 2, 1]),
        ([1, 2, 3], 2, [2, 1, 3]),
        ([1, 2, 3, 4], 1, [1, 4, 3, 2]),
        ([1, 4], 3, [3, 1, 4]),
        ([4, 8], 2, [2, 8, 4]),
    ],
)
def test_by_preference(steps, latest, expected):
    assert by_preference(steps, latest) == expected


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 4), st.integers(0, 7), st.data())
def test_superseded_steps_keep_the_last_and_every_nth(steps, keep_last, keep_every, data):
    current = data.draw(st.sampled_from(sorted(steps)))
    removed = superseded(sorted(steps), current, keep_last, keep_every)
    old = sorted(step for step in steps if step <= current)
    assert current not in removed
    assert set(removed) <= set(old[:-keep_last])
    assert set(old[:-keep_last]) - set(removed) == {s for s in old[:-keep_last] if keep_every and s % keep_every == 0}


# --- on disk ---


def test_steps_are_those_of_complete_checkpoints(tmp_path):
    retention = Retention(tmp_path)
    add(retention, 30, 4, 123456789)
    retention.path(7).mkdir()  # no manifest
    for name in ("step-5", "step-00000005x", "step--0000005", ".step-00000006.writing", ARABIC):
        (tmp_path / name).mkdir()
        (tmp_path / name / manifest.NAME).touch()
    (tmp_path / "step-000000012").mkdir()  # step 12 has 8 digits
    (tmp_path / "step-000000012" / manifest.NAME).touch()
    (tmp_path / "step-00000009").write_text("a file")
    assert retention.steps() == [4, 30, 123456789]
    assert Retention(tmp_path / "nowhere").steps() == []
    assert Retention(tmp_path / "nowhere").candidates() == []
    assert Retention(tmp_path / "step-00000009").candidates() == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"step-",
        b"step-0000000",
        b"step-00000009\n",
        b"../other/step-00000001",
        b"step-00000001/..",
        b"\xff\xfe",
        b"\0" * 13,
    ]
    + [b"step-00000001\nstep-00000002", b"step-000000001", b"step-0000\x000001", ARABIC.encode()],
)
def test_invalid_latest_file_is_ignored(tmp_path, content):
    retention = Retention(tmp_path)
    add(retention, 1, 2, 3)
    (tmp_path / "latest").write_bytes(content)
    assert retention.latest() is None
    assert retention.candidates() == [retention.path(3), retention.path(2), retention.path(1)]


def test_latest_without_manifest_is_a_candidate(tmp_path):
    retention = Retention(tmp_path, keep_last=3)
    add(retention, 1, 2, 3)
    retention.committed(retention.path(2))
    (retention.path(2) / manifest.NAME).unlink()
    assert retention.candidates() == [retention.path(2), retention.path(1), retention.path(3)]


def test_checkpoints_without_manifest_are_the_last_candidates(tmp_path):
    """Keep damaged checkpoints as candidates, so that a folder of them raises an error instead of starting anew."""
    retention = Retention(tmp_path)
    add(retention, 1, 2, 3)
    for step in (1, 3):
        (retention.path(step) / manifest.NAME).unlink()
    assert retention.candidates() == [retention.path(2), retention.path(3), retention.path(1)]
    (retention.path(2) / manifest.NAME).unlink()
    assert retention.candidates() == [retention.path(3), retention.path(2), retention.path(1)]
    assert retention.steps() == []


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (1, 0, [60]),
        (2, 0, [50, 60]),
        (3, 0, [40, 50, 60]),
        (1, 20, [20, 40, 60]),
        (2, 30, [30, 50, 60]),
        (9, 0, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_committed_keeps_the_last_and_every_nth(tmp_path, keep_last, keep_every, left):
    retention = Retention(tmp_path, keep_last, keep_every)
    for step in range(10, 70, 10):
        add(retention, step)
        retention.committed(retention.path(step))
        assert retention.latest() == step
        assert retention.candidates()[0] == retention.path(step)
    assert retention.steps() == left
    assert names(tmp_path) == ["latest", *(f"step-{step:08d}" for step in left)]


def test_leftovers_of_killed_runs_are_removed(tmp_path):
    retention = Retention(tmp_path, keep_last=1)
    add(retention, 10, 20)
    leftovers = [".step-00000005.writing", ".step-00000006.old", ".step-00000007.removing"]
    other_names = [".step-0.writing", "step-00000001.writing", ".notes.writing", "notes.txt"]
    for name in (*leftovers, *other_names):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / ".latest.writing").write_text("step-")
    retention.committed(retention.path(20))
    assert names(tmp_path) == sorted(["latest", "step-00000020", *other_names])


def test_steps_to_keep_stay_whatever_their_age(tmp_path):
    retention = Retention(tmp_path, keep_last=1)
    add(retention, 1, 2, 3, 4)
    retention.committed(retention.path(4), keep={1, 3})
    assert retention.steps() == [1, 3, 4]


def test_a_checkpoint_that_cannot_be_removed_does_not_end_a_run(tmp_path, monkeypatch):
    """Continue the run; the next save tries the removal again."""
    retention = Retention(tmp_path, keep_last=1)
    add(retention, 1, 2)

    def refuse(path, *arguments, **options):
        raise OSError(16, "Device or resource busy", path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        retention.committed(retention.path(2))
    assert retention.latest() == 2
    assert retention.steps() == [2]
    retention.committed(retention.path(2))
    assert names(tmp_path) == ["latest", "step-00000002"]


def test_unwritable_latest_file_raises_and_removes_nothing(tmp_path):
    retention = Retention(tmp_path, keep_last=1)
    add(retention, 1, 2)
    (tmp_path / "latest" / "occupied").mkdir(parents=True)
    with pytest.raises(OSError):
        retention.committed(retention.path(2))
    assert retention.steps() == [1, 2]  # nothing is removed before `latest` names the new checkpoint
