"""Samples in memory-mapped files, shared by all ranks of a machine; several stores as one; training and held-out parts."""

from __future__ import annotations

import json
import math
import os
import random
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
import xxhash

from megascend.apps.data.findings import Findings
from megascend.apps.data.images import ImageProcessor, encoded, file_state, image_digest
from megascend.apps.data.order import add_to_fingerprint
from megascend.errors import DataError
from megascend.training.batch.candidates import Candidates
from megascend.training.batch.image_sources import ImageSource, ImageSources
from megascend.training.batch.images import DeferredImages, SampleImages
from megascend.training.batch.loss import MARGIN
from megascend.training.batch.sample import Sample

TOKENS, WEIGHTS, INDEX, ABOUT = "tokens.int32", "weights.float32", "index.int64", "about.json"
IMAGES, IMAGE_INDEX = "images.bin", "images.int64"
CANDIDATE_IDS, CANDIDATE_LOGPROBS = "candidates.int32", "candidates.float32"
LABELS = "labels.float32"
"""Label of each sample of a classifier: its id, or a number for each label."""
PATH, CONTENT = 0, 1
"""Kinds of entries of an image: its path, or the image itself."""
NO_PAIR = -1
REJECTED, CHOSEN = 0, 1
UNDESIRABLE, DESIRABLE, MISMATCHED = 2, 3, 4
"""Kinds of the two samples of a labelled document: its own with the label 0 or 1, and the one with another's completion."""
BLOCK = 1024
"""Samples that are read at once in passes over all of them."""


class Samples(Sequence[Sample]):
    """Samples that are read on access, with what is known of all of them without reading.

    Attributes:
        fingerprint: digest that distinguishes these samples from others.
        sources: inputs of the samples: name for messages, to a digest or the value.
        scored: the samples are for a scalar head (:meth:`Sample.scored`).
        has_pairs, has_margins, has_labels, has_candidates: some samples are of preference pairs, have a margin, are of labelled
            documents, have a teacher's candidates.
    """

    fingerprint: str
    sources: dict[str, str]
    scored: bool
    has_pairs: bool
    has_margins: bool
    has_labels: bool
    has_candidates: bool

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._sample(number) for number in range(*index.indices(len(self)))]
        return self._sample(index)

    @abstractmethod
    def _sample(self, index: int) -> Sample:
        """Read one sample."""

    def _take_kind(self, store: Samples) -> None:
        """Set what is known of all samples to that of ``store``."""
        self.has_pairs, self.has_labels, self.has_candidates = store.has_pairs, store.has_labels, store.has_candidates
        self.has_margins, self.scored = store.has_margins, store.scored


