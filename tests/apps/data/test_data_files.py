"""Reading of data files of every format, and errors for unreadable ones."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from megascend.apps.data import files
from megascend.apps.data.document import Document
from megascend.apps.data.files import check_files, iterate_documents, read_documents
from megascend.apps.data.findings import Findings
from megascend.config import Data
from megascend.errors import DataError

CHAT = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"where": "sky"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def read(path: Path, **settings: object) -> tuple[list[Document], Findings]:
    """Read documents; return them with the problems and remarks."""
    findings = Findings()
    data = Data(path=path, **settings)
    return list(iterate_documents(path, data.split, data.columns, findings)), findings


def test_jsonl(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines, but not in JSONL. The file begins with a byte order mark.
    path = write(tmp_path / "a.jsonl", {"messages": CHAT, "id": 7}, "", '{"text": "x\u2028y"}')
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    documents, findings = read(path)
    assert documents == [
        Document(f"{path}:1", messages=tuple(CHAT)),
        Document(f"{path}:3", text="x\u2028y"),
    ]
    assert findings.lines() == [f"{path}:1: 'id' is not read"]
    assert read_documents(path) == documents


def json_list(path: Path, records: list[dict]) -> None:
    path.write_text(json.dumps(records, indent=1))


def json_lines(path: Path, records: list[dict]) -> None:
    write(path, *records)


def comma_separated(path: Path, records: list[dict], delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter=delimiter)
        writer.writeheader()
        for record in records:
            writer.writerow({key: v if isinstance(v, str) else json.dumps(v) if v else "" for key, v in record.items()})


def tab_separated(path: Path, records: list[dict]) -> None:
    comma_separated(path, records, delimiter="\t")


def arrow(path: Path, records: list[dict]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(records), path)


def arrow_stream(path: Path, records: list[dict]) -> None:
    table = pyarrow.Table.from_pylist(records)
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def arrow_file(path: Path, records: list[dict]) -> None:
    table = pyarrow.Table.from_pylist(records)
    with pyarrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def compressed(writer: Callable[[Path, list[dict]], None]) -> Callable[[Path, list[dict]], None]:
    def write_compressed(path: Path, records: list[dict]) -> None:
        plain = path.with_suffix("")
        writer(plain, records)
        with pyarrow.output_stream(path, compression="detect") as file:
            file.write(plain.read_bytes())
        plain.unlink()

    return write_compressed


def saved(path: Path, records: list[dict]) -> None:
    datasets.Dataset.from_list(records).save_to_disk(str(path))


def saved_splits(path: Path, records: list[dict]) -> None:
    from_list = datasets.Dataset.from_list
    datasets.DatasetDict({"test": from_list([{"text": "no"}]), "train": from_list(records)}).save_to_disk(str(path))


WRITERS: dict[str, tuple[str, Callable[[Path, list[dict]], None]]] = {
    "JSON": ("a.json", json_list),
    "JSONL called JSON": ("a.json", json_lines),
    "CSV": ("a.csv", comma_separated),
    "TSV": ("a.tsv", tab_separated),
    "parquet": ("a.parquet", arrow),
    "Arrow stream": ("a.arrow", arrow_stream),
    "Arrow file": ("a.arrow", arrow_file),
    "ndjson": ("a.ndjson", json_lines),
    "JSONL, gzip": ("a.jsonl.gz", compressed(json_lines)),
    "JSON, bzip2": ("a.json.bz2", compressed(json_list)),
    "TSV, Zstandard": ("a.tsv.zst", compressed(tab_separated)),
    "saved by datasets": ("saved", saved),
    "saved by datasets, splits": ("splits", saved_splits),
}
WITH_TOOLS = {
    "messages": [CHAT[0], {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "blue"}, CHAT[1]],
    "tools": [TOOL],
}
PLAIN = {"messages": CHAT, "tools": None}


@pytest.mark.parametrize("form", WRITERS)
def test_every_format_gives_equal_documents(form: str, tmp_path: Path) -> None:
    name, writer = WRITERS[form]
    writer(tmp_path / name, [WITH_TOOLS, PLAIN])
    documents, findings = read(tmp_path / name)
    findings.raise_problems()
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"where": "sky"}}}]
    answers = ({"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "blue"})
    assert documents[0].messages == (CHAT[0], *answers, CHAT[1])
    assert documents[1].messages == tuple(CHAT)
    assert documents[1].tools is None
    [tool] = documents[0].tools or ()
    assert tool["function"]["name"] == "look"
    rows = {".csv": ":3", ".tsv": ":3", ".tsv.zst": ":3", ".jsonl": ":2", ".ndjson": ":2", ".jsonl.gz": ":2"}
    row = ":2" if form == "JSONL called JSON" else rows.get("".join((tmp_path / name).suffixes), "[1]")
    file = tmp_path / name / "train" if name == "splits" else tmp_path / name
    assert documents[1].source == f"{file}{row}"


def test_csv_values_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,completion\r\n007,NA\r\n"a\nb","c,""d"""\r\n1e3,true\r\n')
    rows = [(document.prompt, document.completion, document.source) for document in read_documents(path)]
    assert rows == [("007", "NA", f"{path}:2"), ("a\nb", 'c,"d"', f"{path}:3"), ("1e3", "true", f"{path}:5")]
    assert csv.field_size_limit() == 131072
    path.write_text("text\n" + "x" * 200_000 + "\n")
    assert len(read_documents(path)[0].text or "") == 200_000


