"""Read records from JSONL, JSON, CSV, parquet and plain text files, folders of these, and folders that datasets saved.

Records are read one by one; no file is held in memory as a whole, except JSON.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megascend.config import Data
from megascend.data.columns import parse_record
from megascend.data.document import Document
from megascend.data.findings import Findings
from megascend.data.messages import without_nulls
from megascend.data.splits import ALL, TEXT_SUFFIXES, choose_split, files_of, is_saved, split_files
from megascend.errors import DataError

Record = tuple[str, Any]
"""Source of a record (``file:line``), and its content."""

# Written by Windows tools at the start of UTF-8 files; json.loads refuses it.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONGEST_FIELD = 2**31 - 1
"""Characters of a CSV field; Python's own limit of 131072 is too short for conversations."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_documents(
    path: str | Path, split: str = "train", columns: Mapping[str, str] | None = None, config_name: str | None = None
) -> list[Document]:
    """Return all documents of a file, or of a split of a folder.

    Raises:
        DataError: something cannot be read, or is malformed; the message lists all problems with file and line.
    """
    findings = Findings()
    documents = list(iterate_documents(Path(path), split, columns, findings, config_name))
    findings.raise_problems()
    return documents


def iterate_documents(
    path: Path,
    split: str | None,
    columns: Mapping[str, str] | None,
    findings: Findings,
    config_name: str | None = None,
) -> Iterator[Document]:
    """Yield documents; problems with others go to ``findings``. Arguments as of ``split_files`` and ``parse_record``."""
    empty = True
    for source, value in iterate_records(path, split, findings, config_name):
        empty = False
        with findings.collecting():
            yield value if isinstance(value, Document) else parse_record(value, source, columns, findings)
    if empty and not findings.problems:
        raise DataError(f"no training data in {path} ({findings.setting}): it holds no document")


def iterate_records(
    path: Path, split: str | None, findings: Findings, config_name: str | None = None
) -> Iterator[Record]:
    """Yield the records of a file, or of a split of a folder; a text file is one record, a :class:`Document`."""
    if is_saved(path):
        files_of(path, split, config_name, findings)
        yield from _saved_records(path, split, findings)
        return
    for file in split_files(path, split, config_name, findings):
        try:
            yield from READERS[file.suffix](file, findings)
        except OSError as error:
            findings.problem(f"{file} cannot be read: {error.strerror or error}")


# --- text and JSON ---


def _text_records(path: Path, findings: Findings) -> Iterator[Record]:
    with findings.collecting():
        content = _decode(path.read_bytes().removeprefix(BYTE_ORDER_MARK), str(path))
        if content.strip():
            yield str(path), Document(str(path), text=content)


def _jsonl_records(path: Path, findings: Findings) -> Iterator[Record]:
    # Lines of bytes: JSON strings may hold U+2028 and similar characters, at which str.splitlines() would split.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if not line.strip():
                continue
            source = f"{path}:{number}"
            with findings.collecting():
                record = parse_json(_decode(line, source).rstrip("\r\n"), source)
                yield source, record


def _json_records(path: Path, findings: Findings) -> Iterator[Record]:
    with findings.collecting():
        content = _decode(path.read_bytes().removeprefix(BYTE_ORDER_MARK), str(path))
        try:
            records = json.loads(content)
        except (json.JSONDecodeError, RecursionError) as error:
            if "Extra data" not in str(error):
                raise DataError(_json_problem(error, str(path))) from None
            records = None  # JSON Lines under the name .json, as many data sets have it
        if records is None:
            yield from _jsonl_records(path, findings)
        elif isinstance(records, list):
            yield from ((f"{path}[{number}]", record) for number, record in enumerate(records))
        else:
            raise DataError(f"{path}: expected a JSON list of objects, found {type(records).__name__}")


