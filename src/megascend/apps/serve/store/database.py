"""The durable state of the service: one SQLite database (WAL, synchronous=FULL), a transaction a batch, a checksum a row.

    session ── sampler, sequence, model ── save, request, answer

Deleting a row deletes its children. SQLite checks the structure of its pages but not their content, so every row has a CRC-32.
SQLite also silently drops the rest of a write-ahead log behind a damaged frame, so :func:`check_log` reads the log first.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascend.errors import CheckpointError
from megascend.runtime.io.atomic import replacing

PARENTS: Mapping[str, str | None] = {
    "settings": None,
    "session": None,
    "sampler": "session",
    "sequence": "session",
    "model": "session",
    "save": "model",
    "request": "model",
    "answer": "model",
}
"""Row kind to parent kind."""

APPLICATION, VERSION = 0x6D656761, 1
LOG_BYTES = 64 * 2**20
"""Size that SQLite truncates the write-ahead log to after a large batch."""
ADVICE = (
    "The server does not start, because it would lose steps: restore the directory from a backup, or move it away to "
    "start without it"
)
_TABLE = """CREATE TABLE rows (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    parent INTEGER REFERENCES rows (id) ON DELETE CASCADE,
    number INTEGER,
    fields TEXT NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    UNIQUE (kind, name)
)"""
_INDEX = "CREATE INDEX children ON rows (parent, kind, number)"
_SELECT = """SELECT row.kind, row.name, parent.name, row.parent, row.number, row.fields, row.body, row.checksum
    FROM rows AS row LEFT JOIN rows AS parent ON parent.id = row.parent"""


@dataclass(frozen=True)
class StoredRow:
    """One row.

    Attributes:
        kind: one of :data:`PARENTS`.
        name: unique within its kind.
        parent: name of its session or model.
        number: number of a request or answer in the model's order.
        values: fields that JSON can represent.
    """

    kind: str
    name: str
    values: Mapping[str, Any]
    body: bytes = b""
    parent: str | None = None
    number: int | None = None


@dataclass(frozen=True)
class Removal:
    """Deletion of a row and its children; a missing row is ignored."""

    kind: str
    name: str


class StateDatabase:
    """The database, opened exclusively. The caller holds the directory's lock; threads must take turns.

    Args:
        path: created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            _create(path)
        check_log(path)  # before SQLite opens the file, which replays the log and truncates what it does not accept
        with _naming(path):
            # isolation_level=None: Python would otherwise open a transaction before the first INSERT; write() opens its own.
            # check_same_thread=False: recovery reads in the main thread before the writer's thread starts.
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                self._connection.close()
                raise
        self._inode = path.stat().st_ino

    def _open(self) -> None:
        run = self._connection.execute
        # locking_mode first: set before WAL mode, WAL needs no shared-memory file.
        # FULL, because with NORMAL a log is synced at checkpoints only: a power cut would undo transactions whose requests were
        # answered. foreign_keys is off by default in every connection.
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            run(f"PRAGMA {pragma}")
        run(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        versions = [run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        if versions != [APPLICATION, VERSION]:
            raise CheckpointError(f"{self.path} is not a state of version {VERSION} of megascend serve: {versions}")
        if [sql for (sql,) in run("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")] != [
            _TABLE,
            _INDEX,
        ]:
            raise CheckpointError(f"{self.path}: damaged: its schema is not {VERSION}'s. {ADVICE}")
        (problem,) = run("PRAGMA integrity_check(1)").fetchone()
        if problem != "ok":
            raise CheckpointError(f"{self.path}: damaged: {problem}. {ADVICE}")
        # Every checksum, at the start: damage found when a model is restored would leave other models half restored.
        for _ in self._select("ORDER BY row.id"):
            pass

    def _select(self, condition: str, *values: Any) -> Iterator[StoredRow]:
        """Read rows and verify their checksums."""
        for kind, name, parent, parent_id, number, fields, body, checksum in self._connection.execute(
            f"{_SELECT} {condition}", values
        ):
            if _checksum(kind, name, parent_id, number, fields, body) != checksum or (parent is None) != (
                PARENTS.get(kind, kind) is None
            ):
                raise CheckpointError(f"{self.path}: damaged: {kind} {name} differs from its checksum. {ADVICE}")
            yield StoredRow(kind, name, json.loads(fields), body, parent, number)

    def rows(self, kind: str, parent: str | None = None) -> Iterator[StoredRow]:
        """Read the rows of a kind, optionally of one parent, in the order of first writing."""
        with _naming(self.path):
            yield from self._select(
                "WHERE row.kind = ? AND (? IS NULL OR parent.name = ?) ORDER BY row.id", kind, parent, parent
            )

    def write(self, changes: Sequence[StoredRow | Removal]) -> list[str]:
        """Apply changes in one transaction, which is on disk on return.

        A row without an existing parent is skipped. A save replaces the previous one, and deletes the requests below its
        ``following`` with their answers; answers after it in ``changes`` stay.

        Returns:
            Directories of saves that are no longer referenced.

        Raises:
            sqlite3.OperationalError: nothing was written.
        """
        unneeded = []
        # SQLite goes on to write into a file that was removed, or whose folder was.
        if not self.path.exists() or self.path.stat().st_ino != self._inode:
            raise sqlite3.OperationalError("the file was removed or replaced; start the server again")
        with self._connection:  # commits, or rolls back after an error
            self._connection.execute("BEGIN IMMEDIATE")
            for change in changes:
                unneeded += self._write_row(change) if isinstance(change, StoredRow) else self._remove(change)
        return unneeded

    def _write_row(self, row: StoredRow) -> list[str]:
        run, kind_of_parent, parent = self._connection.execute, PARENTS[row.kind], None
        if kind_of_parent is not None:
            match = run("SELECT id FROM rows WHERE kind = ? AND name = ?", (kind_of_parent, row.parent)).fetchone()
            if match is None:
                # Its session or model was removed by an earlier change.
                return [row.values["directory"]] if row.kind == "save" else []
            (parent,) = match
        unneeded = []
        if row.kind == "save":
            earlier = self._select("WHERE row.kind = 'save' AND row.parent = ?", parent)
            unneeded = [save.values["directory"] for save in earlier]
            # In the same transaction: with the save alone, a restart would repeat steps that the save already has; without it,
            # the steps would be lost.
            covered = (parent, row.values["following"])
            run("DELETE FROM rows WHERE parent = ? AND kind = 'request' AND number < ?", covered)
            run(
                "DELETE FROM rows WHERE parent = ?1 AND kind = 'answer' AND name NOT IN "
                "(SELECT name FROM rows WHERE parent = ?1 AND kind = 'request')",
                (parent,),
            )
        fields = json.dumps(row.values, separators=(",", ":"))
        content = (row.kind, row.name, parent, row.number, fields, row.body)
        # An upsert and not REPLACE, which would delete the row and, by cascade, its children.
        run(
            "INSERT INTO rows (kind, name, parent, number, fields, body, checksum) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (kind, name) DO UPDATE SET parent = excluded.parent, number = excluded.number, "
            "fields = excluded.fields, body = excluded.body, checksum = excluded.checksum",
            (*content, _checksum(*content)),
        )
        return unneeded

    def _remove(self, removal: Removal) -> list[str]:
        # Read before the delete, which cascades without reporting the rows that it deletes.
        doomed = (
            "WITH RECURSIVE doomed (id) AS (SELECT id FROM rows WHERE kind = ? AND name = ? "
            "UNION SELECT rows.id FROM rows JOIN doomed ON rows.parent = doomed.id) "
            "SELECT fields FROM rows JOIN doomed USING (id) WHERE kind = 'save'"
        )
        key = (removal.kind, removal.name)
        unneeded = [json.loads(fields)["directory"] for (fields,) in self._connection.execute(doomed, key)]
        self._connection.execute("DELETE FROM rows WHERE kind = ? AND name = ?", key)
        return unneeded

    def close(self) -> None:
        self._connection.close()


def _checksum(kind: str, name: str, parent: int | None, number: int | None, fields: str, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(f"{kind}\0{name}\0{parent}\0{number}\0{fields}".encode()))


def _create(path: Path) -> None:
    """Create the database under a temporary name and rename it, so that the file is never incomplete."""
    if _log_of(path).exists():
        raise CheckpointError(f"{path} is missing, and {_log_of(path).name} beside it is not. {ADVICE}")
    with replacing(path, durable=True) as temporary:
        temporary.unlink(missing_ok=True)
        # Created here with its mode: SQLite would create it readable for all, and gives the log the mode of the database.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        connection = sqlite3.connect(temporary)
        connection.executescript(
            f"{_TABLE}; {_INDEX}; PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION};"
        )
        connection.close()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Convert SQLite errors to CheckpointError with the path."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            # Without the advice to move it away: it is sound.
            raise CheckpointError(
                f"{path}: another program has it open ({error}); close that, and start again"
            ) from error
        raise CheckpointError(f"{path}: damaged, or it cannot be read: {error}. {ADVICE}") from error


# --- the write-ahead log (sqlite.org/fileformat2.html, section 4) ---

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def check_log(path: Path) -> None:
    """Check that a write-ahead log has no damage except a truncated last batch.

    A transaction is on disk before the next one begins. So an invalid frame that is followed by a commit and by another frame of
    the same log means damage. Damage to the last transaction cannot be distinguished from an interrupted write; no client was
    answered on its basis.
    """
    log = _log_of(path)
    if not log.exists():
        return
    with log.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return
        magic, _, page_size, _, *salts, first, second = _HEADER.unpack(header)
        order = ">" if magic & 1 else "<"
        sums = _log_sums(header[:24], order, (0, 0))
        if sums != (first, second):  # the header is on disk before the first frame
            raise CheckpointError(f"{log}: damaged at offset 0. {ADVICE}")
        invalid, commit_behind, commit_before, offset = None, False, False, _HEADER.size
        while len(frame := file.read(_FRAME.size + page_size)) == _FRAME.size + page_size:
            _, commit, *frame_salts, first, second = _FRAME.unpack_from(frame)
            same_log = frame_salts == salts
            # Checksums are chained: a frame that fits was written directly behind the previous one.
            fits = same_log and _log_sums(frame[:8] + frame[_FRAME.size :], order, sums) == (first, second)
            if invalid is not None and same_log and (commit_behind or (fits and commit_before)):
                raise CheckpointError(
                    f"{log}: damaged at offset {invalid}: batches follow from offset {offset} on. {ADVICE}"
                )
            if invalid is None and not fits:
                invalid = offset
            sums, commit_before = (first, second), commit != 0
            commit_behind = invalid is not None and (commit_behind or (same_log and commit_before))
            offset += len(frame)


def _log_sums(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    """Update the chained checksums of a log with more bytes."""
    first, second = sums
    for even_word, odd_word in struct.iter_unpack(f"{order}2I", data):
        first = (first + even_word + second) & 0xFFFFFFFF
        second = (second + odd_word + first) & 0xFFFFFFFF
    return first, second
