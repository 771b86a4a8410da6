"""Order of the samples: global batches, epoch after epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import xxhash

from megascend.errors import DataError

if TYPE_CHECKING:
    from megascend.batch.sample import Sample

T = TypeVar("T")


class Batches(Generic[T]):
    """Endless global batches: epoch after epoch over ``samples``, each epoch in its own order.

    The order follows from ``seed`` and the epoch alone, so that every rank has the same, and so that a run resumed
    with :meth:`load_state_dict` continues with the batch it would have seen. A batch may span two epochs: no sample is
    dropped, and every batch has the same size.
    """

    def __init__(
        self,
        samples: Sequence[T],
        global_batch_size: int,
        seed: int,
        shuffle: bool,
        fingerprint: str = "",
        *,
        sources: Mapping[str, str] | None = None,
        on_changed: Literal["error", "continue"] | None = None,
    ) -> None:
        """
        Args:
            fingerprint: identifies the samples, so that a position is not resumed in other data.
            sources: inputs of the samples (files, settings, versions), to explain a change.
            on_changed: ``continue``: resume although the samples changed; None: not configurable, and the sources must be equal,
                too.
        """
        if not samples:
            raise DataError("no training samples: the data holds nothing to train on (data.path)")
        self._samples = samples
        self._size = global_batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint
        self._sources = dict(sources or {})
        self._on_changed = on_changed
        self.changes = ""
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
        """Return the number of passes over the data, with the fraction of the present one."""
        return self._epoch + self._position / len(self._samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it depends on, as JSON."""
        return {"epoch": self._epoch, "position": self._position, **self._kind(), "sources": self._sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; :attr:`changes` says how the samples differ, where that is allowed."""
        changed = [key for key, value in self._kind().items() if state[key] != value]
        epoch, position = state["epoch"], state["position"]
        for key in changed:
            if key in ("seed", "shuffle"):
                raise DataError(
                    f"cannot resume the data order: {key} was {state[key]} when it was saved and is {self._kind()[key]} now"
                )
        # Checkpoints of earlier versions have no sources.
        saved = state.get("sources") or {}
        sources = [name for name, value in self._sources.items() if saved.get(name, value) != value]
        if sources and not changed and self._on_changed is None:
            raise DataError(
                f"cannot resume the data order: the samples changed and the data did not, by: {', '.join(sources)}"
            )
        if changed:
            report = changed_samples(state, self._kind(), state.get("sources") or {}, self._sources)
            if self._on_changed != "continue":
                raise DataError(f"cannot resume the data order: {report}{self._advice(state)}")
            if "samples" in changed:
                # A position has no meaning in other samples; an epoch that had begun counts as done.
                epoch, position = epoch + (position > 0), 0
                report += "; a new epoch begins"
            self.changes = report
        self._start_epoch(epoch)
        self._position = position

    def _advice(self, state: dict[str, Any]) -> str:
        """Return a hint how to resume although samples have changed."""
        if self._on_changed is None:
            return ""
        day, saved = "date in the chat template", state.get("sources") or {}
        same_day = f"; template_date: {saved[day]} is that of the checkpoint" if day in saved else ""
        return (
            ". Bring back what the run began with, or set data.on_changed: continue to train on with the samples as they are now"
            f"{same_day if self._sources.get(day) != saved.get(day) else ''}"
        )

    def _kind(self) -> dict[str, Any]:
        """Return what must be equal for a position to mean the same."""
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
            # A string seed: seed and epoch stay distinct, and Python hashes it by SHA-512, equal in every process.
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def changed_samples(
    before: Mapping[str, Any], now: Mapping[str, Any], saved: Mapping[str, str], sources: Mapping[str, str]
) -> str:
    """Describe how samples differ from a checkpoint's: in their data, or in another input.

    Args:
        before, now: number of ``samples`` and ``fingerprint``.
        saved, sources: their sources at the time of the save and now; empty if unknown.
    """
    difference = " and ".join(
        f"{key} was {before[key]} when it was saved and is {now[key]} now"
        for key in ("samples", "fingerprint")
        if before[key] != now[key]
    )
    names = [name for name in dict.fromkeys([*saved, *sources]) if saved.get(name) != sources.get(name)]
    if not saved or not sources or not names:
        return difference
    causes = ", ".join(
        f"{name} ({saved.get(name, 'none')} -> {sources.get(name, 'none')})" if name.startswith("date") else name
        for name in names
    )
    if any(name.startswith("data (") for name in names):
        return f"{difference}. The data changed, by: {causes}"
    return f"{difference}. The samples changed and the data did not, by: {causes}"


batches = Batches
"""The class under the name that programs call: ``for batch in batches(samples, 8, seed=0, shuffle=True)``."""


def fingerprint_of(samples: Sequence[Sample]) -> str:
    """Return the xxh3 digest of tokens, targets, weights and candidates of all samples, hexadecimal."""
    state = xxhash.xxh3_64()
    for sample in samples:
        add_to_fingerprint(state, sample)
    return state.hexdigest()


def add_to_fingerprint(state: xxhash.xxh3_64, sample: Sample) -> None:
    """Add a sample to the digest of all."""
    for values in (sample.input_ids, sample.target_ids, sample.weights, *sample.image_fields().values()):
        state.update(values.numpy().tobytes())
    if sample.label is not None:
        # Tokens do not show it.
        state.update(sample.label.to_bytes(8, "little", signed=True))
    for name in sorted(sample.extra):
        state.update(sample.extra[name].numpy().tobytes())
    if sample.candidates is not None:
        for values in (sample.candidates.ids, sample.candidates.logprobs):
            state.update(values.numpy().tobytes())
