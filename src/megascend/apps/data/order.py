"""Order of the samples: global batches, epoch after epoch, of one source or of several that are mixed by weights."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np
import xxhash

from megascend.errors import DataError

if TYPE_CHECKING:
    from megascend.training.batch.sample import Sample

T = TypeVar("T")
NO_RESUME = "cannot resume the data order"


@dataclass(frozen=True)
class Progress:
    """Position of a run in its data, after the last batch, and the figures up to it.

    Attributes:
        state: the position and what it depends on, as JSON.
        epochs, source_epochs: passes over the data, and over each source, with the fraction of the present one.
        bad_records: number of records that were skipped because they cannot be trained on.
        remarks: what was left out, cut or converted since the run or its resumption began.
    """

    state: dict[str, Any]
    epochs: float
    source_epochs: list[float]
    bad_records: int = 0
    remarks: list[str] = field(default_factory=list)


class SourceTurns:
    """Endless choice among sources, each with its share of the draws.

    A source is eligible for draw n (from 0) if it has been drawn fewer than share x (n + 1) times; of the eligible ones the one
    with the smallest (draws + 1) / share is drawn, of equals the first. After any number of draws n, each source has been drawn
    share x n times, rounded up or down: scheduling by earliest deadline is P-fair (Baruah et al. 1996, Algorithmica 15(6)).

    Attributes:
        shares, counts: share of each source in all draws, and its draws so far.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Take the weights of the sources, above 0; shares are these divided by their sum."""
        # Integers of decimals: 0.1 is a tenth, and rounded shares would drift over millions of draws.
        exact = [Fraction(str(weight)) for weight in weights]
        denominator = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * denominator) for weight in exact]
        self._total = sum(self._weights)
        # (draws + 1) / share times a common factor, in integers.
        multiple = math.lcm(*self._weights)
        self._intervals = [multiple // weight for weight in self._weights]
        self.shares = [weight / self._total for weight in self._weights]
        self.counts = [0] * len(weights)

    def __next__(self) -> int:
        counts, weights = self.counts, self._weights
        draws = sum(counts) + 1
        eligible = [number for number, count in enumerate(counts) if count * self._total < weights[number] * draws]
        source = min(eligible, key=lambda number: (counts[number] + 1) * self._intervals[number])
        counts[source] += 1
        return source


class SampleOrder(Generic[T]):
    """Endless samples of one source: epoch after epoch, each in an order that follows from a key and the epoch alone."""

    def __init__(self, samples: Sequence[T], key: str, shuffle: bool) -> None:
        self.samples, self._key, self._shuffle = samples, key, shuffle
        self.start(0, 0)

    def __next__(self) -> T:
        if self.position == len(self.samples):
            self.start(self.epoch + 1, 0)
        sample = self.samples[self._order[self.position]]
        self.position += 1
        return sample

    def start(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self._order = list(range(len(self.samples)))
        if self._shuffle:
            # A string seed: seed and epoch stay distinct, and Python hashes it by SHA-512, equal in every process.
            random.Random(f"{self._key}/{epoch}").shuffle(self._order)


class Batches(Generic[T]):
    """Endless global batches: epoch after epoch over ``samples``, each epoch in its own order.

    The order follows from ``seed`` and the epoch alone, so that every rank has the same, and so that a run resumed
    with :meth:`load_state_dict` continues with the batch it would have seen. A batch may span two epochs: no sample is
    dropped, and every batch has the same size. An epoch is as many samples as there are; of several sources, those with more
    than their part of the samples begin anew before it ends.

    Attributes:
        sizes: number of samples of each source.
        shares: share of each source in the batches.
        changes: how the samples differ from a checkpoint's, where a run may continue with them.
    """

    def __init__(
        self,
        samples: Sequence[T],
        global_batch_size: int,
        seed: int,
        shuffle: bool,
        fingerprint: str = "",
        *,
        mixture: Sequence[tuple[Sequence[T], float | None]] = (),
        sources: Mapping[str, str] | None = None,
        on_changed: Literal["error", "continue"] | None = None,
    ) -> None:
        """
        Args:
            fingerprint: identifies the samples, so that a position is not resumed in other data.
            mixture: samples of each source, together ``samples``, with its weight (:class:`SourceTurns`), or None for their
                number; empty: one source.
            sources: inputs of the samples (files, settings, versions), to explain a change.
            on_changed: ``continue``: resume although the samples changed; None: not configurable, and the sources must be equal,
                too.
        """
        if not samples:
            raise DataError("no training samples: the data holds nothing to train on (data.path)")
        self._size, self._fingerprint, self._on_changed = global_batch_size, fingerprint, on_changed
        self._sources = dict(sources or {})
        weights = [weight for _, weight in mixture] or None
        self._settings = {"seed": seed, "shuffle": shuffle, "weights": weights}
        parts = [part for part, _ in mixture] or [samples]
        self._turns = SourceTurns([weight or len(part) for part, weight in mixture] or [1])
        # Sources of equal length get different orders; a single one has the order of runs before there could be several.
        self._orders = [
            SampleOrder(part, f"{seed}/source {number}" if mixture else f"{seed}", shuffle)
            for number, part in enumerate(parts)
        ]
        self._count = len(samples)
        self.sizes, self.shares = [len(part) for part in parts], self._turns.shares
        self._position = self._epoch = 0
        self.changes = ""

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        batch = [next(self._orders[next(self._turns)]) for _ in range(self._size)]
        # A full epoch is named as such until the next one begins.
        epochs, rest = divmod(self._position + len(batch) - 1, self._count)
        self._epoch, self._position = self._epoch + epochs, rest + 1
        return batch

    def close(self) -> None:
        """Do nothing: nothing is read ahead."""

    @property
    def progress(self) -> Progress:
        """Return the position, and the figures up to it."""
        source_epochs = [order.epoch + order.position / len(order.samples) for order in self._orders]
        return Progress(self.state_dict(), self._epoch + self._position / self._count, source_epochs)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the fingerprints that it depends on, as JSON."""
        state = self._settings | self._samples | {"epoch": self._epoch, "position": self._position}
        if self._settings["weights"] is None:
            del state["weights"]
        else:
            state["mixture"] = [{"epoch": order.epoch, "position": order.position} for order in self._orders]
            state["turns"] = self._turns.counts[:]
        return state | {"sources": self._sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; :attr:`changes` describes differences of the samples, if these are allowed."""
        if "streams" in state:
            raise DataError(
                "cannot resume the data order: the checkpoint is of a run with data.streaming: true; set that, or begin a new run"
            )
        check_settings(state, self._settings)
        epoch, position = state["epoch"], state["position"]
        # Checkpoints of earlier versions have no sources.
        saved = state.get("sources") or {}
        begins = state.get("samples") != self._samples["samples"]
        if begins or state.get("fingerprint") != self._fingerprint:
            report = changed_samples(state, self._samples, saved, self._sources)
            if self._on_changed != "continue":
                raise DataError(f"{NO_RESUME}: {report}{self._advice(saved)}")
            if begins:
                # A position has no meaning in other samples; an epoch that had begun counts as done.
                epoch, position = epoch + (position > 0), 0
                report += "; a new epoch begins"
            self.changes = report
        elif self._on_changed is None:
            changed = [name for name, value in self._sources.items() if saved.get(name, value) != value]
            if changed:
                causes = ", ".join(changed)
                raise DataError(f"{NO_RESUME}: the samples changed and the data did not, by: {causes}")
        self._epoch, self._position = epoch, position
        parts = state.get("mixture") or [{"epoch": epoch, "position": position}]
        for order, part in zip(self._orders, parts, strict=True):
            order.start(part["epoch"] + (begins and part["position"] > 0), 0 if begins else part["position"])
        self._turns.counts = (
            [0] * len(parts) if begins else list(state.get("turns") or [epoch * self._count + position])
        )

    def _advice(self, saved: Mapping[str, str]) -> str:
        """Return a hint how to resume although samples have changed."""
        if self._on_changed is None:
            return ""
        day = "date in the chat template"
        same_day = f"; template_date: {saved[day]} is that of the checkpoint" if day in saved else ""
        return (
            ". Bring back what the run began with, or set data.on_changed: continue to train on with the samples as they are now"
            f"{same_day if self._sources.get(day) != saved.get(day) else ''}"
        )

    @property
    def _samples(self) -> dict[str, Any]:
        """Return what must be equal for a position to be of the same samples."""
        return {
            "samples": self.sizes if self._settings["weights"] else self._count,
            "fingerprint": self._fingerprint,
        }


def check_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise DataError if a setting that decides the order is another than in a checkpoint."""
    for key, value in now.items():
        if saved.get(key) != value:
            name = f"{key} of data.sources" if key == "weights" else key
            raise DataError(f"{NO_RESUME}: {name} was {saved.get(key)} when it was saved and is {value} now")


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
        label = np.int64(sample.label) if isinstance(sample.label, int) else sample.label.numpy()
        state.update(label.tobytes())
    for name in sorted(sample.extra):
        state.update(sample.extra[name].numpy().tobytes())
    if sample.candidates is not None:
        for values in (sample.candidates.ids, sample.candidates.logprobs):
            state.update(values.numpy().tobytes())
