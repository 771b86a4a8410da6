"""Read records from JSONL, JSON, CSV, parquet and plain text files, folders of these, and folders that datasets saved.

Records are read one by one; no file is held in memory as a whole, except JSON and texts that are not streamed. Readers begin at
any :data:`Position`, so that a stream continues without reading what came before.
"""

from __future__ import annotations

import csv
import io
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from megascend.apps.data.columns import parse_record
from megascend.apps.data.document import Document
from megascend.apps.data.findings import Findings
from megascend.apps.data.labels import label_name
from megascend.apps.data.splits import ALL, Card, choose_split, files_of, is_saved, split_files
from megascend.config import Data
from megascend.config.registry import DATA_FORMATS
from megascend.errors import DataError

Position = tuple[int, int]
"""Where the next record of a file begins, in bytes or rows, and the number of lines before it."""
BEGINNING: Position = (0, 0)


class Record(NamedTuple):
    """Content of a record.

    Attributes:
        source: ``file:line``, ``file[row]`` or the file.
        value: what it holds, or the :class:`Document` that it is.
        end: position after it.
    """

    source: str
    value: Any
    end: Position


# Written by Windows tools at the start of UTF-8 files; json.loads refuses it.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONGEST_FIELD = 2**31 - 1
"""Characters of a CSV field; Python's own limit of 131072 is too short for conversations."""
CSV_LIMIT = threading.Lock()
"""Held while the csv module's own limit is another one."""
LONGEST_LINE = 2**30
"""Bytes of a line of JSONL, which is read as a whole: a list under the wrong name has all of its file in one."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TEXT_BLOCK = 2**16
"""Bytes of a text file that are one document of a stream, up to the end of the next line."""


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
    for source, value, _ in iterate_records(path, split, findings, config_name):
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
    files = split_files(path, split, config_name, findings)
    count, card = 0, Card.read(path, config_name, findings.setting, split)
    for file in files:
        try:
            for record in _typed(
                READERS[DATA_FORMATS[file.suffix]].records(file, findings), file, card.features, findings
            ):
                count += not isinstance(record.value, Document)
                yield record
        except OSError as error:
            findings.problem(f"{file} cannot be read: {error.strerror or error}")
    if count and not findings.problems:
        card.check_count(path, split, count, findings.setting)


# --- values as datasets' features declare them ---


def _typed(
    records: Iterable[Record], file: Path, card_features: Mapping[str, Any], findings: Findings
) -> Iterator[Record]:
    """Yield the records of a file with values as its schema, or its folder's card, declares them."""
    features = dict(card_features)
    if file.suffix == ".parquet":
        import datasets
        from pyarrow import parquet

        problem = "not a parquet file that can be read"
        try:
            schema = parquet.read_schema(file)
            problem = f"datasets cannot load one of its columns: {' '.join(str(schema).split()):.80}; leave it out"
            features = {**datasets.Features.from_arrow_schema(schema), **features}
        except ValueError as error:  # pyarrow's errors, too
            findings.file_problem(f"{file}: {problem}: {error}")
            return
    encoded = file.suffix not in (".json", ".jsonl")
    converters = {name: convert for name, inner in features.items() if (convert := _converter(inner, encoded))}
    for record in records:
        # Columns that are null stay, by which they are known to be there.
        columns = converters.keys() & (record.value if isinstance(record.value, dict) else ())
        with findings.collecting():
            try:
                changes = {key: converters[key](entry) for key in columns if (entry := record.value[key]) is not None}
            except DataError as error:
                raise DataError(f"{record.source}: {error}") from None
            yield record._replace(value=record.value | changes) if changes else record


