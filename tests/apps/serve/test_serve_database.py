"""The database of the durable state: truncated, damaged, full, or killed while written; and the state of its rows."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from megascend.apps.serve.store.database import ADVICE, PARENTS, Removal, StateDatabase, StoredRow
from megascend.errors import CheckpointError

SESSION = StoredRow("session", "s", {"tenant": "alice", "metadata": None})
MODEL = StoredRow("model", "m", {"tenant": "alice", "path": "create_model"}, b"made", "s")
HEADER, FRAME, PAGE = 32, 24, 4096
"""Bytes of a log's header, of a frame's header, and of a page (sqlite.org/fileformat2.html)."""


def request(number: int) -> StoredRow:
    return StoredRow("request", f"r{number}", {"path": "optim_step"}, b"x" * 1000, "m", number)


def answer(number: int) -> StoredRow:
    return StoredRow("answer", f"r{number}", {"kind": "optim_step"}, b"y" * 10, "m", number)


def saved(directory: str, following: int) -> StoredRow:
    return StoredRow("save", "m", {"directory": directory, "following": following}, parent="m")


BATCHES = [
    [SESSION],
    [MODEL, StoredRow("request", "r1", {}, bytes(range(9)), "m", 1)],
    [StoredRow("answer", "r1", {"text": "\u00fc \n"}, b"", "m", 1)],
]


def rows_of(path: Path) -> list[StoredRow]:
    """Return all rows that a server reads when it starts on these files."""
    database = StateDatabase(path)
    try:
        return [row for kind in PARENTS for row in database.rows(kind)]
    finally:
        database.close()


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, list[int]]:
    """Build a database as left by a killed server, with all batches in the log; return also where each one ends."""
    (tmp_path / "live").mkdir()
    database, ends = StateDatabase(tmp_path / "live" / "state"), []
    for batch in BATCHES:
        database.write(batch)
        ends.append(log_of(database.path).stat().st_size)
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    database.close()
    return tmp_path / "killed" / "state", ends


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def copied(path: Path, log: bytes, name: str = "copy") -> Path:
    """Copy the database to another directory, with another log."""
    folder = path.parent.with_name(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(path, folder)
    log_of(folder / path.name).write_bytes(log)
    return folder / path.name


def test_rows_are_read_as_they_were_written(killed) -> None:
    path, _ = killed
    assert rows_of(path) == [row for batch in BATCHES for row in batch]
    assert path.stat().st_mode & 0o777 == 0o600
    assert not log_of(path).exists()
    assert rows_of(path) == [row for batch in BATCHES for row in batch]


def test_a_log_that_ends_anywhere_has_the_batches_before_and_can_be_continued(killed) -> None:
    path, ends = killed
    log = log_of(path).read_bytes()
    sizes = {0, 1, HEADER - 1, HEADER}
    for begin in range(HEADER, len(log), FRAME + PAGE):
        sizes |= {
            begin + 1,
            begin + FRAME - 1,
            begin + FRAME,
            begin + 2000,
            begin + FRAME + PAGE - 1,
            begin + FRAME + PAGE,
        }
    for size in sorted(sizes):
        copy = copied(path, log[:size])
        count = sum(end <= size for end in ends)
        before = [row for batch in BATCHES[:count] for row in batch]
        assert rows_of(copy) == before
        database = StateDatabase(copy)
        database.write([StoredRow("session", "another", {})])
        database.close()
        assert len(rows_of(copy)) == len(before) + 1


def test_damage_to_the_log_is_reported_unless_it_is_in_the_last_batch(killed) -> None:
    path, ends = killed
    log = log_of(path).read_bytes()
    places = list(range(HEADER))
    for begin in range(HEADER, len(log), FRAME + PAGE):
        places += [*range(begin, begin + FRAME), begin + FRAME, begin + 2000, begin + FRAME + PAGE - 1]
    for position in places:
        copy = copied(path, log[:position] + bytes([log[position] ^ 0x55]) + log[position + 1 :])
        if position < ends[1]:
            begin = 0 if position < HEADER else (position - HEADER) // (FRAME + PAGE) * (FRAME + PAGE) + HEADER
            with pytest.raises(CheckpointError, match=rf"state-wal: damaged at offset {begin}\b"):
                rows_of(copy)
            assert len(log_of(copy).read_bytes()) == len(log)
        else:  # indistinguishable from a frame that was being written
            read_or_refused(copy, [row for batch in BATCHES[:2] for row in batch])


def test_log_followed_by_older_frames_is_read(killed, tmp_path) -> None:
    """Read a log that SQLite has restarted from the front: its new frames are followed by those of the previous log."""
    path, _ = killed
    database = StateDatabase(path)
    database.write([request(number) for number in range(2, 60)])
    database._connection.execute("PRAGMA wal_checkpoint(RESTART)")
    database.write([answer(2)])
    database.write([answer(3)])
    shutil.copytree(path.parent, tmp_path / "again")
    database.close()
    assert len(rows_of(tmp_path / "again" / path.name)) == 4 + 58 + 2


def read_or_refused(path: Path, rows: list[StoredRow]) -> bool:
    """Check whether damage is reported; otherwise all rows must be unchanged."""
    try:
        same = rows_of(path) == rows
    except CheckpointError:
        return True
    assert same
    return False


def test_damage_to_the_database_is_reported_or_changes_nothing(killed) -> None:
    path, _ = killed
    rows = rows_of(path)
    data = path.read_bytes()
    chance = random.Random(1)
    places = [
        *range(100),
        *(chance.randrange(100, len(data)) for _ in range(int(os.environ.get("MEGASCEND_TEST_PLACES", 150)))),
    ]
    for position in places:
        copy = copied(path, b"")
        copy.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        read_or_refused(copy, rows)
    for page in range(len(data) // PAGE):
        copy = copied(path, b"")
        copy.write_bytes(data[: page * PAGE] + bytes(PAGE) + data[(page + 1) * PAGE :])
        assert read_or_refused(copy, rows)
    for size in (0, 1, 99, PAGE, len(data) - PAGE, len(data) - 1):
        copy = copied(path, b"")
        copy.write_bytes(data[:size])
        assert read_or_refused(copy, rows)


def test_missing_database_with_a_log_raises_checkpoint_error(killed) -> None:
    path, _ = killed
    path.unlink()
    with pytest.raises(CheckpointError, match="state is missing, and state-wal beside it is not"):
        rows_of(path)


@pytest.mark.parametrize("pragma", ["application_id", "user_version"])
def test_a_database_of_another_version_is_refused(killed, pragma) -> None:
    path, _ = killed
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA {pragma} = 7")
    connection.close()
    with pytest.raises(CheckpointError, match="is not a state of version 1"):
        rows_of(path)


def test_a_full_disk_leaves_the_rows_as_they_were(tmp_path) -> None:
    database = StateDatabase(tmp_path / "state")
    database.write([SESSION, MODEL])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log_of(database.path).stat().st_size + 5000, hard))
    try:
        with pytest.raises(sqlite3.OperationalError):
            database.write([request(1), request(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(database.rows("request")) == []
    database.write([request(1), request(2)])
    database.close()
    assert rows_of(tmp_path / "state") == [SESSION, MODEL, request(1), request(2)]


WRITER = """
import sys
from pathlib import Path
from megascend.apps.serve.store.database import StateDatabase, StoredRow
database = StateDatabase(Path(sys.argv[1]))
for number in range(len(list(database.rows("session"))), 10**9):
    database.write([StoredRow("session", f"{number:09}", {}, b"x" * 20_000)])
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_every_batch_that_it_has_reported(tmp_path) -> None:
    chance = random.Random(2)
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "state")], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 400)):
            process.stdout.readline()
        time.sleep(chance.random() / 1000)
        process.send_signal(signal.SIGKILL)
        reported = [int(line) for line in process.stdout.read().split()]
        process.wait()
        names = [row.name for row in rows_of(tmp_path / "state")]
        assert names == [f"{number:09}" for number in range(len(names))]
        assert len(names) in ((reported[-1] + 1, reported[-1] + 2) if reported else range(10**9))


