"""Streams of samples: equal to eager samples, shuffled by a published rule, resumed exactly, at constant memory."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.apps.data import files
from megascend.apps.data.files import read_documents
from megascend.apps.data.findings import Findings
from megascend.apps.data.samples import Encoder, SampleLimits, build_samples
from megascend.apps.data.streaming import PrefetchedBatches, StreamedBatches
from megascend.config import Data
from megascend.errors import DataError
from megascend.training.batch.sample import Sample

LIMIT = 20
ROWS = [{"prompt": f"question {n}\n", "completion": f'"{n}",\r\nfrom {"a" * (n % 5)}'} for n in range(23)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" + "\n" * (number % 4 == 0) for number, row in enumerate(rows)))
    return path


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, str]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    return path


def write_arrow(path: Path, rows: list[dict[str, str]]) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return path


def write_compressed(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(gzip.compress(write_jsonl(path.with_suffix(""), rows).read_bytes()))
    path.with_suffix("").unlink()
    return path


def write_saved(path: Path, rows: list[dict[str, str]]) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


WRITERS: dict[str, Callable[[Path, list[Any]], Path]] = {
    "a.jsonl": write_jsonl,
    "a.csv": write_csv,
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "a.jsonl.gz": write_compressed,
    "saved": write_saved,
}


def open_stream(
    path: Path | None = None, batch: int = 4, limit: int = LIMIT, scored: bool = False, **settings: Any
) -> StreamedBatches:
    values: dict[str, Any] = {"streaming": True, "on_too_long": "truncate", "shuffle_buffer": 5} | settings
    data = Data(path=path, **values)
    limits = SampleLimits(limit, vocab_size=300, scored=scored)
    tokenizer = byte_tokenizer(256)

    def encoder(findings: Any) -> Encoder:
        return Encoder(tokenizer, limits, findings, on_too_long="truncate")

    return StreamedBatches(data.training_sources(), batch, 3, encoder, {"data": "x"})


def contents(samples: list[Sample]) -> list[tuple[list[int], list[int], list[float]]]:
    return [(s.input_ids.tolist(), s.target_ids.tolist(), s.weights.tolist()) for s in samples]


def text_of(ids: list[int]) -> str:
    return str(byte_tokenizer(256).decode(ids))


def take(stream: StreamedBatches, batches: int) -> list[Any]:
    return [contents(next(stream)) for _ in range(batches)]


def flat(batches: list[Any]) -> list[Any]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize("name", WRITERS)
def test_streamed_samples_equal_eager_ones_and_resume_anywhere(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": row["prompt"], "completion": row["completion"][: LIMIT - len(row["prompt"])]} for row in ROWS]
    path = WRITERS[name](tmp_path / name, rows)
    expected = contents(build_samples(read_documents(path), byte_tokenizer(256), LIMIT))
    in_order = open_stream(path, batch=1, shuffle=False)
    assert flat(take(in_order, 2 * len(rows))) == expected * 2
    assert in_order.progress.epochs == pytest.approx(2.0)
    stream = open_stream(path)
    states, batches_read = [], []
    for _ in range(15):
        states.append(json.loads(json.dumps(stream.progress.state)))
        batches_read += take(stream, 1)
    first, second = flat(batches_read)[: len(rows)], flat(batches_read)[len(rows) : 2 * len(rows)]
    assert sorted(first) == sorted(second) == sorted(expected)
    assert first != second
    for number in (0, 1, 4, 5, 6, 11):
        resumed = open_stream(path)
        resumed.load_state_dict(states[number])
        assert take(resumed, 15 - number) == batches_read[number:]
        assert resumed.progress.state == stream.progress.state


def test_saved_folder_is_streamed_without_writing_to_it(tmp_path: Path) -> None:
    import datasets

    # Objects of different keys: a feature of datasets that is stored as text.
    rows = [{"text": f"{n:04}", "tools": [{f"k{n % 3}": n}, {"k": "v"}]} for n in range(2000)]
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").save_to_disk(str(folder))
    before = sorted(path.name for path in folder.iterdir())
    records = [record.value for record in files.iterate_records(folder, "train", Findings())]
    assert records == rows
    stream = open_stream(folder, batch=1200, shuffle=False, columns={"text": "text"})
    assert [text_of(ids) for ids, *_ in flat(take(stream, 2))] == [row["text"] for row in (rows * 2)[:2400]]
    assert sorted(path.name for path in folder.iterdir()) == before


def test_blocks_are_shuffled_by_the_published_rule(tmp_path: Path) -> None:
    """Recompute the order of docs/data.md from the lines of the file."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{n:03}"} for n in range(17)])
    records, offset, beginning = [], 0, 0
    for line in path.read_bytes().splitlines(keepends=True):
        offset += len(line)
        if line.strip():
            records.append((beginning, json.loads(line)["text"]))
            beginning = offset
    expected = []
    for epoch in range(2):
        for first in range(0, 17, 5):
            block = [text for _, text in records[first : first + 5]]
            random.Random(f"3/source 0/{epoch}/0/{records[first][0]}").shuffle(block)
            expected += block
    stream = open_stream(path, batch=17)
    texts = [text_of(ids) for ids, *_ in flat(take(stream, 2))]
    assert texts == expected


