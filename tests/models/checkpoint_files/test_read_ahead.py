"""Prefetch of files into the page cache, which never raises or blocks."""

import os
import threading
import time

import pytest

from megascend.models.checkpoint_files import read_ahead as module
from megascend.models.checkpoint_files.read_ahead import CHUNK, read_ahead


@pytest.fixture
def files(tmp_path):
    """Write two files of several chunks and evict them from the page cache."""
    paths = []
    for name, size in (("a", 3 * CHUNK + 5), ("b", CHUNK)):
        path = tmp_path / name
        path.write_bytes(os.urandom(1024) * (size // 1024) + bytes(size % 1024))
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        paths.append(path)
    return paths


def cached(path):
    """Return for one byte per MiB whether it can be read without waiting for the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        offsets = range(0, path.stat().st_size, 2**20)
        return [_answers(descriptor, offset) for offset in offsets]
    finally:
        os.close(descriptor)


def _answers(descriptor, offset):
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def test_files_are_read_into_the_page_cache(files):
    if all(cached(files[0])):
        pytest.skip("this file system keeps its files in memory")
    with read_ahead(files):
        _wait_until(lambda: all(all(cached(path)) for path in files))
    _wait_until(lambda: not _threads())


def test_files_larger_than_available_memory_are_not_read(files, monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: 2 * CHUNK)
    with read_ahead(files):
        assert not _threads()


def test_vanished_files_raise_no_error(tmp_path):
    (tmp_path / "b").write_bytes(b"x")
    with read_ahead([tmp_path / "never was", tmp_path / "b", tmp_path]):
        (tmp_path / "b").unlink()
    _wait_until(lambda: not _threads())


def _threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("megascend-read-ahead")]


def _wait_until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("not within 30 seconds")
