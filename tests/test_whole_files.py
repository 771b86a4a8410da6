"""Files and directories that appear whole, and digests of them."""

from __future__ import annotations

import hashlib
import os
import time

import pytest
import xxhash

from megascend.files import beside, cached, digest, prune, replace_directory, replacing


def test_a_directory_is_replaced_whole(tmp_path):
    target, new = tmp_path / "out", tmp_path / ".out.writing"
    for number in ("first", "second"):
        new.mkdir()
        (new / number).write_text(number)
        replace_directory(new, target)
        assert [path.name for path in target.iterdir()] == [number]
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_an_earlier_replacement_left_is_no_obstacle(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "x").write_text("")
    (tmp_path / "new").mkdir()
    replace_directory(tmp_path / "new", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path, synced = tmp_path / "file", []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), fsync(descriptor)))
    with replacing(path, durable=True) as fresh:
        assert fresh == beside(path) == tmp_path / ".file.writing"
        fresh.write_text("first")
        assert not path.exists()
    assert len(synced) == 1
    with pytest.raises(KeyError), replacing(path) as fresh:  # noqa: PT012
        fresh.write_text("second")
        raise KeyError
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "first"


def test_what_was_asked_for_the_longest_ago_is_removed_when_there_is_too_much(tmp_path):
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
    assert cached(tmp_path / "month", lambda path: None) == tmp_path / "month"  # asked for: now it is the newest
    assert pruned(400) == ["week"]
    assert pruned(100) == ["day"]  # the others are in use
    assert sorted(os.listdir(tmp_path)) == [".month-abc", "kept", "month", "new"]


def test_what_is_there_is_not_made_again(tmp_path):
    made = []

    def make(path):
        made.append(path.name)
        path.write_text(str(len(made)))

    for _ in range(2):
        assert cached(tmp_path / "folder" / "file", make).read_text() == "1"
    assert made == ["file"]


def test_digests(tmp_path):
    (tmp_path / "file").write_bytes(b"abc" * 2**21)
    assert digest(tmp_path / "file", hashlib.sha256) == hashlib.sha256(b"abc" * 2**21).hexdigest()
    assert digest(tmp_path / "file", xxhash.xxh3_128) == xxhash.xxh3_128(b"abc" * 2**21).hexdigest()
