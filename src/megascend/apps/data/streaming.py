"""Samples that are read and tokenised during training, from files of any size.

Every rank reads the same stream. A source is read in blocks of ``data.shuffle_buffer`` records, each drawn in an order of its
own; a position is the block's beginning and the number of records drawn from it, so that a resumed run reads one block again.
"""

from __future__ import annotations

import atexit
import logging
import queue
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import xxhash

from megascend.apps.data.columns import parse_record
from megascend.apps.data.document import Document
from megascend.apps.data.files import BEGINNING, Position, Record, stream_length, stream_records
from megascend.apps.data.findings import Findings
from megascend.apps.data.images import ImageProcessor
from megascend.apps.data.order import SourceTurns
from megascend.apps.data.samples import Encoder
from megascend.apps.data.splits import Card, files_of
from megascend.config.data import DataSource
from megascend.errors import DataError
from megascend.training.batch.image_sources import ImageSources
from megascend.training.batch.images import DeferredImages
from megascend.training.batch.loss import MARGIN
from megascend.training.batch.sample import Sample
from weightwire.background import BackgroundThread

logger = logging.getLogger(__name__)

PREFETCHED = 2
"""Batches that are read before a step needs them: one takes longer than another."""
CLOSE_S = 10.0
"""Seconds that the end of a run waits for the batch that is being read."""
EDGE = 2**16
"""Bytes at each end of a file that identify it, with its name and size: reading all of it would take minutes."""


class BadRecords:
    """Records that could not be read or tokenised, over all sources.

    Attributes:
        count: number of them so far.
    """

    def __init__(self, limit: int, findings: Findings) -> None:
        """
        Args:
            limit: most that are skipped.
            findings: collects problems.
        """
        self.count, self._limit, self.findings = 0, limit, findings

    def check(self, *, single: bool = False) -> None:
        """Count the records with problems since the last call.

        Args:
            single: all problems are of one record; else each is of its own.

        Raises:
            DataError: there are more than the limit, or a file could not be read to its end.
        """
        findings = self.findings
        new = sum(kind.count for kind in findings.problems.values()) + findings.more_problems
        new = min(new, 1) if single else new
        self.count += new
        # The rest of a file is not a record.
        if findings.incomplete:
            findings.raise_problems()
        if self.count > self._limit:
            try:
                findings.raise_problems()
            except DataError as error:
                skipped = f"; {self.count - new} others were skipped before" if self.count > new else ""
                raise DataError(
                    f"{error}{skipped} (data.max_bad_records: {self._limit}; correct the data, or raise it to skip more)"
                ) from None
        findings.skip_problems("data.max_bad_records")


class SourceFiles:
    """Files of a source, which must not change while a run reads them.

    Attributes:
        files: in the order in which they are read without shuffling.
        remarks: descriptions of files that are not read.
        identity: digest of them, see :func:`file_identity`.
    """

    def __init__(self, source: DataSource) -> None:
        data, findings = source.data, Findings(source.setting)
        self.files = files_of(source.path, data.split, data.config_name, findings)
        findings.raise_problems()
        self.remarks = findings.lines()
        try:
            # Before the identity: what changes between them is noticed.
            self._states = [_file_states(file) for file in self.files]
            self._identities = [file_identity(file) for file in self.files]
            features = Card.read(source.path, data.config_name, source.setting, data.split).features
            parts = [*self._identities, *([str(features)] if features else [])]
            self.identity = xxhash.xxh3_128(" ".join(parts).encode()).hexdigest()
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror or error}") from error

    def check(self, number: int) -> None:
        """Raise DataError if a file has changed; a new time of modification is not a change."""
        file = self.files[number]
        try:
            if (states := _file_states(file)) == self._states[number]:
                return
            if file_identity(file) == self._identities[number]:
                self._states[number] = states
                return
            problem = "has changed since the run began"
        except OSError as error:
            problem = f"was there when the run began and cannot be read now: {error.strerror or error}"
        raise DataError(
            f"{file} {problem}: a stream needs files that stay as they are; resume with what the run began with, or with "
            "data.on_changed: continue"
        )


