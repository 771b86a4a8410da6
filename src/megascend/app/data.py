"""Training text from disk to global batches: JSONL with ``messages`` or ``text``, plain text files, or a folder.

Reading, turning text into samples (:mod:`megascend.app.tokenize`) and the order of samples are kept apart. All of it
is deterministic, and every rank does all of it: ranks then take their share with ``backend.shard``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import xxhash

from megascend.errors import DataError

if TYPE_CHECKING:
    from megascend.batch.sample import Sample

JSONL_SUFFIXES = (".jsonl",)
TEXT_SUFFIXES = (".txt", ".md", ".rst")

T = TypeVar("T")


@dataclass(frozen=True)
class Document:
    """One conversation or one text, and where it stands.

    Attributes:
        source: ``file:line`` for JSONL, the file for plain text; every error about the document begins with it.
        messages: ``{"role": ..., "content": ...}`` of a conversation, or None.
        text: plain text, or None.
    """

    source: str
    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None


def read_documents(path: str | Path) -> list[Document]:
    """All documents of a JSONL file, a text file, or a folder of both (searched recursively, in name order).

    Raises:
        DataError: the path is missing or of an unknown kind, a line is malformed, or there is no document in it.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in JSONL_SUFFIXES + TEXT_SUFFIXES)
    elif path.is_file():
        files = [path]
    else:
        raise DataError(f"no training data at {path.resolve()} (data.path): neither a file nor a folder")
    documents = [document for file in files for document in _read_file(file)]
    if not documents:
        known = ", ".join(JSONL_SUFFIXES + TEXT_SUFFIXES)
        raise DataError(
            f"no training data in {path} (data.path): {len(files)} files ending in {known}, no document in them"
        )
    return documents


def _read_file(path: Path) -> list[Document]:
    if path.suffix not in JSONL_SUFFIXES + TEXT_SUFFIXES:
        known = ", ".join(JSONL_SUFFIXES + TEXT_SUFFIXES)
        raise DataError(f"{path}: files ending in {path.suffix!r} are not read (data.path); known: {known}")
    try:
        content = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}: {error.reason})") from None
    if path.suffix in TEXT_SUFFIXES:
        return [Document(str(path), text=content)] if content.strip() else []
    # Not splitlines(): JSON strings may hold U+2028 and others that Python takes for line ends.
    lines = enumerate(content.split("\n"), start=1)
    return [parse_line(line, f"{path}:{number}") for number, line in lines if line.strip()]


def parse_line(line: str, source: str) -> Document:
    """One JSONL line as a document.

    Raises:
        DataError: it is not a JSON object with ``messages`` or ``text`` of the right form.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{source}: not valid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise DataError(f"{source}: expected a JSON object with 'messages' or 'text', found {type(record).__name__}")
    if ("messages" in record) == ("text" in record):
        found = ", ".join(sorted(map(str, record))) or "nothing"
        raise DataError(f"{source}: expected exactly one of the keys 'messages' and 'text', found: {found}")
    if "text" in record:
        text = record["text"]
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{source}: 'text' must be a string that is not empty, found {text!r:.60}")
        return Document(source, text=text)
    return Document(source, messages=_parse_messages(record["messages"], source))


def _parse_messages(messages: Any, source: str) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{source}: 'messages' must be a list that is not empty, found {messages!r:.60}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DataError(
                f"{source}: messages[{index}] must be an object with 'role' and 'content', got {message!r:.60}"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise DataError(
                    f"{source}: messages[{index}] must have a string {key!r}, found {message.get(key)!r:.60}"
                )
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


class Batches(Generic[T]):
    """Global batches without end: epoch after epoch over ``samples``, each epoch in an order of its own.

    The order follows from ``seed`` and the epoch alone, so that every rank has the same, and so that a run resumed
    with :meth:`load_state_dict` goes on with the batch it would have seen. A batch may span two epochs: no sample is
    dropped, and every batch has the same size.
    """

    def __init__(
        self, samples: Sequence[T], global_batch_size: int, seed: int, shuffle: bool, fingerprint: str = ""
    ) -> None:
        """
        Args:
            fingerprint: tells these samples from others, so that a position is not taken up in other data.

        Raises:
            DataError: there are no samples.
        """
        if not samples:
            raise DataError("no training samples: the data holds nothing to train on (data.path)")
        self._samples = samples
        self._size = global_batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        batch = []
        while len(batch) < self._size:
            if self._position == len(self._samples):
                self._start_epoch(self._epoch + 1)
            batch.append(self._samples[self._order[self._position]])
            self._position += 1
        return batch

    @property
    def epochs(self) -> float:
        """How often the data has been gone through."""
        return self._epoch + self._position / len(self._samples)

    def state_dict(self) -> dict[str, Any]:
        """Where the iterator stands; JSON."""
        return {"epoch": self._epoch, "position": self._position, **self._kind()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state`` was taken.

        Raises:
            DataError: it was taken with another seed or other data, so the order would not be the same.
        """
        for key, value in self._kind().items():
            if state[key] != value:
                raise DataError(
                    f"cannot resume the data order: {key} was {state[key]} when it was saved and is {value} now"
                )
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _kind(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "samples": len(self._samples),
            "fingerprint": self._fingerprint,
        }

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position, self._order = epoch, 0, self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._samples)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def batches(
    samples: Sequence[T], global_batch_size: int, seed: int, shuffle: bool, fingerprint: str = ""
) -> Batches[T]:
    """An infinite iterator over global batches of ``samples``; see :class:`Batches`."""
    return Batches(samples, global_batch_size, seed, shuffle, fingerprint)


def fingerprint_of(samples: Sequence[Sample]) -> str:
    """xxh3 digest over tokens, targets and weights of all samples, hexadecimal."""
    state = xxhash.xxh3_64()
    for sample in samples:
        for values in (sample.input_ids, sample.target_ids, sample.weights):
            state.update(values.numpy().tobytes())
    return state.hexdigest()