def test_pieces_of_a_text_file_cover_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "TEXT_BLOCK", 50)
    # A line longer than two blocks, of characters of two bytes, and short ones.
    text = "äöü" * 60 + "\n" + "".join(f"line {n} é\n" for n in range(30))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    stream = open_stream(tmp_path / "a.txt", batch=1, shuffle=False)
    tokenizer = byte_tokenizer(256)
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    states, batches_read, end = [], [], 0
    while end < len(tokens):
        states.append(stream.progress.state)
        batches_read += take(stream, 1)
        [(inputs, targets, _)] = batches_read[-1]
        piece = [inputs[0], *targets]
        # Neighbouring pieces of a block share a token; blocks share none.
        start = end - 1 if end and tokens[end - 1 : end - 1 + len(piece)] == piece else end
        assert tokens[start : start + len(piece)] == piece
        end = start + len(piece)
    assert stream.progress.epochs == 1.0
    for number in range(0, len(states), 7):
        resumed = open_stream(tmp_path / "a.txt", batch=1, shuffle=False)
        resumed.load_state_dict(json.loads(json.dumps(states[number])))
        assert take(resumed, len(batches_read) - number) == batches_read[number:]


def test_bad_records_name_their_line_and_are_skipped_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"line {n}"}) for n in range(12)]
    lines[3], lines[8] = '{"text": ', json.dumps({"text": 7})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:4: not valid JSON.*data\.max_bad_records: 0"):
        take(open_stream(path, batch=1), 12)
    with pytest.raises(DataError, match=r"a\.jsonl:9: 'text' must be a string.*; 1 others were skipped before"):
        take(open_stream(path, batch=1, max_bad_records=1), 12)
    stream = open_stream(path, batch=5, max_bad_records=5)
    batches_read = take(stream, 2)
    texts = [text_of(ids) for ids, *_ in flat(batches_read)]
    assert sorted(texts) == sorted(f"line {n}" for n in range(12) if n not in (3, 8))
    assert stream.progress.bad_records == 2
    assert [line.partition(" at ")[0].partition(" that")[0] for line in stream.progress.remarks] == [
        f"{path}:4: left out (data.max_bad_records): not valid JSON: Expecting value",
        f"{path}:9: left out (data.max_bad_records): 'text' must be a string",
    ]
    resumed = open_stream(path, batch=5, max_bad_records=5)
    resumed.load_state_dict(stream.progress.state)
    assert resumed.progress.bad_records == 2
    assert take(resumed, 2) == take(stream, 2)
    # One record, however many problems it has.
    message = {"role": "User", "content": "hello"}
    records = [{"messages": [message, message]}, *({"text": f"line {n}"} for n in range(3))]
    wrong = open_stream(write_jsonl(tmp_path / "c.jsonl", records), batch=3, max_bad_records=1, shuffle=False)
    take(wrong, 1)
    assert wrong.progress.bad_records == 1
    # The rest of a file is not a record that may be skipped.
    write_csv(tmp_path / "b.csv", [{"text": "a"}, {"text": "b"}])
    with (tmp_path / "b.csv").open("a") as file:
        file.write('"c"d\n"e"\n')
    with pytest.raises(DataError, match="not valid CSV"):
        take(open_stream(tmp_path / "b.csv", max_bad_records=5), 3)


