"""Parts of samples: what is held out for validation, and what is learned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import overload

import numpy as np

from megascend.batch.sample import Sample
from megascend.data.store import SampleStore
from megascend.errors import DataError


class Part(Sequence[Sample]):
    """Some samples of a store, in its order.

    Attributes:
        fingerprint: tells them from others.
        sources: what they were made of, see :class:`SampleStore`.
    """

    def __init__(self, store: SampleStore, chosen: np.ndarray, fingerprint: str) -> None:
        """
        Args:
            chosen: bool [samples of the store].
        """
        self._store, self._indices = store, np.flatnonzero(chosen)
        self.fingerprint = fingerprint
        self.has_pairs = store.has_pairs
        self.sources = store.sources

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [samples]."""
        return self._store.lengths[self._indices]

    @property
    def supervised(self) -> np.ndarray:
        """How many tokens of each sample have a weight in the loss, int64 [samples]."""
        return self._store.supervised[self._indices]

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._store[int(number)] for number in self._indices[index]]
        return self._store[int(self._indices[index])]


def whole(store: SampleStore) -> Part:
    """All samples of a store."""
    return Part(store, np.ones(len(store), dtype=bool), store.fingerprint)


def hold_out(store: SampleStore, fraction: float, seed: int) -> tuple[Part, Part]:
    """Samples to learn, and those of the documents that are held out: at least one, drawn by the seed.

    Raises:
        DataError: nothing would be left to learn.
    """
    documents = np.unique(store.documents)
    count = max(1, round(fraction * len(documents)))
    if count >= len(documents):
        raise DataError(
            f"validation.fraction: {fraction:g} of {len(documents)} document{'s' if len(documents) != 1 else ''} leaves nothing "
            "to learn; set validation.path, or add data"
        )
    drawn = random.Random(f"{seed}/validation").sample(documents.tolist(), count)
    held = np.isin(store.documents, drawn)
    name = f"{store.fingerprint} without {count} documents by seed {seed}"
    return Part(store, ~held, name), Part(store, held, f"{store.fingerprint}, {count} documents by seed {seed}")
