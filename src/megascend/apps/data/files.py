"""Read records from JSONL, JSON, CSV, parquet, Arrow and plain text files, folders of these, and folders that datasets saved.

datasets chooses the files and knows the types of columns; pyarrow reads tables and compressed files. Lines are parsed here, by
Python's json and csv: pyarrow's readers end at the first line that cannot be parsed, and name no line; they convert values, give
all objects of a column the same keys, and read a quote within a quoted field of CSV as text, where csv refuses the file.

Records are read one by one; no file is held in memory as a whole, except JSON and texts that are not streamed. Readers begin at
any :data:`Position`, so that a stream continues without reading what came before.
"""

from __future__ import annotations

import csv
import io
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from megascend.apps.data.columns import parse_record
from megascend.apps.data.document import Document
from megascend.apps.data.findings import Findings, of_source
from megascend.apps.data.labels import label_name
from megascend.apps.data.splits import SplitFiles, data_ending, is_saved
from megascend.config import Data
from megascend.config.registry import COMPRESSIONS, DATA_FORMATS, load
from megascend.errors import DataError

Position = tuple[int, int]
"""Where the next record of a file begins, in bytes or rows, and the number of lines before it."""
BEGINNING: Position = (0, 0)


class Record(NamedTuple):
    """What a record holds, or the :class:`Document` that it is; its source is ``file:line``, ``file[row]`` or the file."""

    source: str
    value: Any
    end: Position


class Table(NamedTuple):
    """The number of a table's rows, and the types of its columns as datasets knows them."""

    rows: int
    features: Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """A format of data files.

    Attributes:
        read: yields the records of a file from a position on; with True, as a stream does.
        table: describes a file whose records are rows of typed columns; None for other formats.
    """

    read: Callable[[Path, Findings, Position, bool], Iterator[Record]]
    table: Callable[[Path], Table] | None = None


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
ROWS = 1024
"""Rows of a table that are converted at once."""
SAVED_ROWS = 64
"""The same of folders that datasets saved, whose rows may hold images."""


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
    """Yield documents; problems with others go to ``findings``."""
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
    source, count = SplitFiles.of(path, split, config_name, findings), 0
    for file in source.files:
        try:
            for record in read_file(file, source.features, findings):
                count += not isinstance(record.value, Document)
                yield record
        except OSError as error:
            findings.problem(f"{file} cannot be read: {error.strerror or error}")
    if count and not findings.problems and (problem := source.count_problem(count)):
        raise DataError(problem)


def read_file(
    path: Path,
    card_features: Mapping[str, Any],
    findings: Findings,
    start: Position = BEGINNING,
    *,
    streaming: bool = False,
) -> Iterator[Record]:
    """Yield the records of one of the files of a split, with values as its schema, or its folder's card, declares them.

    Args:
        start: position of the first.
        streaming: long texts are several records, and what must be read as a whole is refused.
    """
    kind = _format(path)
    try:
        features = {**(kind.table(path).features if kind.table is not None else {}), **card_features}
    except DataError as error:
        findings.file_problem(str(error))
        return
    encoded = kind not in (JSON, JSONL)
    converters = {name: convert for name, inner in features.items() if (convert := _converter(inner, encoded))}
    for record in kind.read(path, findings, start, streaming):
        # Columns that are null stay, by which they are known to be there.
        columns = converters.keys() & (record.value if isinstance(record.value, dict) else ())
        with findings.collecting(), of_source(record.source):
            changes = {key: converters[key](entry) for key in columns if (entry := record.value[key]) is not None}
            yield record._replace(value=record.value | changes) if changes else record


def _format(path: Path) -> Format:
    return SAVED if path.is_dir() else load(DATA_FORMATS[data_ending(path)])


def stream_length(path: Path) -> int:
    """Return the position after the last record of one of the files of a split; 0 if it is unknown."""
    if (table := _format(path).table) is not None:
        return table(path).rows
    return 0 if path.suffix in COMPRESSIONS else path.stat().st_size


def has_rows(path: Path) -> bool:
    """Check whether the records of one of the files of a split are rows, whose number is known without reading them."""
    return _format(path).table is not None