class RecordStream:
    """Endless records of one source, block by block."""

    def __init__(self, source: DataSource, key: str, bad: BadRecords, files: SourceFiles | None = None) -> None:
        """
        Args:
            key: seeds the orders of files and blocks, with the epoch.
            files: those of the source, as they were when the run began; default: now.
        """
        data = source.data
        self._source, self._key, self._bad = source, key, bad
        self._buffer, self._shuffle = data.shuffle_buffer, data.shuffle
        self._watched = SourceFiles(source) if files is None else files
        self.files = self._watched.files
        self._card = Card.read(source.path, data.config_name, source.setting, data.split)
        lengths = [stream_length(file) for file in self.files]
        # Others are measured in bytes.
        if all(file.suffix == ".parquet" for file in self.files):
            self._card.check_count(source.path, data.split, sum(lengths), source.setting)
        self._lengths = [max(1, length) for length in lengths]
        self.start(0)

    def start(self, epoch: int, file: int = 0, position: Position = BEGINNING) -> None:
        """Continue with a block that begins at a position of the epoch's file."""
        self._records: Iterator[Record] | None = None
        self._begin_epoch(epoch)
        self._file, self._position = file, position
        self._block: list[Record] = []
        self._consumed = 0
        self._mark_beginning()
        self._end = self._beginning

    def __next__(self) -> Record:
        if self._consumed == len(self._block):
            self._read_block()
        self._consumed += 1
        return self._block[self._consumed - 1]

    @property
    def epoch(self) -> int:
        """Return the number of passes before the one of the last record."""
        return self._block_start[0]

    @property
    def epochs(self) -> float:
        """Return the number of passes, in files and the share of the present one that was read."""
        share = self._consumed / len(self._block) if self._block else 0.0
        return self._beginning + share * (self._end - self._beginning)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON."""
        epoch, file, position = self._block_start
        return {"epoch": epoch, "file": file, "position": list(position), "consumed": self._consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position."""
        offset, lines = state["position"]
        self.start(state["epoch"], state["file"], (offset, lines))
        if state["consumed"]:
            self._read_block()
            self._consumed = state["consumed"]

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._file, self._position = epoch, 0, BEGINNING
        self._order = list(range(len(self.files)))
        if self._shuffle:
            random.Random(f"{self._key}/{epoch}/files").shuffle(self._order)

    def _mark_beginning(self) -> None:
        self._block_start = (self._epoch, self._file, self._position)
        self._beginning = self._progress()

    def _progress(self) -> float:
        """Return the number of passes up to the next record to be read."""
        inside = 0.0
        if self._file < len(self.files):
            inside = min(1.0, self._position[0] / self._lengths[self._order[self._file]])
        # Every file has the same weight: some are measured in bytes, others in rows.
        return self._epoch + (self._file + inside) / len(self.files)

    def _read_block(self) -> None:
        """Read and shuffle the next block, which ends with the epoch at the latest."""
        self._block, self._consumed, restarts = [], 0, 0
        while not self._block:
            if self._file == len(self.files):
                restarts += 1
                if restarts > 1:
                    remarks = "".join(f"; {line}" for line in self._bad.findings.lines())
                    raise DataError(
                        f"no training data in {self._source.path} ({self._source.setting}): it holds no document{remarks}"
                    )
                self._begin_epoch(self._epoch + 1)
            self._mark_beginning()
            while len(self._block) < self._buffer and self._file < len(self.files):
                record = self._next_record()
                if record is None or len(self._block) + 1 == self._buffer:
                    # Ranks that see another end of a growing file would go on with other samples than the rest.
                    self._watched.check(self._order[self._file])
                if record is None:
                    self._file, self._position, self._records = self._file + 1, BEGINNING, None
                else:
                    self._block.append(record)
                    self._position = record.end
        self._end = self._progress()
        if self._shuffle:
            epoch, file, (offset, _) = self._block_start
            random.Random(f"{self._key}/{epoch}/{file}/{offset}").shuffle(self._block)

    def _next_record(self) -> Record | None:
        """Return the next record of the present file; None at its end."""
        self._bad.findings.setting = self._source.setting
        try:
            if self._records is None:
                file, split = self.files[self._order[self._file]], self._source.data.split
                features = self._card.features
                self._records = stream_records(file, split, self._bad.findings, self._position, features)
            record = next(self._records, None)
        except OSError as error:  # of a parquet file's reader without the file's name
            name = error.filename or self.files[self._order[self._file]]
            raise DataError(f"{name} cannot be read: {error.strerror or error}") from error
        # Readers report a bad record and go on with the next.
        self._bad.check()
        return record


