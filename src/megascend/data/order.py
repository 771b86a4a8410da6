"""The order in which samples come: global batches, epoch after epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import xxhash

from megascend.errors import DataError

if TYPE_CHECKING:
    from megascend.batch.sample import Sample

T = TypeVar("T")


class Batches(Generic[T]):
    """Global batches without end: epoch after epoch over ``samples``, each epoch in an order of its own.

    The order follows from ``seed`` and the epoch alone, so that every rank has the same, and so that a run resumed
    with :meth:`load_state_dict` continues with the batch it would have seen. A batch may span two epochs: no sample is
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
        add_to_fingerprint(state, sample)
    return state.hexdigest()


def add_to_fingerprint(state: xxhash.xxh3_64, sample: Sample) -> None:
    """Add a sample to the digest of all."""
    for values in (sample.input_ids, sample.target_ids, sample.weights):
        state.update(values.numpy().tobytes())
