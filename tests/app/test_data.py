"""Reading training text, and the order in which samples come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascend.app.data import Document, batches, fingerprint_of, read_documents
from megascend.batch.sample import Sample
from megascend.errors import DataError

CHAT = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_jsonl(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines, but not in JSONL.
    path = write(tmp_path / "a.jsonl", {"messages": CHAT, "id": 7}, "", '{"text": "x\u2028y"}')
    assert read_documents(path) == [
        Document(f"{path}:1", messages=tuple(CHAT)),
        Document(f"{path}:3", text="x\u2028y"),
    ]


def test_a_folder_is_read_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write(tmp_path / "c.txt", "third")
    write(tmp_path / "b" / "x.md", "second")
    write(tmp_path / "a.jsonl", {"text": "first"})
    write(tmp_path / "ignored.csv", "1,2")
    (tmp_path / "empty.txt").write_text(" \n")
    assert [document.text for document in read_documents(tmp_path)] == ["first", "second\n", "third\n"]


BAD_LINES = {
    "not json": ('{"text": "x"', "not valid JSON"),
    "not an object": ("[1]", "found list"),
    "no key": ({"prompt": "x"}, "found: prompt"),
    "both keys": ({"text": "x", "messages": CHAT}, "exactly one"),
    "empty text": ({"text": " "}, "'text' must be a string that is not empty"),
    "text is a number": ({"text": 3}, "found 3"),
    "no messages": ({"messages": []}, "'messages' must be a list that is not empty"),
    "message is a string": ({"messages": ["hi"]}, r"messages\[0\] must be an object"),
    "no role": ({"messages": [{"content": "x"}]}, r"messages\[0\] must have a string 'role'"),
    "content is null": ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, r"messages\[1\].*'content'"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, name: str) -> None:
    line, message = BAD_LINES[name]
    path = write(tmp_path / "data.jsonl", {"text": "good"}, line)
    with pytest.raises(DataError, match=message) as caught:
        read_documents(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a file nor a folder"):
        read_documents(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="no training data"):
        read_documents(tmp_path)
    with pytest.raises(DataError, match="no training data"):
        read_documents(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(DataError, match=r"'\.csv' are not read"):
        read_documents(write(tmp_path / "table.csv", "1,2"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="not UTF-8"):
        read_documents(tmp_path / "latin.txt")


def test_every_epoch_holds_every_sample_once() -> None:
    stream = batches(range(10), 4, seed=1, shuffle=True)
    drawn = [sample for _ in range(5) for sample in next(stream)]
    first, second = drawn[:10], drawn[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert stream.epochs == 2.0


def test_the_seed_decides_the_order() -> None:
    def order(seed: int, shuffle: bool = True) -> list[int]:
        return next(batches(range(50), 50, seed, shuffle))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1, shuffle=False) == list(range(50))


@pytest.mark.parametrize("done", [0, 1, 3, 7])
def test_a_resumed_stream_goes_on_where_it_stood(done: int) -> None:
    stream = batches(range(10), 4, seed=3, shuffle=True)
    for _ in range(done):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = batches(range(10), 4, seed=3, shuffle=True)
    resumed.load_state_dict(state)
    assert [next(resumed) for _ in range(6)] == [next(stream) for _ in range(6)]


def test_a_stream_does_not_resume_on_other_data() -> None:
    state = batches(range(10), 4, seed=3, shuffle=True).state_dict()
    with pytest.raises(DataError, match=r"seed was 3, and is 4|seed was 3 when"):
        batches(range(10), 4, seed=4, shuffle=True).load_state_dict(state)
    with pytest.raises(DataError, match="samples was 10"):
        batches(range(11), 4, seed=3, shuffle=True).load_state_dict(state)
    with pytest.raises(DataError, match="fingerprint was  when it was saved and is other now"):
        batches(range(10), 4, seed=3, shuffle=True, fingerprint="other").load_state_dict(state)

    with pytest.raises(DataError, match="no training samples"):
        batches([], 4, seed=3, shuffle=True)


def test_a_fingerprint_tells_token_ids_and_weights_apart():
    of = [Sample.causal([1, 2, 3, 4]), Sample.causal([5, 6, 7])]
    others = ([of[1], of[0]], [of[0]], [of[0], Sample.causal([5, 6, 8])], [of[0], Sample.causal([5, 6, 7], 2)])
    assert fingerprint_of(of) == fingerprint_of([Sample.causal([1, 2, 3, 4]), Sample.causal([5, 6, 7])])
    assert len({fingerprint_of(of), *map(fingerprint_of, others)}) == 5