class SampleStream:
    """Endless units of one source: a sample, or the two of a preference pair."""

    def __init__(
        self,
        source: DataSource,
        key: str,
        bad: BadRecords,
        encoder: Encoder,
        load: Callable[..., Any],
        files: SourceFiles | None = None,
    ) -> None:
        """
        Args:
            load: loads the images of a sample.
            files: as of :class:`RecordStream`.
        """
        self.records = RecordStream(source, key, bad, files)
        self._path, self._columns = source.path, source.data.columns or None
        self._bad, self._encoder, self._load = bad, encoder, load
        self._units: list[list[Sample]] = []
        self._consumed = 0

    def __next__(self) -> list[Sample]:
        first_epoch = self.records.epoch
        while self._consumed == len(self._units):
            self._units, self._consumed = self._encode(next(self.records)), 0
            # After a complete pass without a sample, there would be endless further ones.
            if self.records.epoch > first_epoch + 1:
                remarks = "".join(f"; {line}" for line in self._bad.findings.lines())
                raise DataError(f"no training samples: {self._path} holds no token to predict{remarks}")
        self._consumed += 1
        return self._units[self._consumed - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON; ``units``: those drawn of the last record, if some are left."""
        return {**self.records.state_dict(), "units": self._consumed if self._consumed < len(self._units) else 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position."""
        units = state["units"]
        self.records.load_state_dict({**state, "consumed": state["consumed"] - (units > 0)})
        self._units, self._consumed = [], 0
        if units:
            self._units, self._consumed = self._encode(next(self.records)), units

    def begin_epoch(self, epoch: int) -> None:
        """Continue with the first record."""
        self.records.start(epoch)
        self._units, self._consumed = [], 0

    def _encode(self, record: Record) -> list[list[Sample]]:
        """Return the units of a record; none if it is left out, or bad."""
        findings, value, samples = self._bad.findings, record.value, []
        with findings.collecting():
            document = (
                value if isinstance(value, Document) else parse_record(value, record.source, self._columns, findings)
            )
            if document.label is not None and not self._encoder.classifies:
                raise DataError(
                    f"{record.source}: a completion with 'label' takes its counterpart from other records, which streams do not "
                    "have: set data.streaming: false"
                )
            samples = self._encoder.encode(document)
        self._bad.check(single=True)
        for sample in samples:
            if isinstance(sources := sample.images, ImageSources):
                sample.images = DeferredImages(lambda sources=sources: self._load(sources))
        return [samples] if samples and samples[0].pair is not None else [[sample] for sample in samples]


class StreamedBatches:
    """Endless global batches of streams, of each source its share (:class:`SourceTurns`).

    Attributes:
        changes: how the data differ from a checkpoint's, where a run may continue with them.
        kind: samples are of preference pairs, have a teacher's candidates, have a margin; None until the first sample.
    """

    def __init__(
        self,
        sources: Sequence[DataSource],
        batch_size: int,
        seed: int,
        encoder: Callable[[Findings], Encoder],
        inputs: Mapping[str, str],
        image_processor: ImageProcessor | None = None,
        files: Sequence[SourceFiles] = (),
    ) -> None:
        """
        Args:
            encoder: makes the encoder of a source, with its findings.
            inputs: what the samples are made from, by name.
            files: of each source, as they were when the run began; default: now.
        """
        data = sources[0].data
        self._findings = Findings("data.path")
        self._bad = BadRecords(data.max_bad_records, self._findings)
        self._size, self._inputs, self._on_changed = batch_size, dict(inputs), data.on_changed
        self._title = ", ".join(str(source.path) for source in sources)
        self._settings = {
            "seed": seed,
            "shuffle": data.shuffle,
            "shuffle_buffer": data.shuffle_buffer,
            "weights": [source.weight for source in sources],
        }
        self._turns = SourceTurns([1 if source.weight is None else source.weight for source in sources])
        load = image_processor.load if image_processor is not None else _no_images
        encode = encoder(self._findings)
        self._streams = [
            SampleStream(source, f"{seed}/source {number}", self._bad, encode, load, source_files)
            for number, (source, source_files) in enumerate(zip_longest(sources, files))
        ]
        self.kind: tuple[bool, bool, bool] | None = None
        self.changes = ""

    def __iter__(self) -> Iterator[list[Sample]]:
        return self

    def __next__(self) -> list[Sample]:
        batch: list[Sample] = []
        for number in range(self._size):
            unit = next(self._streams[next(self._turns)])
            kind = (unit[0].pair is not None, unit[0].candidates is not None, MARGIN in unit[0].extra)
            if self.kind not in (None, kind):
                raise DataError(
                    f"{self._title} holds preference pairs, pairs with 'margin', or tokens with a teacher's distributions, and "
                    "other documents: they cannot be trained together"
                )
            self.kind = kind
            for sample in unit:
                sample.pair = number if kind[0] else None
            batch += unit
        return batch

    @property
    def epochs(self) -> float:
        """Return the mean number of passes over the sources, by their shares."""
        return sum(share * passes for share, passes in zip(self._turns.shares, self.source_epochs, strict=True))

    @property
    def source_epochs(self) -> list[float]:
        """Return the number of passes over each source."""
        return [stream.records.epochs for stream in self._streams]

    @property
    def shares(self) -> list[float]:
        """Return the share of each source in the batches."""
        return self._turns.shares

    @property
    def bad_records(self) -> int:
        """Return the number of records that were skipped because they cannot be trained on."""
        return self._bad.count

    @property
    def remarks(self) -> list[str]:
        """Return what was left out, cut or converted since the run or its resumption began."""
        return self._findings.lines()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it depends on, as JSON."""
        return {
            "streams": [stream.state_dict() for stream in self._streams],
            "turns": self._turns.counts[:],
            "bad": self._bad.count,
            **self._settings,
            "sources": self._inputs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; :attr:`changes` describes differences of the data, if these are allowed."""
        if "streams" not in state:
            raise DataError(
                "cannot resume the data order: the checkpoint is of a run with data.streaming: false; set that, or begin a new "
                "run"
            )
        for key, value in self._settings.items():
            if state[key] != value:
                name = f"{key} of data.sources" if key == "weights" else key
                raise DataError(
                    f"cannot resume the data order: {name} was {state[key]} when it was saved and is {value} now"
                )
        saved = state["sources"]
        changed = [name for name in {**saved, **self._inputs} if saved.get(name) != self._inputs.get(name)]
        if changed:
            report = ", ".join(changed)
            if self._on_changed != "continue":
                raise DataError(
                    f"cannot resume the data order: what samples are made from has changed: {report}; bring it back, or begin "
                    "a new epoch with data.on_changed: continue"
                )
            self.changes = f"changed: {report}; a new epoch begins"
        for stream, position in zip(self._streams, state["streams"], strict=True):
            # Of a position in other files, or of other samples, only the epoch holds.
            if changed:
                stream.begin_epoch(position["epoch"] + 1)
            else:
                stream.load_state_dict(position)
        self._turns.counts = list(state["turns"])
        # After the blocks: reading them again has counted their bad records again.
        self._bad.count = state["bad"]


@dataclass(frozen=True)
class StreamedBatch:
    """A global batch, and the position and figures of its stream after it.

    Attributes:
        digest: of the tokens and their weights.
        state, epochs, source_epochs, bad_records, remarks: of :class:`StreamedBatches`.
    """

    samples: list[Sample]
    digest: int
    state: dict[str, Any]
    epochs: float
    source_epochs: list[float]
    bad_records: int
    remarks: list[str]

    @classmethod
    def read(cls, stream: StreamedBatches) -> StreamedBatch:
        """Read and tokenise the next batch of a stream."""
        samples = next(stream)
        state = xxhash.xxh3_64()
        for sample in samples:
            for values in (sample.input_ids, sample.target_ids, sample.weights):
                state.update(values.numpy().tobytes())
        return cls(samples, state.intdigest(), *_position(stream))


def _position(stream: StreamedBatches) -> tuple[dict[str, Any], float, list[float], int, list[str]]:
    return stream.state_dict(), stream.epochs, stream.source_epochs, stream.bad_records, stream.remarks


class PrefetchedBatches:
    """Batches of a stream that a thread reads and tokenises in advance, in the stream's order.

    A thread, since the tokenizer and the step's computations run without the interpreter's lock, and what the thread holds it
    for would otherwise be done between the steps. Position and figures are those after the last batch that was taken. An error
    is raised in place of the batch that it prevents, so that all ranks raise it in the same step.

    Attributes:
        changes, shares: of :class:`StreamedBatches`.
    """

    def __init__(self, stream: StreamedBatches) -> None:
        self._stream = stream
        self.shares, self.changes = stream.shares, ""
        self._last = StreamedBatch([], 0, *_position(stream))
        self._thread: BackgroundThread | None = None
        self._results: queue.SimpleQueue[StreamedBatch | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(PREFETCHED)
        self._closed = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``, before the first batch is taken; see :meth:`StreamedBatches.load_state_dict`."""
        assert self._thread is None, "a stream that is read ahead cannot be moved"
        self._stream.load_state_dict(state)
        self.changes = self._stream.changes
        self._last = StreamedBatch([], 0, *_position(self._stream))

    def take(self) -> StreamedBatch:
        """Return the next batch; the one after it is read meanwhile."""
        assert not self._closed
        if self._thread is None:
            # A daemon: a read that never returns must not keep the process from ending.
            self._thread = BackgroundThread(self._read, name="megascend-stream")
            # A thread that returns from C++ to an interpreter that is shutting down would abort the process.
            atexit.register(self.close)
            self._thread.start()
        result = self._results.get()
        if isinstance(result, BaseException):
            self._results.put(result)  # raised again by later calls
            raise result
        self._last = result
        self._room.release()
        return result

    def _read(self) -> None:
        while self._room.acquire() and not self._closed:
            try:
                self._results.put(StreamedBatch.read(self._stream))
            except BaseException as error:  # noqa: BLE001  raised where the batch is taken
                self._results.put(error)
                return

    def close(self) -> None:
        """End the thread after the batch that it is at."""
        atexit.unregister(self.close)
        self._closed = True
        self._room.release()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                logger.warning("the data are still being read after %g s; the process ends without them", CLOSE_S)

    @property
    def epochs(self) -> float:
        """Return the mean number of passes over the sources, by their shares."""
        return self._last.epochs

    @property
    def source_epochs(self) -> list[float]:
        """Return the number of passes over each source."""
        return self._last.source_epochs

    @property
    def bad_records(self) -> int:
        """Return the number of records that were skipped because they cannot be trained on."""
        return self._last.bad_records

    @property
    def remarks(self) -> list[str]:
        """Return what was left out, cut or converted since the run or its resumption began."""
        return self._last.remarks

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it depends on, as JSON."""
        return self._last.state


def _no_images(sources: ImageSources) -> Any:
    raise DataError("this model takes no images")


def _file_states(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of a file; of a folder that datasets saved, of those in it."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = [(file.name, file.stat()) for file in files if not file.is_dir()]
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def file_identity(path: Path) -> str:
    """Return a digest of name, size and both ends of a file; of a folder that datasets saved, of those in it."""
    state = xxhash.xxh3_128()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        size = file.stat().st_size
        state.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            state.update(stream.read(EDGE))
            stream.seek(max(0, size - EDGE))
            state.update(stream.read(EDGE))
    return state.hexdigest()
