"""Samples that are read and tokenised during training, from files of any size.

Every rank reads the same stream. A source is read in blocks of ``data.shuffle_buffer`` records, each drawn in an order of its
own; a position is the block's beginning and the number of records drawn from it, so that a resumed run reads one block again.

Not by streams of datasets, which measured (5.2, JSONL of 1 GB) break what a run promises: a resumed ``shuffle`` loses the records
of its buffer, ``interleave_datasets`` draws sources at random in place of their shares, and a line that is not JSON ends its file
without naming others. They parse at a third of the speed and read a file up to the position again.
"""

from __future__ import annotations

import atexit
import logging
import queue
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from megascend.apps.data.columns import parse_record
from megascend.apps.data.document import Document
from megascend.apps.data.files import BEGINNING, Position, Record, has_rows, read_file, stream_length
from megascend.apps.data.findings import Findings
from megascend.apps.data.images import ImageProcessor
from megascend.apps.data.order import Progress, SourceTurns, check_settings
from megascend.apps.data.samples import Encoder
from megascend.apps.data.splits import SplitFiles, file_states
from megascend.config.data import DataSource
from megascend.errors import DataError
from megascend.training.batch.image_sources import ImageSources
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
    """Number of records that could not be read or tokenised, over all sources, of which at most ``limit`` are skipped."""

    def __init__(self, limit: int, findings: Findings) -> None:
        self.count, self._limit, self.findings = 0, limit, findings

    def check(self, *, single: bool = False) -> int:
        """Count the records with problems since the last call, and return their number; ``single``: all are of one record.

        Raises:
            DataError: there are more than the limit, or a file could not be read to its end.
        """
        findings = self.findings
        new = min(findings.count, 1) if single else findings.count
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
        return new


class SourceFiles:
    """Files of a source, which must not change while a run reads them, and a digest of them (:func:`file_identity`)."""

    def __init__(self, source: DataSource) -> None:
        findings = Findings(source.setting)
        self.split = SplitFiles.of(source.path, source.data.split, source.data.config_name, findings)
        self.files = self.split.files
        findings.raise_problems()
        self.remarks = findings.lines()
        try:
            # Before the identity: what changes between them is noticed.
            self._states = [file_states([file]) for file in self.files]
            self._identities = [file_identity(file) for file in self.files]
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror or error}") from error
        parts = [*self._identities, *([str(self.split.features)] if self.split.features else [])]
        self.identity = xxhash.xxh3_128(" ".join(parts).encode()).hexdigest()

    def check(self, number: int) -> None:
        """Raise DataError if a file has changed; a new time of modification is not a change."""
        file = self.files[number]
        try:
            if (states := file_states([file])) == self._states[number]:
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