def _open(path: Path, offset: int = 0) -> io.BufferedReader:
    """Open a file, or the content of a compressed one, at a place in it."""
    if path.suffix not in COMPRESSIONS:
        file = path.open("rb")
        file.seek(offset)
        return file
    import pyarrow

    content = io.BufferedReader(cast("Any", pyarrow.input_stream(str(path), compression="detect")), 2**20)
    # No place in it is known but the beginning.
    while offset and (skipped := len(content.read(min(offset, 2**20)))):
        offset -= skipped
    return content


# --- values as datasets' features declare them ---


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
        return lambda value: parse_json(value) if isinstance(value, str) else value
    return None


# --- text and JSON ---


def _text_records(path: Path, findings: Findings, start: Position, streaming: bool) -> Iterator[Record]:
    """Yield a text file or, of a stream, its blocks of lines, each a document that continues the one before."""
    with _open(path, start[0]) as file:
        offset, number = start
        rest, ended = b"", False
        while not ended:
            content = rest + file.read(TEXT_BLOCK - len(rest) if streaming else -1) + file.readline(TEXT_BLOCK)
            cut, ended = len(content), not file.peek(1)
            if not content.endswith(b"\n") and not ended:
                # A line longer than a block: not within a character, whose later bytes begin with the bits 10.
                while cut > len(content) - 4 and content[cut - 1] & 0xC0 == 0x80:
                    cut -= 1
                cut -= content[cut - 1] >= 0xC0
            source = f"{path}:{number + 1}" if streaming else str(path)
            first, last, rest = offset == 0, ended, content[cut:]
            with findings.collecting(), of_source(source):
                text = _decode(content[:cut].removeprefix(BYTE_ORDER_MARK if first else b""))
                document = Document(source, text=text, begins=first, ends=last)
                # As for a text that is read as a whole: one of spaces only does not count as a document.
                if text.strip() or (text and not (first and last)):
                    yield Record(source, document, (offset + cut, number + content[:cut].count(b"\n")))
            offset, number = offset + cut, number + content[:cut].count(b"\n")


def _jsonl_records(path: Path, findings: Findings, start: Position, streaming: bool) -> Iterator[Record]:
    # Lines of bytes: JSON strings may hold U+2028 and similar characters, at which str.splitlines() would split.
    with _open(path, start[0]) as file:
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
            with findings.collecting(), of_source(source):
                record = parse_json(_decode(line).rstrip("\r\n"))
                yield Record(source, record, (offset, number))


def _json_records(path: Path, findings: Findings, start: Position, streaming: bool) -> Iterator[Record]:
    """Yield the records of a list, or of JSON Lines under the name .json, as many data sets have it."""
    if streaming:
        with _open(path) as file:
            if file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"[":
                raise DataError(
                    f"{path} ({findings.setting}) is a JSON list, which can only be read as a whole: write a record a line, as "
                    ".jsonl, or set data.streaming: false"
                )
        yield from _jsonl_records(path, findings, start, streaming)
        return
    with findings.collecting(), _open(path) as file, of_source(str(path)):
        content = _decode(file.read().removeprefix(BYTE_ORDER_MARK))
        try:
            records = parse_json(content)
        except DataError as error:
            if "Extra data" not in str(error):
                raise
            yield from _jsonl_records(path, findings, start, streaming)
            return
        if not isinstance(records, list):
            raise DataError(f"expected a JSON list of objects, found {type(records).__name__}")
        for number, record in enumerate(records):
            yield Record(f"{path}[{number}]", record, (number + 1, 0))


def parse_json(text: str) -> Any:
    """Parse JSON; DataError, without the source, says where it is not valid."""
    try:
        return json.loads(text)
    except RecursionError:
        raise DataError("not valid JSON: nested too deeply") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"not valid JSON: {error.msg.removesuffix(' at')} at {line}column {error.colno}") from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise DataError(f"cannot be read as JSON: {error}") from None


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        guess = " (it looks like UTF-16)" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise DataError(f"not UTF-8 text{guess} (byte {error.start}: {error.reason})") from None


# --- tables ---