class SampleStore(Samples):
    """Samples in a directory of :func:`write_store`, each read on access.

    Args:
        processor: decodes images on access; None: the model takes none.

    Attributes:
        path: the directory.
        fingerprint: digest of all samples, see :func:`megascend.apps.data.order.fingerprint_of`.
        remarks: remarks of the tokenisation.
        kinds: number of documents of each kind.
        ends: tokens that end an answer or a text, and are learned.
        partial: what only some samples have, of pairs, margins, labels and candidates.
        classes: float32 [samples, 1], ids of a classifier's labels, or [samples, labels], a number for each; empty without.
    """

    def __init__(self, path: Path, processor: ImageProcessor | None = None) -> None:
        self.path = path
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        self.fingerprint = about["fingerprint"]
        self.remarks: list[str] = about["remarks"]
        self.kinds: dict[str, int] = about["kinds"]
        self.ends: list[int] = about.get("ends", [])  # none in folders of earlier versions (data.prepared)
        self.sources = about["sources"]
        self.scored = about["scored"]
        # One row per sample: start of its tokens, their number, number of the document, NO_PAIR or a kind of those
        # above, first image, number of images, first number in the candidates' files, candidates of a target, the
        # bits of the margin in float64, which is NaN without one, a digest of all that was written of the sample, and one of
        # that without a classifier's label.
        self._index = np.fromfile(path / INDEX, dtype=np.int64).reshape(-1, 11)
        self._margins = np.ascontiguousarray(self._index[:, 8]).view(np.float64)
        # One row per image: PATH or CONTENT, start and length in the file, digest of the image, its size and time of change.
        self._image_index = np.fromfile(path / IMAGE_INDEX, dtype=np.int64).reshape(-1, 6)
        self._image_bytes = _mapped(path / IMAGES, np.uint8)
        self._processor = processor
        self._tokens = _mapped(path / TOKENS, np.int32)
        self._weights = _mapped(path / WEIGHTS, np.float32)
        self._candidate_ids = _mapped(path / CANDIDATE_IDS, np.int32)
        self._candidate_logprobs = _mapped(path / CANDIDATE_LOGPROBS, np.float32)
        self._has_ids: bool = about["label_ids"]
        self.classes = _mapped(path / LABELS, np.float32).reshape(-1, max(1, about["label_width"]))
        kind = self._index[:, 3]
        features = {
            "pairs": np.isin(kind, (REJECTED, CHOSEN)),
            "margins": ~np.isnan(self._margins),
            "labels": kind >= UNDESIRABLE,
            "candidates": self._index[:, 7] > 0,
        }
        self.has_pairs, self.has_margins, self.has_labels, self.has_candidates = (
            bool(f.any()) for f in features.values()
        )
        self.partial = tuple(name for name, present in features.items() if present.any() and not present.all())

    def __len__(self) -> int:
        return len(self._index)

    @property
    def _unpredicted(self) -> int:
        """Return the number of tokens at the beginning of a sample that are not targets."""
        return 0 if self.scored else 1

    def _sample(self, index: int) -> Sample:
        row = self._index[index].tolist()
        start, count, document, side, first_image, image_count, slot, width, margin_bits, digest, _ = row
        stored, slots = slice(start, start + count), slice(slot, slot + (count - self._unpredicted) * width)
        arrays = (
            self._tokens[stored],
            self._weights[stored],
            self._candidate_ids[slots],
            self._candidate_logprobs[slots],
            self._image_index[first_image : first_image + image_count, 3],
            self.classes[index] if len(self.classes) else self.classes,
        )
        # A copy or a disk may have changed bytes and kept the size: zeros, for example, are tokens as others are.
        if _sample_digest(arrays, side, margin_bits) != digest:
            raise DataError(
                f"sample {index} in {self.path} is not what was written there: a file is damaged; remove the folder, and prepare "
                "the data again"
            )
        # Copies: the files are mapped for reading only, and tensors can be written to.
        tokens = torch.from_numpy(arrays[0].astype(np.int64))
        weights = torch.from_numpy(np.array(arrays[1]))
        # Every rank draws the global batch, and decodes its own share of it.
        numbers = range(first_image, first_image + image_count)
        images = DeferredImages(lambda: self._images(numbers)) if image_count else None
        sample = Sample.scored(tokens) if self.scored else Sample.causal(tokens, weights=weights, images=images)
        margin = float(self._margins[index])
        if not math.isnan(margin):
            sample.extra = {MARGIN: torch.full((count,), margin)}
        if width:
            ids, logprobs = arrays[2:4]
            sample.candidates = Candidates(
                np.array(ids).reshape(-1, width),
                np.array(logprobs).reshape(-1, width),
            )
        if len(self.classes):
            sample.label = int(arrays[5][0]) if self._has_ids else torch.from_numpy(np.array(arrays[5]))
        if side != NO_PAIR:
            sample.pair = document
        if side in (REJECTED, CHOSEN):
            sample.chosen = side == CHOSEN
        if side in (UNDESIRABLE, DESIRABLE):
            sample.label = int(side == DESIRABLE)
        return sample

    def _images(self, numbers: Sequence[int]) -> SampleImages:
        assert self._processor is not None, "only a model that takes images has samples with them"
        contents, names = [], []
        for number in numbers:
            kind, start, length, expected, *_ = self._image_index[number].tolist()
            stored = self._image_bytes[start : start + length].tobytes()
            source = ImageSource(path=os.fsdecode(stored)) if kind == PATH else ImageSource(data=stored)
            # Limits apply here too: the file may have changed since the sample was made.
            content = encoded(source, self._processor.limits)
            # Another image may not fit the sample's tokens, and would not be the data that the fingerprint names.
            if image_digest(content) != expected:
                raise DataError(f"image {source.name} has changed since its sample was made; start the run again")
            contents.append(content)
            names.append(source.name)
        return self._processor.images(contents, names)

    def changed_files(self) -> list[list[Any]] | None:
        """Return [path, size, time of change] of all images that are files, if any has changed since the writing; else None."""
        files, changed = [], False
        for kind, start, length, _, size, modified in self._image_index.tolist():
            # By size and time, without reading: every start of a run checks all images of its data.
            if kind == PATH:
                path = os.fsdecode(self._image_bytes[start : start + length].tobytes())
                now = [*file_state(Path(path))]
                changed |= now != [size, modified]
                files.append([path, *now])
        return files if changed else None

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sample, int64 [samples]."""
        return self._index[:, 1] - self._unpredicted

    @property
    def supervised(self) -> np.ndarray:
        """Return the number of tokens with a loss weight, int64 [samples]. Reads all weights, block by block."""
        counts = np.zeros(len(self), dtype=np.int64)
        for first in range(0, len(self), BLOCK):
            rows = self._index[first : first + BLOCK]
            start, end = rows[0, 0], rows[-1, 0] + rows[-1, 1]
            # A first token is never a target: its weight is stored as 0.
            weighted = (self._weights[start:end] > 0).astype(np.int64)
            # Samples are stored back to back, so a block of rows is one contiguous range of weights.
            counts[first : first + BLOCK] = np.add.reduceat(weighted, rows[:, 0] - start)
        return counts

    @property
    def documents(self) -> np.ndarray:
        """Return the number of each sample's document, int64 [samples]."""
        return self._index[:, 2]

    @property
    def digests(self) -> np.ndarray:
        """Return a digest of each sample's content without a classifier's label, int64 [samples]; 0 of one that has another
        document's completion.
        """
        return np.where(self._index[:, 3] == MISMATCHED, 0, self._index[:, 10])

    @property
    def source_numbers(self) -> np.ndarray:
        """Return 0 for each sample, int64 [samples]: a store has one source (:class:`JoinedStores` have several)."""
        return np.zeros(len(self), dtype=np.int64)