class SampleStream:
    """Endless units of one source, block by block: a sample, or the two of a preference pair.

    ``key`` seeds the orders of files and blocks, with the epoch.
    """

    def __init__(
        self,
        source: DataSource,
        key: str,
        bad: BadRecords,
        encoder: Encoder,
        image_processor: ImageProcessor | None,
        files: SourceFiles,
    ) -> None:
        self._data, self._path, self._setting = source.data, source.path, source.setting
        self._key, self._bad, self._encoder, self._image_processor = key, bad, encoder, image_processor
        self._source = files
        self._lengths = [stream_length(file) for file in files.files]
        # Rows are known; records of other files are counted while they are read.
        if all(has_rows(file) for file in files.files) and (problem := files.split.count_problem(sum(self._lengths))):
            raise DataError(problem)
        self.begin(0)

    def begin(self, epoch: int, file: int = 0, position: Position = BEGINNING, records: int | None = 0) -> None:
        """Continue with a block at a position of the epoch's file, before which there are ``records``; None: unknown."""
        self._epoch, self._file, self._position, self._count = epoch, file, position, records
        self._order = list(range(len(self._source.files)))
        if self._data.shuffle:
            random.Random(f"{self._key}/{epoch}/files").shuffle(self._order)
        self._records = self._rest_of_epoch()
        self._start_block([])

    def __next__(self) -> list[Sample]:
        self._bad.findings.setting = self._setting
        first_epoch = self._beginning[0]
        while self._taken == len(self._units):
            if self._consumed == len(self._block):
                self._read_block()
            self._consumed += 1
            self._units, self._taken = self._encode(self._block[self._consumed - 1]), 0
            # After a complete pass without a sample, there would be endless further ones.
            if self._beginning[0] > first_epoch + 1:
                raise DataError(f"no training samples: {self._path} holds no token to predict{self._remarks()}")
        self._taken += 1
        return self._units[self._taken - 1]

    @property
    def epochs(self) -> float:
        """Return the number of passes, in files and the share of the present one that was read."""
        _, file, position, _ = self._beginning
        before, after = self._progress(file, position), self._progress(self._file, self._position)
        share = self._consumed / len(self._block) if self._block else 0.0
        return before + share * (after - before)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON; ``units``: those drawn of the last record, if some are left."""
        epoch, file, position, records = self._beginning
        units = self._taken if self._taken < len(self._units) else 0
        state = {"epoch": epoch, "file": file, "position": list(position), "records": records}
        return state | {"consumed": self._consumed, "units": units}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position."""
        offset, lines = state["position"]
        self.begin(state["epoch"], state["file"], (offset, lines), state["records"])
        if state["consumed"]:
            self._read_block()
            self._consumed = state["consumed"]
        if state["units"]:
            self._units, self._taken = self._encode(self._block[self._consumed - 1]), state["units"]

    def _start_block(self, block: list[Record]) -> None:
        self._block, self._consumed = block, 0
        self._units: list[list[Sample]] = []
        self._taken = 0
        if not block:
            self._beginning = self._epoch, self._file, self._position, self._count

    def _progress(self, file: int, position: Position) -> float:
        """Return the number of passes up to a position."""
        inside = 0.0
        if file < len(self._order) and (length := self._lengths[self._order[file]]):
            inside = min(1.0, position[0] / length)
        # Every file has the same weight: some are measured in bytes, others in rows.
        return self._epoch + (file + inside) / len(self._order)

    def _read_block(self) -> None:
        """Read and shuffle the next block, which ends with the epoch at the latest."""
        self._start_block([])
        block = list(islice(self._records, self._data.shuffle_buffer))
        if not block:
            self.begin(self._epoch + 1)
            block = list(islice(self._records, self._data.shuffle_buffer))
        if not block:
            problem = f"no training data in {self._path} ({self._setting}): it holds no document"
            raise DataError(problem + self._remarks())
        # Ranks that see another end of a growing file would go on with other samples than the rest.
        if self._file < len(self._order):
            self._source.check(self._order[self._file])
        if self._data.shuffle:
            epoch, file, (offset, _), _ = self._beginning
            random.Random(f"{self._key}/{epoch}/{file}/{offset}").shuffle(block)
        self._start_block(block)

    def _rest_of_epoch(self) -> Iterator[Record]:
        """Yield the records from the present position on, which moves along."""
        while self._file < len(self._order):
            number = self._order[self._file]
            file, features = self._source.files[number], self._source.split.features
            try:
                for record in read_file(file, features, self._bad.findings, self._position, streaming=True):
                    # Readers report a bad record and go on with the next.
                    self._count_records(self._bad.check() + (not isinstance(record.value, Document)))
                    self._position = record.end
                    yield record
            except OSError as error:  # of a parquet file's reader without the file's name
                raise DataError(f"{error.filename or file} cannot be read: {error.strerror or error}") from error
            self._count_records(self._bad.check())
            self._source.check(number)
            self._file, self._position = self._file + 1, BEGINNING
        if self._count and (problem := self._source.split.count_problem(self._count)):
            # Not an error: the first pass is over. Shards that are missing by their names are reported at the start.
            self._bad.findings.remark(problem, "")

    def _count_records(self, number: int) -> None:
        if self._count is not None:
            self._count += number

    def _remarks(self) -> str:
        return "".join(f"; {line}" for line in self._bad.findings.lines())

    def _encode(self, record: Record) -> list[list[Sample]]:
        """Return the units of a record; none if it is left out, or bad."""
        findings, value, samples = self._bad.findings, record.value, []
        columns = self._data.columns or None
        with findings.collecting():
            document = value if isinstance(value, Document) else parse_record(value, record.source, columns, findings)
            if document.label is not None and not self._encoder.classifies:
                raise DataError(
                    f"{record.source}: a completion with 'label' takes its counterpart from other records, which streams do not "
                    "have: set data.streaming: false"
                )
            samples = self._encoder.encode(document)
        self._bad.check(single=True)
        for sample in samples:
            if isinstance(sources := sample.images, ImageSources) and (processor := self._image_processor) is not None:
                sample.images = processor.deferred(sources)
        return [samples] if samples and samples[0].pair is not None else [[sample] for sample in samples]