def _csv_records(path: Path, findings: Findings, start: Position, streaming: bool) -> Iterator[Record]:
    offset, line_number = BEGINNING

    def lines(file: Iterable[bytes]) -> Iterator[str]:
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
        with _open(path) as file, _open(path, start[0]) as rest:
            rows = csv.reader(lines(file), strict=True, delimiter=DELIMITERS[data_ending(path)])
            header = _next_row(rows) or []
            if len(header) == 1 and (hint := _delimiter_hint(path)):
                raise DataError(f"{path}:1: one column, {header[0]!r:.60}{hint}")
            if len(set(header)) != len(header):
                raise DataError(f"{path}:1: two columns have one name: {', '.join(header)}")
            if start != BEGINNING:
                rows = csv.reader(lines(rest), strict=True, delimiter=DELIMITERS[data_ending(path)])
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
    with _open(path) as file:
        line = file.readline(LONGEST_LINE).decode("utf-8-sig", errors="replace").strip("\r\n")
    kind, ending = DELIMITERS[data_ending(path)], data_ending(path)
    for other in () if kind in line else (";", "\t", "|", ","):
        if len(names := line.split(other)) > 1 and all(names):
            return (
                f"; the first line seems to be separated by {other!r}, and {ending} files are by {kind!r}: write the file "
                "with commas as .csv, or with tabs as .tsv"
            )
    return ""


def _table(path: Path, kind: str, describe: Callable[[Path], tuple[int, Any]]) -> Table:
    """Describe a table by the number of its rows and its schema, which ``describe`` reads."""
    import datasets

    try:
        rows, schema = describe(path)
    except ValueError as error:  # pyarrow's errors, too
        raise DataError(f"{path}: not {kind} that can be read: {error}") from error
    try:
        return Table(rows, datasets.Features.from_arrow_schema(schema))
    except ValueError as error:
        columns = " ".join(str(schema).split())
        raise DataError(f"{path}: datasets cannot load a column: {columns:.80}; leave it out: {error}") from error


def _parquet_description(path: Path) -> tuple[int, Any]:
    from pyarrow import parquet

    metadata = parquet.read_metadata(path)
    return metadata.num_rows, metadata.schema.to_arrow_schema()


def _parquet_records(path: Path, findings: Findings, start: Position, streaming: bool) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        # Without pre_buffer, which reads a whole row group ahead.
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if number + count > start[0]:
                    yield from _rows(path, file.iter_batches(batch_size=ROWS, row_groups=[group]), number, start[0])
                number += count
    except pyarrow.ArrowException as error:
        findings.file_problem(f"{path}: not a parquet file that can be read: {error}")


def _arrow_records(path: Path, findings: Findings, start: Position, streaming: bool) -> Iterator[Record]:
    yield from _rows(path, _arrow_content(path).slice(start[0]).to_batches(ROWS), start[0], start[0])


def _arrow_content(path: Path) -> Any:
    """Return the rows of an Arrow file, mapped into memory: of a stream, as datasets writes it, or of the file format."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as content:
        try:
            return pyarrow.ipc.open_stream(content).read_all()
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_file(content).read_all()


def _arrow_description(path: Path) -> tuple[int, Any]:
    content = _arrow_content(path)
    return len(content), content.schema


def _saved_records(path: Path, findings: Findings, start: Position, streaming: bool) -> Iterator[Record]:
    rows = _loaded(path)
    remaining = rows.select(range(start[0], len(rows))).with_format("arrow")
    yield from _rows(path, remaining.iter(batch_size=SAVED_ROWS), start[0], start[0])


def _loaded(path: Path) -> Any:
    """Return what datasets has saved in the folder of a split."""
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{path}: datasets cannot load it: {error}") from error


def _rows(path: Path, batches: Iterable[Any], number: int, first: int) -> Iterator[Record]:
    """Yield the rows of Arrow batches, of which the first one's number is ``number``, from row ``first`` on."""
    for batch in batches:
        skipped = min(max(first - number, 0), len(batch))
        number += skipped
        for record in batch.slice(skipped).to_pylist():
            number += 1
            yield Record(f"{path}[{number - 1}]", record, (number, 0))


TEXT = Format(_text_records)
JSONL = Format(_jsonl_records)
JSON = Format(_json_records)
CSV = Format(_csv_records)
PARQUET = Format(_parquet_records, lambda path: _table(path, "a parquet file", _parquet_description))
ARROW = Format(_arrow_records, lambda path: _table(path, "an Arrow file", _arrow_description))
SAVED = Format(_saved_records, lambda path: Table(len(rows := _loaded(path)), rows.features))
"""Of a split that datasets has saved; ``DATA_FORMATS`` names the others by the endings of files."""


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
    try:
        files = SplitFiles.of(path, data.split, data.config_name, findings).files
        if is_saved(path):
            return findings
        for file in files:
            file.open("rb").close()
        size = sum(file.stat().st_size for file in files)
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
