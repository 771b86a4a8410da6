"""Records from files: JSONL, JSON, CSV, parquet, plain text, and folders of these or in the format of Hugging Face datasets.

Records come one after the other; a file is never in memory as a whole, JSON excepted.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megascend.data.columns import parse_record
from megascend.data.document import Document
from megascend.data.findings import Findings
from megascend.data.messages import without_nulls
from megascend.errors import DataError

Record = tuple[str, Any]
"""Where a record stands, and what it says."""

TEXT_SUFFIXES = (".txt", ".md", ".rst")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONGEST_FIELD = 2**31 - 1
"""Of CSV, in characters; Python's own limit is 131072."""


def read_documents(path: str | Path, split: str = "train", columns: Mapping[str, str] | None = None) -> list[Document]:
    """All documents of a file or a folder.

    Raises:
        DataError: something cannot be read, or is malformed; the message lists all problems with file and line.
    """
    findings = Findings()
    documents = list(iterate_documents(Path(path), split, columns, findings))
    findings.raise_problems()
    return documents


def iterate_documents(
    path: Path, split: str, columns: Mapping[str, str] | None, findings: Findings
) -> Iterator[Document]:
    """Documents one after the other; what is wrong with the others becomes a problem in ``findings``.

    Args:
        split: which one to read of a folder in the format of Hugging Face datasets.
        columns: as for :func:`megascend.data.columns.parse_record`.

    Raises:
        DataError: there is nothing at ``path``, or nothing that is read.
    """
    empty = True
    for source, value in iterate_records(path, split, findings):
        empty = False
        with findings.collecting():
            yield value if isinstance(value, Document) else parse_record(value, source, columns, findings)
    if empty and not findings.problems:
        raise DataError(f"no training data in {path} ({findings.setting}): there is no document in it")


def iterate_records(path: Path, split: str, findings: Findings) -> Iterator[Record]:
    """Records of a file or a folder; a text file is one record, a :class:`Document`."""
    if dataset_format(path):
        yield from _dataset_records(path, split, findings)
        return
    for file in data_files(path, findings):
        try:
            yield from READERS[file.suffix](file, findings)
        except OSError as error:
            findings.problem(f"{file} cannot be read: {error.strerror or error}")


def data_files(path: Path, findings: Findings) -> list[Path]:
    """The files that ``path`` means, in name order; files of a folder that are not read become remarks.

    Raises:
        DataError: the path is missing or of an unknown kind, or no file of the folder is of a known kind.
    """
    known = ", ".join(READERS)
    if path.is_symlink() and not path.exists():
        raise DataError(
            f"no training data at {path} ({findings.setting}): it is a link to {path.readlink()}, which does not exist"
        )
    if path.is_file():
        if path.suffix not in READERS:
            raise DataError(
                f"{path}: files ending in {path.suffix!r} are not read ({findings.setting}); known: {known}"
            )
        return [path]
    if not path.is_dir():
        raise DataError(f"no training data at {path.absolute()} ({findings.setting}): neither a file nor a folder")
    try:
        found = sorted(file for file in path.rglob("*") if not file.is_dir())
    except OSError as error:
        raise DataError(f"{path} cannot be read ({findings.setting}): {error.strerror or error}") from None
    files = []
    for file in found:
        inside = file.relative_to(path)
        if any(part.startswith(".") for part in inside.parts):
            findings.remark("hidden files are not read", str(file))
        elif file.suffix not in READERS or file.name.upper() == "README.MD":
            findings.remark(
                f"{file.suffix or file.name!r} files are not read" if file.suffix not in READERS else "is not read",
                str(file),
            )
        elif not file.exists():
            findings.problem(f"{file}: a link to {file.readlink()}, which does not exist")
        else:
            files.append(file)
    if not files and not findings.problems:
        raise DataError(f"no training data in {path} ({findings.setting}): no file in it ends in {known}")
    return files


# --- text and JSON ---


def _text_records(path: Path, findings: Findings) -> Iterator[Record]:
    with findings.collecting():
        content = _decode(path.read_bytes().removeprefix(BYTE_ORDER_MARK), str(path))
        if content.strip():
            yield str(path), Document(str(path), text=content)


def _jsonl_records(path: Path, findings: Findings) -> Iterator[Record]:
    # Lines of bytes: JSON strings may hold U+2028 and others that Python takes for line ends in text.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if not line.strip():
                continue
            source = f"{path}:{number}"
            with findings.collecting():
                record = parse_json(_decode(line, source), source)
                yield source, record


def _json_records(path: Path, findings: Findings) -> Iterator[Record]:
    with findings.collecting():
        content = _decode(path.read_bytes().removeprefix(BYTE_ORDER_MARK), str(path))
        try:
            records = json.loads(content)
        except (json.JSONDecodeError, RecursionError) as error:
            if "Extra data" not in str(error):
                raise DataError(_json_problem(error, str(path))) from None
            records = None  # an object a line, whatever the file is called
        if records is None:
            yield from _jsonl_records(path, findings)
        elif isinstance(records, list):
            yield from ((f"{path}[{number}]", record) for number, record in enumerate(records))
        else:
            raise DataError(f"{path}: expected a JSON list of objects, found {type(records).__name__}")


def parse_json(text: str, source: str) -> Any:
    """What a line of JSONL says.

    Raises:
        DataError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(_json_problem(error, source)) from None


def _json_problem(error: Exception, source: str) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return f"{source}: not valid JSON: nested too deeply"
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    return f"{source}: not valid JSON: {error.msg} at {line}column {error.colno}"


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        which = " (it looks like UTF-16)" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise DataError(f"{source}: not UTF-8 text{which} (byte {error.start}: {error.reason})") from None


# --- tables ---


def _csv_records(path: Path, findings: Findings) -> Iterator[Record]:
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        # Values stay the strings that they are: a reader that infers types turns NA into nothing and 007 into 7.
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True, delimiter="\t" if path.suffix == ".tsv" else ",")
            header = next(rows, [])
            if len(set(header)) != len(header):
                raise DataError(f"{path}:1: two columns have one name: {', '.join(header)}")
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
        findings.problem(f"{path}: not valid CSV: {error}")
    except UnicodeDecodeError as error:
        findings.problem(f"{path}: not UTF-8 text ({error.reason})")
    except DataError as error:
        findings.problem(str(error))
    finally:
        csv.field_size_limit(before)


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


# --- Hugging Face datasets ---


def dataset_format(path: Path) -> str | None:
    """``saved``: a folder that ``save_to_disk`` of datasets has written. ``repository``: one as on the Hub. None: another."""
    if (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    ):
        return "saved"
    card = path / "README.md"
    if card.is_file() and any(path.rglob("*.parquet")):
        with card.open("rb") as file:
            return "repository" if file.readline().strip() == b"---" else None
    return None


def _dataset_records(path: Path, split: str, findings: Findings) -> Iterator[Record]:
    import datasets

    try:
        if dataset_format(path) == "saved":
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path))
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} ({findings.setting}): datasets cannot load it: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise DataError(f"{path} has no split {split!r} (data.split); it has {', '.join(map(str, found))}")
        found = found[split]
    for number, record in enumerate(found):
        yield f"{path}[{number}]", without_nulls(record)
