"""Samples in memory-mapped files, shared by all ranks of a machine; and their split into training and held-out parts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
import xxhash

from megascend.batch.sample import Sample
from megascend.data.findings import Findings
from megascend.data.order import add_to_fingerprint
from megascend.errors import DataError

TOKENS, WEIGHTS, INDEX, ABOUT = "tokens.int32", "weights.float32", "index.int64", "about.json"
NO_PAIR = -1
REJECTED, CHOSEN = 0, 1
BLOCK = 1024
"""Samples that are read at once in passes over all of them."""


class SampleStore(Sequence[Sample]):
    """Samples in a directory of :func:`write_store`, each read on access.

    Attributes:
        fingerprint: digest of all samples, see :func:`megascend.data.order.fingerprint_of`.
        remarks: remarks of the tokenisation.
        sources: inputs of the samples: name for messages, to a digest or the value.
    """

    def __init__(self, path: Path) -> None:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        self.fingerprint: str = about["fingerprint"]
        self.remarks: list[str] = about["remarks"]
        self.sources: dict[str, str] = about["sources"]
        # One row per sample: start of its tokens, their number, number of the document, and NO_PAIR, REJECTED or CHOSEN.
        self._index = np.fromfile(path / INDEX, dtype=np.int64).reshape(-1, 4)
        self._tokens = _mapped(path / TOKENS, np.int32)
        self._weights = _mapped(path / WEIGHTS, np.float32)

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        start, count, document, side = self._index[index].tolist()
        stored = slice(start, start + count)
        # Copies: the files are mapped for reading only, and tensors can be written to.
        tokens = torch.from_numpy(self._tokens[stored].astype(np.int64))
        weights = torch.from_numpy(np.array(self._weights[stored]))
        sample = Sample.causal(tokens, weights=weights)
        if side != NO_PAIR:
            sample.pair, sample.chosen = document, side == CHOSEN
        return sample

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sample, int64 [samples]."""
        return self._index[:, 1] - 1

    @property
    def supervised(self) -> np.ndarray:
        """Return the number of tokens with a loss weight, int64 [samples]. Reads all weights, block by block."""
        counts = np.zeros(len(self), dtype=np.int64)
        for first in range(0, len(self), BLOCK):
            rows = self._index[first : first + BLOCK]
            start, end = rows[0, 0], rows[-1, 0] + rows[-1, 1]
            # The weight of a first token, which is no target, is stored as 0.
            weighted = (self._weights[start:end] > 0).astype(np.int64)
            # Samples are stored back to back, so a block of rows is one contiguous range of weights.
            counts[first : first + BLOCK] = np.add.reduceat(weighted, rows[:, 0] - start)
        return counts

    @property
    def documents(self) -> np.ndarray:
        """Return the number of each sample's document, int64 [samples]."""
        return self._index[:, 2]

    @property
    def has_pairs(self) -> bool:
        """True if there are preference pairs among the samples."""
        return bool((self._index[:, 3] != NO_PAIR).any())

    @property
    def all_pairs(self) -> bool:
        """True if all samples are of preference pairs."""
        return bool((self._index[:, 3] != NO_PAIR).all())


def write_store(
    path: Path,
    documents: Iterable[tuple[int, list[Sample]]],
    findings: Findings,
    sources: Mapping[str, str] | None = None,
) -> None:
    """Write documents, given as (number, samples), to a new directory, with the remarks of ``findings`` and ``sources``."""
    path.mkdir()
    state, start = xxhash.xxh3_64(), 0
    with (
        (path / TOKENS).open("wb") as tokens,
        (path / WEIGHTS).open("wb") as weights,
        (path / INDEX).open("wb") as index,
    ):
        for number, samples in documents:
            for sample in samples:
                add_to_fingerprint(state, sample)
                # Inputs and targets overlap in all but one token: one list of ids holds both.
                ids = [int(sample.input_ids[0]), *sample.target_ids.tolist()]
                tokens.write(np.asarray(ids, dtype=np.int32).tobytes())
                weights.write(np.asarray([0.0, *sample.weights.tolist()], dtype=np.float32).tobytes())
                side = NO_PAIR if sample.pair is None else CHOSEN if sample.chosen else REJECTED
                index.write(np.asarray([start, len(ids), number, side], dtype=np.int64).tobytes())
                start += len(ids)
    about: dict[str, Any] = {
        "fingerprint": state.hexdigest(),
        "remarks": findings.lines(),
        "sources": dict(sources or {}),
    }
    # Last: it holds the fingerprint and the remarks of all documents.
    (path / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    """Memory-map a file's numbers; return an empty array for an empty file, which cannot be mapped."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)


class SampleSubset(Sequence[Sample]):
    """Some samples of a store, in its order.

    Attributes:
        fingerprint: tells them from others.
        sources: files and settings that the samples were made from, see :class:`SampleStore`.
    """

    def __init__(self, store: SampleStore, chosen: np.ndarray, fingerprint: str) -> None:
        """``chosen``: bool [samples of the store]."""
        self._store, self._indices = store, np.flatnonzero(chosen)
        self.fingerprint = fingerprint
        self.has_pairs = store.has_pairs
        self.sources = store.sources

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sample, int64 [samples]."""
        return self._store.lengths[self._indices]

    @property
    def supervised(self) -> np.ndarray:
        """Return the number of tokens with a loss weight, int64 [samples]."""
        return self._store.supervised[self._indices]

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._store[int(number)] for number in self._indices[index]]
        return self._store[int(self._indices[index])]


def all_samples(store: SampleStore) -> SampleSubset:
    """Return all samples of a store."""
    return SampleSubset(store, np.ones(len(store), dtype=bool), store.fingerprint)


def hold_out(store: SampleStore, fraction: float, seed: int) -> tuple[SampleSubset, SampleSubset]:
    """Split a store into training samples and those of held-out documents: at least one document, drawn by the seed."""
    documents = np.unique(store.documents)
    count = max(1, round(fraction * len(documents)))
    if count >= len(documents):
        raise DataError(
            f"validation.fraction: {fraction:g} of {len(documents)} document{'s' if len(documents) != 1 else ''} leaves nothing "
            "to learn; set validation.path, or add data"
        )
    # By document, not by sample: pieces of one text, or the sides of a pair, must not be on both sides.
    held_out = random.Random(f"{seed}/validation").sample(documents.tolist(), count)
    is_held_out = np.isin(store.documents, held_out)
    name = f"{store.fingerprint} without {count} documents by seed {seed}"
    return SampleSubset(store, ~is_held_out, name), SampleSubset(
        store, is_held_out, f"{store.fingerprint}, {count} documents by seed {seed}"
    )