def write_store(
    path: Path,
    documents: Iterable[tuple[int, list[Sample]]],
    findings: Findings,
    sources: Mapping[str, str] | None = None,
    *,
    scored: bool = False,
) -> None:
    """Write documents, given as (number, samples), to a new directory, with the remarks of ``findings`` and ``sources``.

    Images that are files stay where they are; others are copied. ``scored``: the samples are for a scalar head.
    """
    path.mkdir()
    state, start, image_count, slots = xxhash.xxh3_64(), 0, 0, 0
    label_width, label_ids = 0, False
    with (
        _ImageWriter(path) as writer,
        (path / TOKENS).open("wb") as tokens,
        (path / WEIGHTS).open("wb") as weights,
        (path / CANDIDATE_IDS).open("wb") as candidate_ids,
        (path / CANDIDATE_LOGPROBS).open("wb") as candidate_logprobs,
        (path / LABELS).open("wb") as labels,
        (path / INDEX).open("wb") as index,
    ):
        for number, samples in documents:
            for sample in samples:
                add_to_fingerprint(state, sample)
                # Inputs and targets overlap in all but one token: one list of ids holds both.
                ids, values = sample.input_ids.tolist(), sample.weights.tolist()
                if not scored:
                    ids, values = [ids[0], *sample.target_ids.tolist()], [0.0, *values]
                token_array, weight_array = np.asarray(ids, dtype=np.int32), np.asarray(values, dtype=np.float32)
                tokens.write(token_array.tobytes())
                weights.write(weight_array.tobytes())
                side = _kind(sample)
                added, identities = 0, ()
                if isinstance(sample.images, ImageSources):
                    added, identities = writer.add(sample.images, state), sample.images.identities
                width, candidates = 0, sample.candidates
                top: list[np.ndarray] = []
                if candidates is not None:
                    width = candidates.ids.shape[1]
                    top = [candidates.ids.numpy(), candidates.logprobs.numpy()]
                    candidate_ids.write(top[0].tobytes())
                    candidate_logprobs.write(top[1].tobytes())
                margin = np.float64(sample.extra[MARGIN][0] if MARGIN in sample.extra else math.nan)
                margin_bits = int(margin.view(np.int64))
                image_digests = np.asarray([identity.digest for identity in identities], dtype=np.int64)
                label = np.zeros(0, dtype=np.float32)
                if sample.pair is None and sample.label is not None:  # others are kinds of a pair
                    label_ids = isinstance(sample.label, int)
                    label = np.asarray([sample.label] if label_ids else sample.label, dtype=np.float32)
                    label_width = len(label)
                    labels.write(label.tobytes())
                content = [token_array, weight_array, *top, image_digests]
                digests = [_sample_digest(arrays, side, margin_bits) for arrays in ([*content, label], content)]
                row = [start, len(ids), number, side, image_count, added, slots, width, margin_bits, *digests]
                index.write(np.asarray(row, dtype=np.int64).tobytes())
                start += len(ids)
                image_count += added
                slots += len(sample) * width
    about: dict[str, Any] = {
        "fingerprint": state.hexdigest(),
        "remarks": findings.lines(),
        "kinds": findings.kinds,
        "ends": sorted(findings.ends),
        "sources": dict(sources or {}),
        "scored": scored,
        "label_width": label_width,
        "label_ids": label_ids,
    }
    # Last: it holds the fingerprint and the remarks of all documents.
    (path / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")


def _sample_digest(arrays: Iterable[np.ndarray], side: int, margin_bits: int) -> int:
    """Return a digest of a sample as stored, as a signed integer of 64 bits."""
    state = xxhash.xxh3_64(f"{side} {margin_bits}".encode())
    for array in arrays:
        state.update(array.tobytes())
    return int.from_bytes(state.digest(), "little", signed=True)


def _kind(sample: Sample) -> int:
    """Return the number under which a store keeps pair, side and label of a sample."""
    if sample.pair is None:
        return NO_PAIR
    if sample.chosen is not None:
        return CHOSEN if sample.chosen else REJECTED
    return MISMATCHED if sample.label is None else DESIRABLE if sample.label else UNDESIRABLE


class _ImageWriter:
    """Writes the images of a store."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._files = path, 0, ExitStack()

    def __enter__(self) -> _ImageWriter:
        self._content = self._files.enter_context((self._path / IMAGES).open("wb"))
        self._index = self._files.enter_context((self._path / IMAGE_INDEX).open("wb"))
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def add(self, sources: ImageSources, state: Any) -> int:
        """Write the images of a sample, add them to the fingerprint ``state``, and return their number."""
        for source, identity in zip(sources.sources, sources.identities, strict=True):
            if source.data is not None:
                kind, stored = CONTENT, source.data
            else:
                # Absolute: the store is in the cache, and the next run may start in another working directory.
                kind, stored = PATH, os.fsencode(str(identity.file))
            # Tokens depend on an image's size only, not on its content.
            state.update(identity.digest.to_bytes(8, "little", signed=True))
            self._content.write(stored)
            row = [kind, self._offset, len(stored), identity.digest, identity.size, identity.modified]
            self._index.write(np.asarray(row, dtype=np.int64).tobytes())
            self._offset += len(stored)
        return len(sources.sources)


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    """Memory-map a file's numbers; return an empty array for an empty file, which cannot be mapped."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)


class JoinedStores(Samples):
    """Samples of several stores of one kind, one after the other, as one store; documents are numbered through."""

    def __init__(self, stores: Sequence[SampleStore]) -> None:
        self._stores = list(stores)
        self._starts = np.cumsum([0, *map(len, stores)])
        counts = [int(store.documents.max()) + 1 for store in stores]
        self._first_documents = np.cumsum([0, *counts])
        digest = xxhash.xxh3_64(" ".join(store.fingerprint for store in stores).encode())
        self.fingerprint = digest.hexdigest()
        self.sources = {name: value for store in stores for name, value in store.sources.items()}
        self._take_kind(self._stores[0])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _sample(self, index: int) -> Sample:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        sample = self._stores[number][index - int(self._starts[number])]
        if sample.pair is not None:
            sample.pair = int(str(sample.pair)) + int(self._first_documents[number])
        return sample

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sample, int64 [samples]."""
        return np.concatenate([store.lengths for store in self._stores])

    @property
    def supervised(self) -> np.ndarray:
        """Return the number of tokens with a loss weight, int64 [samples]."""
        return np.concatenate([store.supervised for store in self._stores])

    @property
    def documents(self) -> np.ndarray:
        """Return the number of each sample's document, int64 [samples]."""
        parts = zip(self._stores, self._first_documents, strict=False)
        return np.concatenate([store.documents + first for store, first in parts])

    @property
    def digests(self) -> np.ndarray:
        """Return a digest of each sample's content, int64 [samples], as :attr:`SampleStore.digests`."""
        return np.concatenate([store.digests for store in self._stores])

    @property
    def classes(self) -> np.ndarray:
        """Return the labels of a classifier, float32 [samples, ...], as :attr:`SampleStore.classes`."""
        return np.concatenate([store.classes for store in self._stores])

    @property
    def source_numbers(self) -> np.ndarray:
        """Return the number of each sample's store, int64 [samples]."""
        return np.repeat(np.arange(len(self._stores)), np.diff(self._starts))


class SampleSubset(Samples):
    """Some samples of a store, in its order.

    Attributes:
        has_sources: True if they are of several sources.
    """

    def __init__(self, store: SampleStore | JoinedStores, chosen: np.ndarray, fingerprint: str) -> None:
        """
        Args:
            chosen: bool [samples of the store], True for the members.
        """
        self._store, self._indices = store, np.flatnonzero(chosen)
        self.fingerprint = fingerprint
        self._take_kind(store)
        self.sources = store.sources
        self.has_sources = isinstance(store, JoinedStores)

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def members(self) -> int:
        """Number of samples of a unit that is drawn: 2 of a preference pair or a labelled document."""
        return 2 if self.has_pairs or self.has_labels else 1

    @property
    def unit(self) -> str:
        """Name of several units, for messages."""
        return "pairs" if self.has_pairs else "labelled completions" if self.has_labels else "samples"

    @property
    def classes(self) -> np.ndarray:
        """Return the labels of a classifier, float32 [samples, ...], as :attr:`SampleStore.classes`."""
        return self._store.classes[self._indices]

    @property
    def source_numbers(self) -> np.ndarray:
        """Return the number of each sample's source, int64 [samples]."""
        return self._store.source_numbers[self._indices]

    def source_samples(self, number: int) -> SampleSubset:
        """Return the samples of one source; with the same fingerprint, as their documents keep their numbers."""
        chosen = np.zeros(len(self._store), dtype=bool)
        chosen[self._indices[self.source_numbers == number]] = True
        return SampleSubset(self._store, chosen, self.fingerprint)

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sample, int64 [samples]."""
        return self._store.lengths[self._indices]

    @property
    def supervised(self) -> np.ndarray:
        """Return the number of tokens with a loss weight, int64 [samples]."""
        return self._store.supervised[self._indices]

    def _sample(self, index: int) -> Sample:
        return self._store[int(self._indices[index])]


def all_samples(store: SampleStore | JoinedStores) -> SampleSubset:
    """Return all samples of a store."""
    return SampleSubset(store, np.ones(len(store), dtype=bool), store.fingerprint)


def document_digests(store: SampleStore | JoinedStores) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the documents and a digest of each one's content, equal for copies, int64 and uint64 [documents]."""
    documents, starts, counts = np.unique(store.documents, return_index=True, return_counts=True)
    # Samples of a document are neighbours; the order of its pieces, or of a pair's sides, counts.
    places = np.arange(len(store)) - np.repeat(starts, counts)
    factors = (2 * places + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return documents, np.add.reduceat(store.digests.astype(np.uint64) * factors, starts)


def hold_out(store: SampleStore | JoinedStores, fraction: float, seed: int) -> tuple[SampleSubset, SampleSubset]:
    """Split a store into training samples and those of held-out documents: at least one document, drawn by the seed.

    Documents of the same content count as one, and are on the same side.
    """
    documents, contents = document_digests(store)
    _, firsts = np.unique(contents, return_index=True)
    distinct = documents[np.sort(firsts)]
    count = max(1, round(fraction * len(distinct)))
    if count >= len(distinct):
        different = "different " if len(distinct) < len(documents) else ""
        raise DataError(
            f"validation.fraction: {fraction:g} of {len(distinct)} {different}document{'s' if len(distinct) != 1 else ''} leaves "
            "nothing to learn; set validation.path, or add data"
        )
    # By document, not by sample: pieces of one text, or the sides of a pair, must not be on both sides.
    members = random.Random(f"{seed}/validation").sample(distinct.tolist(), count)
    held_out = documents[np.isin(contents, contents[np.isin(documents, members)])]
    is_held_out = np.isin(store.documents, held_out)
    # Without copies, the names that earlier versions gave to the same parts.
    parts = (
        f"{count} documents" if len(distinct) == len(documents) else f"{count} of {len(distinct)} different documents"
    )
    return SampleSubset(store, ~is_held_out, f"{store.fingerprint} without {parts} by seed {seed}"), SampleSubset(
        store, is_held_out, f"{store.fingerprint}, {parts} by seed {seed}"
    )