def _converter(feature: Any, encoded: bool) -> Callable[[Any], Any] | None:
    """Return a function that decodes stored values of a feature of datasets; None for those that stay as they are.

    JSON that is text (``encoded``) is parsed, class labels become names, and keys that a struct has for other rows (null) are
    left out. Images stay files, which are decoded within limits later.
    """
    import datasets

    if isinstance(feature, dict):
        parts = {name: _converter(inner, encoded) for name, inner in feature.items()}

        def struct(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            present = {key: entry for key, entry in value.items() if entry is not None or key not in parts}
            return {key: entry if (part := parts.get(key)) is None else part(entry) for key, entry in present.items()}

        return struct
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if inner is not None and (element := _converter(inner, encoded)) is not None:
        return lambda value: (
            [None if entry is None else element(entry) for entry in value] if isinstance(value, list) else value
        )
    if isinstance(feature, datasets.ClassLabel):
        return lambda value: label_name(feature, value)
    if encoded and isinstance(feature, getattr(datasets, "Json", ())):  # of datasets 4.7 and later
        return lambda value: parse_json(value, "datasets' Json type") if isinstance(value, str) else value
    return None


# --- text and JSON ---


def _text_records(path: Path, findings: Findings) -> Iterator[Record]:
    with findings.collecting():
        content = _decode(path.read_bytes().removeprefix(BYTE_ORDER_MARK), str(path))
        if content.strip():
            yield Record(str(path), Document(str(path), text=content), (len(content), 1))


def _text_blocks(path: Path, findings: Findings, start: Position) -> Iterator[Record]:
    """Yield a text file in blocks of lines, each a document that continues the one before."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(start[0])
        offset, number = start
        while offset < size:
            content = file.read(TEXT_BLOCK) + file.readline(TEXT_BLOCK)
            cut = len(content)
            if not content.endswith(b"\n") and offset + cut < size:
                # A line longer than a block: not within a character, whose later bytes begin with the bits 10.
                while cut > len(content) - 4 and content[cut - 1] & 0xC0 == 0x80:
                    cut -= 1
                cut -= content[cut - 1] >= 0xC0
            first, last = offset == 0, offset + cut >= size
            with findings.collecting():
                text = _decode(content[:cut].removeprefix(BYTE_ORDER_MARK if first else b""), f"{path}:{number + 1}")
                source = f"{path}:{number + 1}"
                document = Document(source, text=text, begins=first, ends=last)
                # As for a text that is read as a whole: one of spaces only does not count as a document.
                if text.strip() or (text and not (first and last)):
                    yield Record(source, document, (offset + cut, number + content[:cut].count(b"\n")))
            offset, number = offset + cut, number + content[:cut].count(b"\n")
            file.seek(offset)


def _jsonl_records(path: Path, findings: Findings, start: Position = BEGINNING) -> Iterator[Record]:
    # Lines of bytes: JSON strings may hold U+2028 and similar characters, at which str.splitlines() would split.
    with path.open("rb") as file:
        file.seek(start[0])
        offset = start[0]
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=start[1] + 1):
            if len(line) > LONGEST_LINE:
                findings.file_problem(
                    f"{path}:{number}: the line has more than {LONGEST_LINE:,} bytes: write a record a line"
                )
                return
            offset += len(line)
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if not line.strip():
                continue
            source = f"{path}:{number}"
            with findings.collecting():
                record = parse_json(_decode(line, source).rstrip("\r\n"), source)
                yield Record(source, record, (offset, number))


def _json_records(path: Path, findings: Findings) -> Iterator[Record]:
    with findings.collecting():
        content = _decode(path.read_bytes().removeprefix(BYTE_ORDER_MARK), str(path))
        try:
            records = json.loads(content)
        except (ValueError, RecursionError) as error:
            if "Extra data" not in str(error):
                raise DataError(_json_problem(error, str(path))) from None
            records = None  # JSON Lines under the name .json, as many data sets have it
        if records is None:
            yield from _jsonl_records(path, findings)
        elif isinstance(records, list):
            for number, record in enumerate(records):
                yield Record(f"{path}[{number}]", record, (number + 1, 0))
        else:
            raise DataError(f"{path}: expected a JSON list of objects, found {type(records).__name__}")


def parse_json(text: str, source: str) -> Any:
    """Parse a line of JSONL."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError alone: an integer of more digits than Python reads
        raise DataError(_json_problem(error, source)) from None


def _json_problem(error: Exception, source: str) -> str:
    if isinstance(error, RecursionError):
        return f"{source}: not valid JSON: nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return f"{source}: cannot be read as JSON: {error}"
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    return f"{source}: not valid JSON: {error.msg.removesuffix(' at')} at {line}column {error.colno}"


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        guess = " (it looks like UTF-16)" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise DataError(f"{source}: not UTF-8 text{guess} (byte {error.start}: {error.reason})") from None


# --- tables ---


def _json_lines(path: Path, findings: Findings, start: Position) -> Iterator[Record]:
    """Yield the records of JSON Lines under the name .json, as many data sets have it."""
    with path.open("rb") as file:
        beginning = file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()
    if beginning[:1] == b"[":
        raise DataError(
            f"{path} ({findings.setting}) is a JSON list, which can only be read as a whole: write a record a line, as .jsonl, "
            "or set data.streaming: false"
        )
    yield from _jsonl_records(path, findings, start)


def _csv_records(path: Path, findings: Findings, start: Position = BEGINNING) -> Iterator[Record]:
    offset, line_number = BEGINNING

    def lines() -> Iterator[str]:
        nonlocal offset, line_number
        for content in file:
            if line_number == 0 and content.startswith(BYTE_ORDER_MARK):
                content, offset = content.removeprefix(BYTE_ORDER_MARK), len(BYTE_ORDER_MARK)
            text = content.decode("utf-8")
            # csv accepts every line end; a field may hold one, too.
            for piece in io.StringIO(text, newline="") if "\r" in text[:-2] else [text]:
                offset += len(piece.encode())
                line_number += 1
                yield piece

    try:
        # Values stay strings: a reader that infers types would turn NA into null and 007 into 7. Bytes, not text: their
        # positions are known.
        with path.open("rb") as file:
            rows = csv.reader(lines(), strict=True, delimiter=DELIMITERS[path.suffix])
            header = _next_row(rows) or []
            if len(header) == 1 and (hint := _delimiter_hint(path)):
                raise DataError(f"{path}:1: one column, {header[0]!r:.60}{hint}")
            if len(set(header)) != len(header):
                raise DataError(f"{path}:1: two columns have one name: {', '.join(header)}")
            if start != BEGINNING:
                file.seek(start[0])
                rows = csv.reader(lines(), strict=True, delimiter=DELIMITERS[path.suffix])
                offset, line_number = start
            # A quoted field may span several lines: a record's source is its first line.
            first_line = line_number + 1
            while (row := _next_row(rows)) is not None:
                source, first_line = f"{path}:{first_line}", line_number + 1
                if not row:
                    continue
                if len(row) != len(header):
                    findings.problem(f"{source}: {len(row)} columns, and the first line names {len(header)}")
                    continue
                yield Record(source, dict(zip(header, row, strict=True)), (offset, line_number))
    except csv.Error as error:
        findings.file_problem(f"{path}:{line_number}: not valid CSV: {error}{_delimiter_hint(path)}")
    except UnicodeDecodeError as error:
        findings.file_problem(f"{path}:{line_number + 1}: not UTF-8 text ({error.reason})")
    except DataError as error:
        findings.file_problem(str(error))


def _next_row(rows: Iterator[list[str]]) -> list[str] | None:
    """Return the next row of a table, whose fields may be long; None at the end."""
    # A process-wide setting of the csv module: several readers, and threads, may be in the middle of their files.
    with CSV_LIMIT:
        before = csv.field_size_limit(LONGEST_FIELD)
        try:
            return next(rows, None)
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


def _parquet_records(path: Path, findings: Findings, start: Position = BEGINNING) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        # Without pre_buffer, which reads a whole row group ahead.
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if number + count <= start[0]:
                    number += count
                    continue
                for batch in file.iter_batches(batch_size=1024, row_groups=[group]):
                    skipped = min(max(start[0] - number, 0), len(batch))
                    number += skipped
                    for record in batch.slice(skipped).to_pylist():
                        number += 1
                        yield Record(f"{path}[{number - 1}]", record, (number, 0))
    except pyarrow.ArrowException as error:
        findings.file_problem(f"{path}: not a parquet file that can be read: {error}")


class Reader(NamedTuple):
    """Readers of a format: of whole files, and of a part of one at a time, which begins anywhere."""

    records: Callable[[Path, Findings], Iterator[Record]]
    stream: Callable[[Path, Findings, Position], Iterator[Record]]


READERS = {
    "jsonl": Reader(_jsonl_records, _jsonl_records),
    "json": Reader(_json_records, _json_lines),
    "csv": Reader(_csv_records, _csv_records),
    "parquet": Reader(_parquet_records, _parquet_records),
    "text": Reader(_text_records, _text_blocks),
}
"""Readers of the formats in ``DATA_FORMATS``."""


def stream_records(
    path: Path, split: str | None, findings: Findings, start: Position, card_features: Mapping[str, Any]
) -> Iterator[Record]:
    """Yield the records of one of :func:`files_of` from a position on; ``split``: of a folder that datasets saved."""
    if path.is_dir():
        yield from _saved_records(path, split, findings, start)
        return
    yield from _typed(READERS[DATA_FORMATS[path.suffix]].stream(path, findings, start), path, card_features, findings)


def stream_length(path: Path) -> int:
    """Return the position after the last record of one of :func:`files_of`."""
    if path.is_dir():
        return len(_loaded(path, Findings()))
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        try:
            return parquet.read_metadata(path).num_rows
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: not a parquet file that can be read: {error}") from None
    return path.stat().st_size


# --- folders that datasets has saved ---


def _saved_records(path: Path, split: str | None, findings: Findings, start: Position = BEGINNING) -> Iterator[Record]:
    import datasets

    rows = _loaded(path, findings)
    if isinstance(rows, datasets.DatasetDict):
        names = [str(name) for name in rows]
        chosen = names if split == ALL else [choose_split(path, split, names, findings.setting)]
        rows = datasets.concatenate_datasets([rows[name] for name in chosen])
    remaining = rows.select(range(start[0], len(rows))) if start[0] else rows
    # Few rows at a time: they may hold images.
    tables = cast("Any", remaining.with_format("arrow").iter(batch_size=64))

    def records() -> Iterator[Record]:
        number = start[0]
        for table in tables:
            for record in table.to_pylist():
                number += 1
                yield Record(f"{path}[{number - 1}]", record, (number, 0))

    yield from _typed(records(), path, rows.features, findings)


def _loaded(path: Path, findings: Findings) -> Any:
    """Return what datasets has saved in a folder."""
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} ({findings.setting}): datasets cannot load it: {error}") from error


LARGE = 32 * 2**20
"""Size in bytes from which data is checked by the ranks only."""


def check_files(path: Path, data: Data, setting: str = "data.path") -> Findings:
    """Return problems of files and records.

    Records of streams, of folders that datasets saved, and of data above :data:`LARGE` are left to the ranks.
    """
    read_template(data.chat_template)
    findings = Findings(setting)
    # Data prepared on another machine are compared when they are opened.
    if data.prepared is not None:
        return findings
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
    if size < LARGE and not findings.problems and not data.streaming:
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