def test_a_folder_is_read_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "d.jsonl").mkdir()  # a directory despite its ending
    (tmp_path / ".git").mkdir()
    write(tmp_path / ".git" / "x.txt", "hidden")
    write(tmp_path / "c.txt", "third")
    write(tmp_path / "b" / "x.md", "second")
    write(tmp_path / "a.jsonl", {"text": "first"})
    write(tmp_path / "notes.docx", "1,2")
    write(tmp_path / "README.md", "about these data")
    (tmp_path / "empty.txt").write_text(" \n")
    documents, findings = read(tmp_path, split="all")
    assert [document.text for document in documents] == ["first", "second\n", "third\n"]
    assert findings.lines() == [
        f"{tmp_path}/.git/x.txt: hidden files are not read",
        f"{tmp_path}/README.md: is not read",
        f"{tmp_path}/notes.docx: '.docx' files are not read",
    ]


def test_all_bad_lines_are_reported_at_once(tmp_path: Path) -> None:
    good, bad = {"text": "good"}, {"text": 3}
    first = write(tmp_path / "a.jsonl", good, bad, '{"text": "x"', good, {"messages": []})
    second = tmp_path / "b.jsonl"
    second.write_bytes(b'{"text": "caf\xe9"}\n{"text": "good"}\n' + b"[" * 100_000 + b'\n{"n": ' + b"1" * 5000 + b"}\n")
    with pytest.raises(DataError) as caught:
        read_documents(tmp_path)
    heading, *lines = str(caught.value).split("\n")
    assert heading == "6 problems in the data:"
    assert [line.strip().partition(": ")[0] for line in lines] == [
        f"{first}:2", f"{first}:3", f"{first}:5", f"{second}:1", f"{second}:3", f"{second}:4",
    ]  # fmt: skip
    assert "not UTF-8 text (byte 13" in lines[3]
    assert "nested too deeply" in lines[4]
    assert "cannot be read as JSON: Exceeds the limit" in lines[5]  # of digits, which Python reads


def write_content(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def dangling(folder: Path) -> Path:
    (folder / "link.jsonl").symlink_to("nowhere.jsonl")
    return folder / "link.jsonl"


def folder_with_dangling(folder: Path) -> Path:
    dangling(folder)
    return folder


BAD_FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda folder: folder / "missing.jsonl", "neither a file nor a folder"),
    "empty folder": (lambda folder: folder, r"no training data in .* \(data.path\): no file in it ends in .jsonl"),
    "empty file": (lambda folder: write_content(folder / "a.jsonl", b"\n"), "no training data"),
    "unknown kind": (
        lambda folder: write_content(folder / "a.xlsx", b"PK"),
        r"'\.xlsx' are not read \(data.path\); known: .jsonl",
    ),
    "Latin-1 text": (lambda folder: write_content(folder / "a.txt", b"caf\xe9"), "not UTF-8 text"),
    "UTF-16": (lambda folder: write_content(folder / "a.txt", "hello".encode("utf-16")), "looks like UTF-16"),
    "Latin-1 CSV": (lambda folder: write_content(folder / "a.csv", b"text\ncaf\xe9\n"), "a.csv:2: not UTF-8 text"),
    "JSON of another kind": (
        lambda folder: write_content(folder / "a.json", b"{}"),
        "expected a JSON list of objects, found dict",
    ),
    "JSON that is none": (
        lambda folder: write_content(folder / "a.json", b"[{},\n{]"),
        "not valid JSON: .* at line 2, column 2",
    ),
    "CSV with a short row": (
        lambda f: write_content(f / "a.csv", b"prompt,completion\nx\n"),
        "a.csv:2: 1 columns, .* names 2",
    ),
    "CSV with one name twice": (
        lambda f: write_content(f / "a.csv", b"text,text\nx,y\n"),
        "a.csv:1: two columns have one name",
    ),
    "CSV with an open quote": (lambda f: write_content(f / "a.csv", b'text\n"x\n'), "a.csv:2: not valid CSV"),
    "no parquet": (
        lambda folder: write_content(folder / "a.parquet", b"PAR1 and nothing else"),
        "not a parquet file that can be read",
    ),
    "no Arrow file": (
        lambda folder: write_content(folder / "a.arrow", b"ARROW1 and nothing else"),
        "not an Arrow file that can be read",
    ),
    "cut-off gzip": (
        lambda folder: write_content(folder / "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-20]),
        r"a\.jsonl\.gz.* cannot be read",
    ),
    "no gzip": (lambda folder: write_content(folder / "a.csv.gz", b"text\na\n"), r"a\.csv\.gz.* cannot be read"),
    "compressed parquet": (lambda folder: write_content(folder / "a.parquet.gz", b""), r"'\.gz' are not read"),
    "dangling link": (dangling, "it is a link to nowhere.jsonl, which does not exist"),
    "folder with a dangling link": (folder_with_dangling, "link.jsonl: a link to nowhere.jsonl, which does not exist"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_raises_data_error(name: str, tmp_path: Path) -> None:
    make, message = BAD_FILES[name]
    path = make(tmp_path)
    for attempt in (lambda: read_documents(path), lambda: check_files(path, Data(path=path)).raise_problems()):
        with pytest.raises(DataError, match=message):
            attempt()


def test_line_beyond_the_limit_raises_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 100)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + '[{"text": "two"}, ' * 10)
    with pytest.raises(DataError, match=r"a\.jsonl:2: the line has more than 100 bytes: write a record a line"):
        read_documents(path)
