"""Atomic replacement of files and directories, and their digests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time

import pytest
import safetensors.torch
import torch
import xxhash

from megascend.errors import PlatformError
from megascend.runtime.io.atomic import (
    MOVING,
    OLD_ENTRIES,
    WRITING,
    entries,
    is_replaceable,
    replacing,
    replacing_directory,
    temporary_path,
    vacant,
)
from megascend.runtime.io.hashing import digest
from megascend.runtime.io.paths import is_mount_point
from megascend.runtime.io.shared import cached, prune
from megascend.testing import faults


def test_file_is_replaced_atomically(tmp_path, monkeypatch):
    path, synced = tmp_path / "file", []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), fsync(descriptor)))
    with replacing(path, durable=True) as new_path:
        assert new_path == temporary_path(path) == tmp_path / ".file.writing"
        new_path.write_text("first")
        assert not path.exists()
    assert len(synced) == 2  # the file, then the name
    with pytest.raises(KeyError), replacing(path) as new_path:  # noqa: PT012
        new_path.write_text("second")
        raise KeyError
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "first"


def test_least_recently_used_entries_are_pruned(tmp_path):
    now = time.time()
    for name, hours in {"new": 0.5, "day": 24, "week": 168, "month": 720, ".month-abc": 720}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (now - hours * 3600,) * 2)
    (tmp_path / "kept").write_bytes(b"x" * 100)
    os.utime(tmp_path / "kept", (0, 0))

    def pruned(limit):
        return [path.name for path in prune(tmp_path, limit, keep=tmp_path / "kept")]

    assert pruned(500) == []
    assert cached(tmp_path / "month", lambda path: None) == tmp_path / "month"  # the lookup makes it the newest
    assert pruned(400) == ["week"]
    assert pruned(100) == ["day"]  # the others are in use
    assert sorted(os.listdir(tmp_path)) == [".month-abc", "kept", "month", "new"]


def test_digests_match_hashlib_and_xxhash(tmp_path):
    (tmp_path / "file").write_bytes(b"abc" * 2**21)
    assert digest(tmp_path / "file", hashlib.sha256) == hashlib.sha256(b"abc" * 2**21).hexdigest()
    assert digest(tmp_path / "file", xxhash.xxh3_128) == xxhash.xxh3_128(b"abc" * 2**21).hexdigest()


# --- links, mount points, leftovers ---


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def write(path, text):
    with replacing_directory(path) as fresh:
        (fresh / "weights").write_text(text)


LINKS = {
    "an empty directory": lambda folder: (folder / "disk" / "out").mkdir(),
    "a directory with an earlier one": lambda folder: write(folder / "disk" / "out", "earlier"),
    "nothing": lambda folder: None,
    "nothing, in a directory that is missing": lambda folder: (folder / "disk").rmdir(),
}


@pytest.mark.parametrize("behind", LINKS)
def test_link_is_followed_and_kept(tmp_path, behind):
    (tmp_path / "disk").mkdir()
    LINKS[behind](tmp_path)
    link, second = tmp_path / "link", tmp_path / "second"
    link.symlink_to(tmp_path / "disk" / "out")
    second.symlink_to("link")
    for path, text in ((link, "one"), (second, "two"), (link, "three")):
        with pytest.raises(KeyError), replacing_directory(path) as fresh:  # noqa: PT012
            (fresh / "weights").write_text("half")
            raise KeyError
        write(path, text)
        assert link.is_symlink()
        assert second.is_symlink()
        assert content(tmp_path / "disk" / "out") == {"weights": text}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["disk", "link", "out", "second", "weights"]


def test_target_file_of_a_link_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/file")
    for text in ("one", "two"):
        with replacing(tmp_path / "link") as fresh:
            fresh.write_text(text)
        assert (tmp_path / "link").is_symlink()
        assert content(tmp_path / "disk") == {"file": text}


def test_mount_point_is_filled_in_place(tmp_path):
    try:
        context = faults.full_disk(2**20)
        disk = context.__enter__()
    except PlatformError as error:
        pytest.skip(str(error))
    try:
        (disk / "lost+found").mkdir()
        assert is_mount_point(disk)
        assert vacant(disk)
        (tmp_path / "link").symlink_to(disk)
        for path, text in ((disk, "one"), (tmp_path / "link", "two"), (disk, "three")):
            with pytest.raises(OSError, match="No space left"):
                write(path, "x" * 2**21)
            write(path, text)
            assert {entry.name: entry.read_text() for entry in entries(disk)} == {"weights": text}
            assert sorted(os.listdir(disk)) == ["lost+found", "weights"]
    finally:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("failing", range(1, 7))
@pytest.mark.parametrize("killed", [False, True])
def test_directory_that_cannot_be_renamed_is_replaced_by_entries(tmp_path, monkeypatch, failing, killed):
    """Replace entry by entry if renaming raises EXDEV (lower layers of an overlay), and undo it after any failed move.

    The moves are: two old entries, their folder, the new entry, and the folder again.
    """
    target = tmp_path / "out"
    write(target, "old")
    (target / "config").write_text("old")
    monkeypatch.setattr("megascend.runtime.io.atomic._exchange", lambda first, second: False)
    real, moves = os.replace, []

    def replace(source, destination):
        if source == target:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        moves.append(destination)
        if len(moves) == failing:
            raise KeyboardInterrupt if killed else OSError(errno.EIO, "Input/output error")
        real(source, destination)

    monkeypatch.setattr(os, "replace", replace)
    with contextlib.suppress(KeyboardInterrupt, OSError):
        write(target, "new")
    if killed:  # and the next writer fails before it has written
        with pytest.raises(KeyError), replacing_directory(target):
            raise KeyError
    old = {"weights": "old", "config": "old"}
    assert content(target) == (old if failing <= 5 else {"weights": "new"})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_directory_moved_by_a_killed_process_is_restored(tmp_path):
    write(tmp_path / "out", "earlier")
    (tmp_path / "out").rename(tmp_path / ".out.old")
    (tmp_path / ".out.writing").mkdir()
    with pytest.raises(KeyError), replacing_directory(tmp_path / "out"):
        raise KeyError
    assert content(tmp_path / "out") == {"weights": "earlier"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_file_modes_follow_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        with replacing_directory(tmp_path / "out") as fresh:
            safetensors.torch.save_file({"x": torch.zeros(1)}, fresh / "weights")
            (fresh / "script").touch(0o700)
        with replacing(tmp_path / "file") as fresh:
            fresh.write_text("")
        cached(tmp_path / "cache" / "file", lambda path: safetensors.torch.save_file({"x": torch.zeros(1)}, path))
    finally:
        os.umask(before)
    files = (tmp_path / "out" / "weights", tmp_path / "file", tmp_path / "cache" / "file")
    assert [oct(path.stat().st_mode & 0o777) for path in files] == [oct(mode)] * 3
    assert (tmp_path / "out" / "script").stat().st_mode & 0o777 == 0o700 & ~mask


def test_leftovers_of_killed_processes_are_removed_from_the_cache(tmp_path):
    for name, hours in ((".file-abc", 5), (".file-def", 0), (".file-growing", 5)):
        (tmp_path / name).mkdir()
        if name == ".file-growing":  # of a process on another host: the file it writes is new, the folder is not
            (tmp_path / name / "file").touch()
        os.utime(tmp_path / name, (time.time() - hours * 3600,) * 2)
    cached(tmp_path / "file", lambda path: path.write_text("x"))
    assert sorted(os.listdir(tmp_path)) == [".file-def", ".file-growing", "file"]


@pytest.mark.parametrize("directory", [MOVING, OLD_ENTRIES])
def test_interrupted_replacement_is_undone_before_the_target_is_checked(tmp_path, directory):
    for name in (directory, *([WRITING] if directory == OLD_ENTRIES else [])):
        (tmp_path / name).mkdir()
    (tmp_path / directory / "config.json").write_text("earlier")
    if directory == OLD_ENTRIES:
        (tmp_path / "half").write_text("new")
    assert is_replaceable(tmp_path, "config.json")
    assert (tmp_path / "config.json").read_text() == "earlier"
    assert not (tmp_path / "half").exists()
