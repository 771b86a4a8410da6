"""A process killed while saving leaves the previous checkpoint or the new one, and no obstacle for the next run."""

from __future__ import annotations

import os
import shutil
import threading

import pytest
from small_runs import exact_state, make_backend, train

from megascend.errors import CheckpointError
from megascend.runtime.io import atomic
from megascend.testing import run_distributed
from megascend.training.checkpoint import manifest
from megascend.training.checkpoint.retention import Retention

pytestmark = pytest.mark.usefixtures("megatron_imported")

CALLS = ("fsync", "mkdir", "replace", "rename", "unlink", "rmdir")
"""Calls that change the file system, except writes to files that are not visible yet."""


def is_complete(directory):
    """Check that a directory is a complete checkpoint with intact files."""
    try:
        saved = manifest.read(directory)
    except CheckpointError:
        return False
    return manifest.problems(directory, saved.files, saved.files) == []


def before_every_call(action, exchange=True):
    """Call ``action(name)`` before every call of :data:`CALLS` and every exchange of two directories."""
    inside = threading.local()

    def hooked(name, call):
        def announced(*arguments, **options):
            if not getattr(inside, "yes", False):
                inside.yes = True
                try:
                    action(name)
                finally:
                    inside.yes = False
            return call(*arguments, **options)

        return announced

    for name in CALLS:
        setattr(os, name, hooked(name, getattr(os, name)))
    atomic._exchange = hooked("exchange", atomic._exchange if exchange else lambda first, second: False)


class Copies:
    """Copies of a directory as it was before every call: of equal ones in a row, such as around an fsync, the first."""

    def __init__(self, directory, folder):
        self.directory, self.folder, self.names, self.points, self._last = directory, folder, [], [], None

    def copy(self, name, complete):
        """Keep the directory with the number of steps of the last complete checkpoint and the name of the call that follows."""
        self.names.append(name)
        paths = sorted(self.directory.rglob("*"))
        content = {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}, complete
        if content != self._last:
            target = self.folder / f"point-{len(self.points)}"
            shutil.copytree(self.directory, target)
            self.points.append((target, complete, name))
            self._last = content


# --- every kill point, by copies of the directory ---


def test_every_kill_point_of_a_series_leaves_a_loadable_checkpoint(checkpoint, tmp_path):
    """Copy the directory before every change, as SIGKILL would have left it, and resume from every copy."""

    def work():
        retention, states = Retention(tmp_path / "retention", keep_last=2), {}
        copies = Copies(retention.directory, tmp_path)
        with make_backend(checkpoint) as backend:

            def save(retention):
                pending = backend.save(retention.path(backend.step_count), after=retention.committed)
                pending.wait()

            for _ in range(2):
                train(backend)
                save(retention)
                states[backend.step_count] = exact_state(backend)
            complete = [2]

            before_every_call(lambda name: copies.copy(name, complete[0]) if complete[0] else None)
            for _ in range(2):
                train(backend)
                states[backend.step_count] = exact_state(backend)
                save(retention)
                complete[0] = backend.step_count
            complete[0] = 0  # stop copying

            for folder, last, name in copies.points:
                left = Retention(folder, keep_last=2)
                # Every name in the directory is a complete checkpoint, and `latest` is one of them.
                assert all(is_complete(left.path(step)) for step in left.steps()), (folder, name)
                assert left.candidates()[0] == left.path(left.latest())
                assert left.latest() in (last, last + 1)
                assert set(left.steps()) >= {last - 1, last} or left.steps() == [last, last + 1]
                # The next run resumes from it ...
                backend.load(left.candidates()[0])
                assert exact_state(backend) == states[left.latest()]
                # ... saves and prunes, and no temporary file remains.
                train(backend)
                save(left)
                step = backend.step_count
                assert (left.latest(), left.steps()[0]) == (step, step - 1)
                names = {path.name for path in folder.iterdir()}
                assert names == {"latest", *(left.path(left_step).name for left_step in left.steps())}, name
                shutil.rmtree(folder)
        return copies.names

    (names,) = run_distributed(work, 1, init=False, timeout_s=180)
    assert len(names) > 30
    assert {"fsync", "mkdir", "replace", "unlink", "rmdir"} <= set(names)


@pytest.mark.nightly_cases("exchange")  # covered: no exchange; every point of a series
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no exchange"])
def test_every_kill_point_of_an_overwrite_leaves_a_checkpoint(checkpoint, tmp_path, exchange):
    """Overwrite a checkpoint; without an atomic exchange of names it is briefly only present as ``.last.old``."""
    if exchange and not can_exchange(tmp_path):
        pytest.skip("this file system cannot exchange two names (renameat2)")

    def work():
        (tmp_path / "run").mkdir()
        last, states = tmp_path / "run" / "last", {}
        copies = Copies(last.parent, tmp_path)
        with make_backend(checkpoint) as backend:
            train(backend)
            states[1] = exact_state(backend)
            backend.save(last, wait=True)
            copying = [1]

            before_every_call(lambda name: copies.copy(name, copying[0]) if copying[0] else None, exchange)
            train(backend)
            states[2] = exact_state(backend)
            backend.save(last, wait=True)
            copying[0] = 0
            old_only = 0
            for folder, before, name in copies.points:
                readable = folder / "last"
                if not readable.exists():
                    assert not exchange
                    assert name == "replace"
                    assert manifest.read(folder / ".last.old").step == before
                    with pytest.raises(CheckpointError, match=r"left the one before as .*\.last\.old: rename it"):
                        backend.load(readable)
                    readable, old_only = folder / ".last.old", old_only + 1
                assert is_complete(readable), (folder, name)
                backend.load(readable)
                assert backend.step_count in (before, before + 1)
                assert exact_state(backend) == states[backend.step_count]
                backend.save(folder / "last", wait=True)
                backend.save(folder / "last", wait=True)
                assert [path.name for path in folder.iterdir()] == ["last"]
                shutil.rmtree(folder)
        return copies.names, old_only

    ((names, old_only),) = run_distributed(work, 1, init=False, timeout_s=180)
    assert len(names) > 12
    assert ("exchange" in names, old_only) == (True, 0 if exchange else 1)


def can_exchange(folder):
    first, second = folder / "one", folder / "other"
    first.mkdir()
    second.mkdir()
    try:
        return atomic._exchange(first, second)
    finally:
        first.rmdir()
        second.rmdir()
