"""Files that several processes want are made by one of them."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from megascend.testing.cached import alone, cached, replace


def write(path: Path) -> None:
    """Slowly, half at a time."""
    path.mkdir()
    (path / "first").write_text(str(os.getpid()))
    time.sleep(0.2)
    (path / "second").write_text(str(os.getpid()))


def want(path: Path, found) -> None:
    cached(path, write)
    found.put(tuple((path / name).read_text() for name in ("first", "second")))


def test_one_makes_it_and_nobody_sees_a_half(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    processes = [context.Process(target=want, args=(tmp_path / "it", found)) for _ in range(6)]
    for process in processes:
        process.start()
    seen = [found.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(60)
    assert len(set(seen)) == 1
    assert seen[0][0] == seen[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_what_is_there_stays_and_what_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert cached(tmp_path / "file", lambda path: path.write_text("other")).read_text() == "mine"

    def fail(path: Path) -> None:
        path.write_text("half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        cached(tmp_path / "new", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert cached(tmp_path / "new", lambda path: path.write_text("whole")).read_text() == "whole"


def test_a_directory_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "old")
    with alone(tmp_path / "old"):
        replace(tmp_path / "old", lambda path: path.mkdir())
    assert list((tmp_path / "old").iterdir()) == []