def parse_json(text: str, source: str) -> Any:
    """Parse a line of JSONL."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(_json_problem(error, source)) from None


def _json_problem(error: Exception, source: str) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return f"{source}: not valid JSON: nested too deeply"
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    return f"{source}: not valid JSON: {error.msg.removesuffix(' at')} at {line}column {error.colno}"


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        guess = " (it looks like UTF-16)" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise DataError(f"{source}: not UTF-8 text{guess} (byte {error.start}: {error.reason})") from None


# --- tables ---


def _csv_records(path: Path, findings: Findings) -> Iterator[Record]:
    # A process-wide setting of the csv module, restored below.
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        # Values stay strings: a reader that infers types would turn NA into null and 007 into 7.
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True, delimiter=DELIMITERS[path.suffix])
            header = next(rows, [])
            if len(header) == 1 and (hint := _delimiter_hint(path)):
                raise DataError(f"{path}:1: one column, {header[0]!r:.60}{hint}")
            if len(set(header)) != len(header):
                raise DataError(f"{path}:1: two columns have one name: {', '.join(header)}")
            # line_num counts lines of the file, and a quoted field may span several: a record's source is its first line.
            start = rows.line_num + 1
            for row in rows:
                source, start = f"{path}:{start}", rows.line_num + 1
                if not row:
                    continue
                if len(row) != len(header):
                    findings.problem(f"{source}: {len(row)} columns, and the first line names {len(header)}")
                    continue
                yield source, dict(zip(header, row, strict=True))
    except csv.Error as error:
        findings.problem(f"{path}: not valid CSV: {error}{_delimiter_hint(path)}")
    except UnicodeDecodeError as error:
        findings.problem(f"{path}: not UTF-8 text ({error.reason})")
    except DataError as error:
        findings.problem(str(error))
    finally:
        csv.field_size_limit(before)


def _delimiter_hint(path: Path) -> str:
    """Return a guess at what separates the columns of a table, if the first line has no delimiter of its kind; or nothing."""
    with path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
        line = file.readline()
    kind = DELIMITERS[path.suffix]
    for other in () if kind in line else (";", "\t", "|", ","):
        if len(names := line.strip("\r\n").split(other)) > 1 and all(names):
            return (
                f"; the first line seems to be separated by {other!r}, and {path.suffix} files are by {kind!r}: write the file "
                "with commas as .csv, or with tabs as .tsv"
            )
    return ""


def _parquet_records(path: Path, findings: Findings) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    yield f"{path}[{number}]", without_nulls(record)
                    number += 1
    except pyarrow.ArrowException as error:
        findings.problem(f"{path}: not a parquet file that can be read: {error}")


READERS: dict[str, Callable[[Path, Findings], Iterator[Record]]] = {
    ".jsonl": _jsonl_records,
    ".json": _json_records,
    ".csv": _csv_records,
    ".tsv": _csv_records,
    ".parquet": _parquet_records,
    **dict.fromkeys(TEXT_SUFFIXES, _text_records),
}


# --- folders that datasets has saved ---


def _saved_records(path: Path, split: str | None, findings: Findings) -> Iterator[Record]:
    import datasets

    try:
        rows = datasets.load_from_disk(str(path))
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} ({findings.setting}): datasets cannot load it: {error}") from error
    if isinstance(rows, datasets.DatasetDict):
        names = [str(name) for name in rows]
        chosen = names if split == ALL else [choose_split(path, split, names, findings.setting)]
        rows = datasets.concatenate_datasets([rows[name] for name in chosen])
    # Pictures as they are stored: they are decoded within limits later.
    rows = rows.cast(datasets.Features({name: _undecoded(feature) for name, feature in rows.features.items()}))
    for number, record in enumerate(rows):
        yield f"{path}[{number}]", without_nulls(record)


def _undecoded(feature: Any) -> Any:
    """Return a feature of datasets in which pictures stay files, at any depth."""
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_undecoded(inner) for inner in feature]
    if isinstance(feature, datasets.Sequence | getattr(datasets, "List", datasets.Sequence)):
        return type(feature)(_undecoded(feature.feature), length=feature.length)
    return feature


LARGE = 32 * 2**20
"""Size in bytes from which data is checked by the ranks only."""


def check_files(path: Path, data: Data, setting: str = "data.path") -> Findings:
    """Return problems of files and records. Folders that datasets saved, and data above :data:`LARGE`, are left to the ranks."""
    read_template(data.chat_template)
    findings = Findings(setting)
    if is_saved(path):
        files_of(path, data.split, data.config_name, findings)
        return findings
    try:
        size = 0
        for file in split_files(path, data.split, data.config_name, findings):
            size += file.stat().st_size
            file.open("rb").close()
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None
    # Small data is read here, before ranks start, so that its problems show at once; large data would be read twice.
    if size < LARGE and not findings.problems:
        findings = Findings(setting)  # reading inspects the folder again and would repeat its remarks
        for _ in iterate_documents(path, data.split, data.columns, findings, data.config_name):
            pass
    return findings


def read_template(path: Path | None) -> str | None:
    """Return the chat template at ``data.chat_template``."""
    if path is None:
        return None
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"data.chat_template: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"data.chat_template: {path}: not UTF-8 text (byte {error.start}: {error.reason})") from None
    # As transformers reads the template of a model: with universal newlines.
    return text.replace("\r\n", "\n").replace("\r", "\n")
