"""Reading ahead brings files into the page cache, and never gets in anybody's way."""

import os
import threading
import time

import pytest

from megascend.huggingface import read_ahead as module
from megascend.huggingface.read_ahead import CHUNK, chunks, read_ahead


@pytest.fixture
def files(tmp_path):
    """Two files of several chunks, on the disk and not in the page cache."""
    found = []
    for name, size in (("a", 3 * CHUNK + 5), ("b", CHUNK)):
        path = tmp_path / name
        path.write_bytes(os.urandom(1024) * (size // 1024) + bytes(size % 1024))
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        found.append(path)
    return found


def cached(path):
    """Places, one a MiB, that can be read without waiting for the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        places = range(0, path.stat().st_size, 2**20)
        return [_answers(descriptor, place) for place in places]
    finally:
        os.close(descriptor)


def _answers(descriptor, place):
    try:
        return os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def test_files_come_into_the_page_cache(files):
    if all(cached(files[0])):
        pytest.skip("this file system keeps its files in memory")
    with read_ahead(files):
        _wait_until(lambda: all(all(cached(path)) for path in files))
    _wait_until(lambda: not _threads())


def test_processes_share_the_work(files):
    sizes = {path: path.stat().st_size for path in files}
    whole = chunks(sizes)
    assert [sum(length for file, _, length in whole if file == path) for path in files] == list(sizes.values())
    shares = [whole[index::3] for index in range(3)]
    assert sorted(shares[0] + shares[1] + shares[2]) == sorted(whole)


def test_what_would_not_fit_into_memory_is_left_alone(files, monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: 2 * CHUNK)
    with read_ahead(files):
        assert not _threads()


def test_files_that_go_away_are_no_error(tmp_path):
    (tmp_path / "b").write_bytes(b"x")
    with read_ahead([tmp_path / "never was", tmp_path / "b", tmp_path]):
        (tmp_path / "b").unlink()
    _wait_until(lambda: not _threads())


def test_an_error_in_the_block_passes(files):
    with pytest.raises(ValueError, match="mine"), read_ahead(files):
        raise ValueError("mine")
    _wait_until(lambda: not _threads())


def _threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("megascend-read-ahead")]


def _wait_until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("not within 30 seconds")