def test_save_removes_earlier_requests_and_keeps_its_answers(tmp_path) -> None:
    database = StateDatabase(tmp_path / "state")
    database.write([SESSION, MODEL, request(1), request(3), answer(1), request(2)])
    assert database.write([saved("a", 3), answer(2)]) == []
    assert database.write([saved("b", 3), answer(2)]) == ["a"]
    assert [row.values["directory"] for row in database.rows("save")] == ["b"]
    assert list(database.rows("answer", "m")) == [answer(2)]
    assert list(database.rows("request", "m")) == [request(3)]
    database.close()


def test_an_answer_stays_with_its_request_if_that_is_not_covered(tmp_path) -> None:
    database = StateDatabase(tmp_path / "state")
    database.write([SESSION, MODEL, request(1), request(2), answer(2), saved("a", 2)])
    assert list(database.rows("answer", "m")) == [answer(2)]
    assert list(database.rows("request", "m")) == [request(2)]
    database.close()


def test_end_of_a_session_removes_its_rows_and_ignores_later_ones(tmp_path) -> None:
    database = StateDatabase(tmp_path / "state")
    late_rows = [StoredRow("sampler", "p", {"path": None}, parent="s"), StoredRow("sequence", "q", {}, parent="s")]
    database.write([SESSION, MODEL, *late_rows, saved("a", 1), answer(1), StoredRow("session", "another", {})])
    assert database.write([Removal("session", "s"), Removal("session", "s"), request(1), saved("b", 2)]) == ["a", "b"]
    database.close()
    assert [row.name for row in rows_of(tmp_path / "state")] == ["another"]


def test_database_in_use_is_not_called_damaged(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "state.sqlite"
    StateDatabase(path).close()
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0.1))
    program = (
        "import sqlite3, sys; connection = sqlite3.connect(sys.argv[1], isolation_level=None); "
        "connection.execute('BEGIN'); connection.execute('SELECT * FROM rows').fetchone(); print(); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        with pytest.raises(CheckpointError, match="another program has it open") as raised:
            StateDatabase(path)
        assert ADVICE not in str(raised.value)
        shell.communicate(b"\n")
    StateDatabase(path).close()