def test_prefetched_batches_and_positions_are_those_of_the_stream(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"line {n}"} for n in range(11)])
    plain, prefetched = open_stream(path), PrefetchedBatches(open_stream(path))
    for number in range(9):
        assert contents(prefetched.take().samples) == contents(next(plain))
        assert prefetched.progress.state == plain.progress.state
        assert (prefetched.progress.epochs, prefetched.progress.source_epochs) == (
            plain.progress.epochs,
            plain.progress.source_epochs,
        )
        # The position is that of the batch taken, although others have been read.
        resumed = PrefetchedBatches(open_stream(path))
        resumed.load_state_dict(json.loads(json.dumps(prefetched.progress.state)))
        if number % 4 == 0:
            following = open_stream(path)
            following.load_state_dict(plain.progress.state)
            assert contents(resumed.take().samples) == contents(next(following))
        resumed.close()
    prefetched.close()
    assert "megascend-stream" not in {thread.name for thread in threading.enumerate()}


def test_prefetched_errors_are_raised_in_place_of_their_batch(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {n}"}) for n in range(30)]
    lines[20] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prefetched = PrefetchedBatches(open_stream(tmp_path / "a.jsonl", shuffle_buffer=1))
    samples = [sample for _ in range(5) for sample in prefetched.take().samples]
    assert [text_of(ids) for ids, *_ in contents(samples)] == [f"line {n}" for n in range(20)]
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.jsonl:21: not valid JSON"):
            prefetched.take()
    prefetched.close()
    assert "megascend-stream" not in {thread.name for thread in threading.enumerate()}


def test_files_that_change_during_a_run_end_the_stream(tmp_path: Path) -> None:
    rows = [{"text": f"line {n}"} for n in range(12)]

    def grow(path: Path) -> None:
        with path.open("a") as file:
            file.write('{"text": "new"}\n')

    def replace(path: Path) -> None:
        write_jsonl(path.with_suffix(".new"), rows[:-1])
        path.with_suffix(".new").replace(path)

    for change, problem in ((grow, "has changed"), (replace, "has changed"), (Path.unlink, "cannot be read now")):
        path = write_jsonl(tmp_path / "a.jsonl", rows)
        stream = open_stream(path)
        take(stream, 1)
        os.utime(path)
        take(stream, 1)  # another time is no change
        change(path)
        with pytest.raises(DataError, match=rf"a\.jsonl .*{problem}.*: a stream needs files that stay"):
            take(stream, 3)


def test_streams_of_several_sources_keep_their_shares(tmp_path: Path) -> None:
    for name, count in (("a", 9), ("b", 50)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name}{n}"} for n in range(count)])
    sources = [{"path": tmp_path / "a.jsonl", "weight": 3}, {"path": tmp_path / "b.jsonl", "weight": 1}]
    stream = open_stream(sources=sources, batch=4)
    for batch in take(stream, 20):
        assert [text_of(ids)[0] for ids, *_ in batch].count("a") == 3
    assert stream.progress.source_epochs == pytest.approx([60 / 9, 20 / 50], abs=0.02)
    states = [stream.progress.state["streams"][number]["epoch"] for number in range(2)]
    assert states == [6, 0]


def test_pairs_are_numbered_by_batch_and_kinds_are_not_mixed(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(6)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    batch = next(open_stream(tmp_path / "a.jsonl", batch=3))
    assert [(sample.pair, sample.chosen) for sample in batch] == [(n, side) for n in range(3) for side in (True, False)]
    write_jsonl(tmp_path / "b.jsonl", [*rows, {"text": "not a pair"}])
    with pytest.raises(DataError, match=r"holds preference pairs, .*, and other documents"):
        take(open_stream(tmp_path / "b.jsonl", batch=3), 3)
    write_jsonl(tmp_path / "c.jsonl", [*rows, {**rows[0], "margin": 0.5}])
    with pytest.raises(DataError, match=r"pairs with 'margin', .*, and other documents"):
        take(open_stream(tmp_path / "c.jsonl", batch=3, scored=True), 3)


def test_changed_files_are_not_resumed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"line {n}"} for n in range(9)])
    stream = open_stream(path)
    take(stream, 1)
    state = stream.progress.state | {"sources": {"data": "y"}}
    with pytest.raises(DataError, match=r"what samples are made from has changed: data; .* data\.on_changed: continue"):
        open_stream(path).load_state_dict(state)
    with pytest.raises(DataError, match="shuffle_buffer was 5 when it was saved and is 6 now"):
        open_stream(path, shuffle_buffer=6).load_state_dict(stream.progress.state)
    resumed = open_stream(path, on_changed="continue")
    resumed.load_state_dict(state)
    assert resumed.progress.source_epochs == [1.0]
    assert "a new epoch begins" in resumed.changes