class StreamedBatches:
    """Endless global batches of streams, of each source its share (:class:`SourceTurns`).

    Attributes:
        shares: share of each source in the batches.
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
        files: Sequence[SourceFiles] | None = None,
    ) -> None:
        """
        Args:
            encoder: makes the encoder of the sources, with their findings.
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
        encode = encoder(self._findings)
        files = [SourceFiles(source) for source in sources] if files is None else files
        self._streams = [
            SampleStream(source, f"{seed}/source {number}", self._bad, encode, image_processor, source_files)
            for number, (source, source_files) in enumerate(zip(sources, files, strict=True))
        ]
        self.shares = self._turns.shares
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
    def progress(self) -> Progress:
        """Return the position and what it depends on, and the figures up to it."""
        state = {
            "streams": [stream.state_dict() for stream in self._streams],
            "turns": self._turns.counts[:],
            "bad": self._bad.count,
            **self._settings,
            "sources": self._inputs,
        }
        passes = [stream.epochs for stream in self._streams]
        # The mean number of passes, by the sources' shares.
        mean = sum(share * epochs for share, epochs in zip(self.shares, passes, strict=True))
        return Progress(state, mean, passes, self._bad.count, self._findings.lines())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; :attr:`changes` describes differences of the data, if these are allowed."""
        if "streams" not in state:
            raise DataError(
                "cannot resume the data order: the checkpoint is of a run with data.streaming: false; set that, or begin a new "
                "run"
            )
        check_settings(state, self._settings)
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
                stream.begin(position["epoch"] + 1)
            else:
                stream.load_state_dict(position)
        self._turns.counts = list(state["turns"])
        # After the blocks: reading them again has counted their bad records again.
        self._bad.count = state["bad"]


class StreamedBatch(NamedTuple):
    """A global batch, a digest of its tokens and weights, and the progress of its stream after it."""

    samples: list[Sample]
    digest: int
    progress: Progress


class PrefetchedBatches:
    """Batches of a stream that a thread reads and tokenises in advance, in the stream's order.

    A thread, since the tokenizer and the step's computations run without the interpreter's lock, and what the thread holds it
    for would otherwise be done between the steps. An error is raised in place of the batch that it prevents, so that all ranks
    raise it in the same step.

    Attributes:
        progress: that after the last batch that was taken.
        changes, shares: of :class:`StreamedBatches`.
    """

    def __init__(self, stream: StreamedBatches) -> None:
        self._stream = stream
        self.shares, self.changes, self.progress = stream.shares, "", stream.progress
        self._thread: BackgroundThread | None = None
        self._results: queue.SimpleQueue[StreamedBatch | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(PREFETCHED)
        self._closed = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``, before the first batch is taken."""
        assert self._thread is None, "a stream that is read ahead cannot be moved"
        self._stream.load_state_dict(state)
        self.changes, self.progress = self._stream.changes, self._stream.progress

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
        self.progress = result.progress
        self._room.release()
        return result

    def _read(self) -> None:
        while self._room.acquire() and not self._closed:
            try:
                samples = next(self._stream)
                state = xxhash.xxh3_64()
                for sample in samples:
                    for values in (sample.input_ids, sample.target_ids, sample.weights):
                        state.update(values.numpy().tobytes())
                self._results.put(StreamedBatch(samples, state.intdigest(), self._stream.progress))
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


def file_identity(path: Path) -> str:
    """Return a digest of name, size and both ends of a file; of a folder that datasets saved, of those in it."""
    state = xxhash.xxh3_128()
    for file in [entry for entry in sorted(path.rglob("*")) if entry.is_file()] if path.is_dir() else [path]:
        size = file.stat().st_size
        state.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            state.update(stream.read(EDGE))
            stream.seek(max(0, size - EDGE))
            state.update(stream.read(EDGE))
    return state.hexdigest()
