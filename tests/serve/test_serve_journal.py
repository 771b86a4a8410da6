"""The journal's file and what its entries add up to: cut off at every byte, damaged at every byte, its rewriting interrupted."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from megascend.errors import CheckpointError
from megascend.serve.journal import Entry, Journal, Place
from megascend.serve.journal_writer import rewrite
from megascend.serve.ledger import Ledger
from megascend.serve.recovery import plan

START = 32
"""Bytes before the first frame."""
BATCHES = [
    [Entry("session", {"session": "s", "tenant": "alice"})],
    [Entry("model", {"model": "m"}, b"body"), Entry("request", {"name": "r", "number": 1}, bytes(range(9)))],
    [Entry("answer", {"text": "\u00fc \n"}, b"")],
]


def written(path: Path) -> list[int]:
    """A journal with the batches; where each ends."""
    journal, ends = Journal(path), []
    for batch in BATCHES:
        journal.append(batch)
        ends.append(journal.size)
    journal.close()
    return ends


def read(path: Path) -> list[Entry]:
    """All entries with their bodies."""
    journal = Journal(path)
    try:
        return [Entry(entry.kind, entry.values, journal.body(place)) for entry, place in journal.read()]
    finally:
        journal.close()


def test_what_was_appended_is_read(tmp_path) -> None:
    written(tmp_path / "journal")
    assert read(tmp_path / "journal") == [entry for batch in BATCHES for entry in batch]
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_a_file_that_ends_anywhere_has_the_batches_before_and_can_be_continued(tmp_path) -> None:
    ends = written(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    path = tmp_path / "journal"
    for size in range(START, len(data)):
        path.write_bytes(data[:size])
        journal = Journal(path)
        count = sum(end <= size for end in ends)
        assert [entry for entry, _ in journal.read()] == [
            Entry(each.kind, each.values) for batch in BATCHES[:count] for each in batch
        ]
        assert journal.cut == size - ([START, *ends][count])
        journal.append([Entry("end", {"session": "s"})])
        journal.close()
        assert read(path)[-1].kind == "end"


def test_damage_is_named_unless_it_is_in_the_last_batch(tmp_path) -> None:
    ends = written(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    path = tmp_path / "journal"
    for at in range(START, len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        if at < ends[1]:
            begins = START if at < ends[0] else ends[0]
            with pytest.raises(
                CheckpointError, match=f"journal: damaged at offset {begins}: entries follow from offset"
            ):
                read(path)
            assert len(path.read_bytes()) == len(data)
        else:  # nobody can tell it from one that was being written
            assert len(read(path)) == 3
    for at in range(START):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match="is no journal of this version"):
            read(path)


def test_what_clients_send_is_not_taken_for_a_frame(tmp_path) -> None:
    written(tmp_path / "other")
    body = (tmp_path / "other").read_bytes()
    journal = Journal(tmp_path / "journal")
    journal.append([Entry("request", {"name": "r"}, body)])
    journal.close()
    os.truncate(tmp_path / "journal", (tmp_path / "journal").stat().st_size - 1)
    assert read(tmp_path / "journal") == []


@pytest.mark.parametrize("failing", ["pwrite", "fsync"])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch, failing) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(BATCHES[0])
    before = (tmp_path / "journal").read_bytes()
    real, calls = getattr(os, failing), []

    def full(*args):
        calls.append(args)
        if failing == "pwrite" and len(calls) == 1:
            return real(args[0], args[1][:20], args[2])
        if len(calls) < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(os, failing, full)
    if failing == "fsync":
        calls.append(())
    with pytest.raises(OSError, match="No space left"):
        journal.append(BATCHES[1])
    monkeypatch.undo()
    assert (tmp_path / "journal").read_bytes() == before
    journal.append(BATCHES[1])
    journal.close()
    assert len(read(tmp_path / "journal")) == 3


SESSION = Entry("session", {"session": "s-1", "tenant": "alice", "metadata": None})


def request(number: int) -> Entry:
    return Entry("request", {"model": "s-1:train:0", "name": f"r{number}", "number": number}, b"x" * 1000)


def answer(number: int) -> Entry:
    return Entry("answer", {"model": "s-1:train:0", "name": f"r{number}", "number": number}, b"y" * 10)


def saved(directory: str, following: int) -> Entry:
    return Entry("save", {"model": "s-1:train:0", "directory": directory, "following": following})


MODEL = Entry("model", {"model": "s-1:train:0", "tenant": "alice", "session": "s-1", "path": "create_model"}, b"made")


def ledger_of(entries: list[Entry]) -> tuple[Ledger, list[str]]:
    """What entries add up to, and the directories that they have made needless."""
    ledger, gone = Ledger(), []
    for entry in entries:
        gone += ledger.add(entry, Place(0, len(entry.body), 10))
    return ledger, gone


def test_a_save_covers_the_requests_before_it_and_keeps_answers_that_come_with_it() -> None:
    entries = [
        SESSION,
        MODEL,
        request(1),
        request(3),
        answer(1),
        request(2),
        saved("a", 3),
        answer(2),
        saved("b", 3),
        answer(2),
    ]
    ledger, gone = ledger_of(entries)
    (found,) = plan(ledger)
    assert gone == ["a"]
    assert found.save is not None
    assert found.save.values["directory"] == "b"
    assert [kept.entry.values["number"] for kept in found.answers] == [2]
    assert [(kept.entry.values["number"], known) for kept, known in found.requests] == [(3, None)]


def test_an_answer_stays_with_its_request_if_that_is_not_covered() -> None:
    ledger, _ = ledger_of([SESSION, MODEL, request(1), request(2), answer(2), saved("a", 2)])
    (found,) = plan(ledger)
    assert found.answers == []
    ((kept, known),) = found.requests
    assert kept.entry.values["number"] == 2
    assert known is not None


def test_the_end_of_a_session_ends_all_that_is_its_own() -> None:
    others = [
        Entry("sampler", {"session": "s-1", "sampler": "p", "path": None}),
        Entry("sequence", {"session": "s-1", "sequence": "q"}),
    ]
    ledger, gone = ledger_of(
        [SESSION, MODEL, *others, saved("a", 1), Entry("end", {"session": "s-1"}), request(1), saved("b", 2)]
    )
    assert list(ledger.live()) == []
    assert gone == ["a", "b"]


def test_an_entry_of_a_later_version_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="'novelty', which this version does not know"):
        ledger_of([Entry("novelty", {})])


def test_rewriting_that_is_interrupted_at_any_step_loses_nothing(tmp_path, monkeypatch) -> None:
    """Every call that changes the disk is the last one in turn; what is there then is read as after a kill."""
    entries = [SESSION, MODEL, *map(request, range(1, 6)), saved("a", 5), answer(4)]

    def fresh(folder: Path) -> tuple[Journal, Ledger]:
        folder.mkdir()
        journal, ledger = Journal(folder / "journal"), Ledger()
        for entry, place in zip(entries, journal.append(entries), strict=True):
            ledger.add(entry, place)
        return journal, ledger

    class Killed(BaseException):
        pass

    def interrupted(count: int, folder: Path) -> bool:
        """Whether the process was killed before the call of that number; a copy of the disk is in ``folder``/after."""
        journal, ledger = fresh(folder)
        left = [count]
        with monkeypatch.context() as patch:
            for name in ("open", "pwrite", "fsync", "replace"):
                real = getattr(os, name)

                def call(*args, real=real, **options):
                    if left[0] == 0:
                        shutil.copytree(folder, folder.with_name(f"{folder.name}-after"))
                        left[0] = -1
                        raise Killed
                    left[0] -= 1
                    return real(*args, **options)

                patch.setattr(os, name, call)
            try:
                rewrite(journal, ledger)
            except Killed:
                return True
            finally:
                patch.undo()
        left_over = [request(5), SESSION, MODEL, answer(4), saved("a", 5)]
        assert sorted(e.kind for e in read(folder / "journal")) == sorted(e.kind for e in left_over)
        assert journal.size < 2000
        (place,) = [kept.place for kept in ledger.models["s-1:train:0"].requests.values()]
        assert journal.body(place) == b"x" * 1000
        return False

    count = 0
    while interrupted(count, tmp_path / str(count)):
        ledger, _ = ledger_of(read(tmp_path / f"{count}-after" / "journal"))
        (found,) = plan(ledger)
        assert [kept.entry.values["number"] for kept, _ in found.requests] == [5]
        assert [kept.entry.values["number"] for kept in found.answers] == [4]
        journal = Journal(tmp_path / f"{count}-after" / "journal")  # and it can be rewritten again
        rest = Ledger()
        for entry, place in journal.read():
            rest.add(entry, place)
        rewrite(journal, rest)
        count += 1
    assert count >= 6
