"""Token samples in memory-mapped Arrow files, shared by all ranks of a machine; training and held-out parts."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow
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

ROWS, ABOUT = "samples.arrow", "about.json"
NO_PAIR = -1
REJECTED, CHOSEN = 0, 1
UNDESIRABLE, DESIRABLE, MISMATCHED = 2, 3, 4
"""Kinds of the two samples of a labelled document: its own with the label 0 or 1, and the one with another's completion."""
IMAGE = pyarrow.struct(
    {
        "path": pyarrow.binary(),
        "content": pyarrow.large_binary(),
        "digest": pyarrow.int64(),
        "size": pyarrow.int64(),
        "modified": pyarrow.int64(),
    }
)
"""An image: its path or, if it is no file, the image itself; digest of the image, its file's size and time of change."""
SCHEMA = pyarrow.schema(
    {
        "length": pyarrow.int64(),
        "supervised": pyarrow.int64(),
        "tokens": pyarrow.list_(pyarrow.int32()),
        "weights": pyarrow.list_(pyarrow.float32()),
        "document": pyarrow.int64(),
        "kind": pyarrow.int8(),
        "margin": pyarrow.float64(),  # NaN: none
        "label": pyarrow.list_(pyarrow.float32()),
        "top_count": pyarrow.int64(),
        "top_ids": pyarrow.list_(pyarrow.int32()),
        "top_logprobs": pyarrow.list_(pyarrow.float32()),
        "images": pyarrow.list_(IMAGE),
        "digest": pyarrow.int64(),
        "content_digest": pyarrow.int64(),
    }
)
"""Columns of a sample. ``supervised``: tokens with a loss weight; ``label``: a classifier's: an id, or a number for each label;
``top_count``: a teacher's candidates for each target; ``digest``: of what a sample is made of again, ``content_digest``: of that
without the label."""
BATCH_BYTES = 2**24
"""Bytes of samples that are written at once."""


class Samples(Sequence[Sample]):
    """Samples that are read on access, with what is known of all of them without reading.

    Attributes:
        path: the directory of the store; of several the first one's.
        fingerprint: digest that distinguishes these samples from others (:func:`megascend.apps.data.order.fingerprint_of`).
        sources: inputs of the samples: name for messages, to a digest or the value.
        scored: the samples are for a scalar head (:meth:`Sample.scored`).
        remarks, kinds, ends: those of :class:`Findings` after the tokenisation.
        has_pairs, has_margins, has_labels, has_candidates: some samples are of preference pairs, have a margin, are of labelled
            documents, have a teacher's candidates; ``partial``: not all of them are.
        has_sources: they are of several sources.
        members: samples of a unit that is drawn: 2 of a preference pair or a labelled document.
        unit: name of several units, for messages.
    """

    def __init__(
        self,
        table: pyarrow.Table,
        about: Mapping[str, Any],
        path: Path = Path(),
        processor: ImageProcessor | None = None,
    ) -> None:
        self.path, self._paths, self._table, self._processor = path, [path], table, processor
        self.fingerprint: str = about["fingerprint"]
        self.remarks: list[str] = about["remarks"]
        self.kinds: dict[str, int] = about["kinds"]
        self.ends: list[int] = about["ends"]
        self.sources: dict[str, str] = about["sources"]
        self.scored: bool = about["scored"]
        self._label_ids: bool = about["label_ids"]
        self._rows, self._source_numbers = np.arange(len(table)), np.zeros(len(table), dtype=np.int64)
        self.has_sources = False
        kind = self._column("kind")
        features = {
            "pairs": np.isin(kind, (REJECTED, CHOSEN)),
            "margins": ~np.isnan(self._column("margin")),
            "labels": kind >= UNDESIRABLE,
            "candidates": self._column("top_count") > 0,
        }
        self.has_pairs, self.has_margins, self.has_labels, self.has_candidates = (
            bool(feature.any()) for feature in features.values()
        )
        self.partial = tuple(name for name, present in features.items() if present.any() and not present.all())
        self.members = 2 if self.has_pairs or self.has_labels else 1
        self.unit = "pairs" if self.has_pairs else "labelled completions" if self.has_labels else "samples"

    @classmethod
    def open(cls, path: Path, processor: ImageProcessor | None = None) -> Samples:
        """Open a directory of :func:`write_store`."""
        try:
            with pyarrow.memory_map(os.fspath(path / ROWS)) as file:
                table = pyarrow.ipc.open_file(file).read_all()
            # Places that a disk or a copy has damaged would be read from anywhere; contents are compared with their digests.
            table.validate(full=True)
        except pyarrow.ArrowException as error:
            raise DataError(
                f"{path / ROWS} is damaged: {error}; remove the folder and prepare the data again"
            ) from None
        return cls(table, json.loads((path / ABOUT).read_text(encoding="utf-8")), path, processor)

    @classmethod
    def join(cls, stores: Sequence[Samples]) -> Samples:
        """Return the samples of several sources of one kind, one after the other; documents are numbered through."""
        if len(stores) == 1:
            return stores[0]
        tables, first = [], 0
        for store in stores:
            documents = store.documents + first
            number = SCHEMA.get_field_index("document")
            tables.append(store._table.set_column(number, SCHEMA.field(number), pyarrow.array(documents)))
            first = int(documents.max()) + 1
        digest = xxhash.xxh3_64(" ".join(store.fingerprint for store in stores).encode())
        joined = copy.copy(stores[0])
        joined._table = pyarrow.concat_tables(tables)
        joined._rows = np.arange(len(joined._table))
        joined._source_numbers = np.repeat(np.arange(len(stores)), [len(store) for store in stores])
        joined._paths = [store.path for store in stores]
        joined.has_sources, joined.fingerprint = True, digest.hexdigest()
        joined.sources = {name: value for store in stores for name, value in store.sources.items()}
        return joined

    def select(self, chosen: np.ndarray, fingerprint: str | None = None) -> Samples:
        """Return the samples where ``chosen``, bool [samples], is True; their fingerprint is the same by default."""
        selected = copy.copy(self)
        selected._rows = self._rows[chosen]
        selected.fingerprint = self.fingerprint if fingerprint is None else fingerprint
        return selected

    def source_samples(self, number: int) -> Samples:
        return self.select(self.source_numbers == number)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._sample(int(row)) for row in self._rows[index]]
        return self._sample(int(self._rows[index]))

    def _sample(self, row: int) -> Sample:
        tokens, weights, label, top_ids, top_logprobs = (
            self._table[name][row].values.to_numpy()
            for name in ("tokens", "weights", "label", "top_ids", "top_logprobs")
        )
        document, kind, margin, expected = (
            self._table[name][row].as_py() for name in ("document", "kind", "margin", "digest")
        )
        images = self._table["images"][row].values
        digests = images.field("digest").to_numpy()
        # A copy or a disk may have changed bytes and kept the size: zeros, for example, are tokens as others are.
        if _digest([tokens, weights, top_ids, top_logprobs, digests, label], kind, margin) != expected:
            raise DataError(
                f"sample {row} in {self._paths[self._source_numbers[row]]} is not what was written there: a file is damaged; "
                "remove the folder, and prepare the data again"
            )
        # Copies: the files are mapped for reading only, and tensors can be written to.
        ids = torch.from_numpy(tokens.astype(np.int64))
        # Every rank draws the global batch, and decodes its own share of it.
        deferred = DeferredImages(lambda: self._images(images.to_pylist())) if len(images) else None
        sample = (
            Sample.scored(ids)
            if self.scored
            else Sample.causal(ids, weights=torch.from_numpy(weights.copy()), images=deferred)
        )
        if not math.isnan(margin):
            sample.extra = {MARGIN: torch.full((len(tokens),), margin)}
        if len(top_ids):
            rows = len(sample)
            sample.candidates = Candidates(top_ids.reshape(rows, -1).copy(), top_logprobs.reshape(rows, -1).copy())
        if len(label):
            sample.label = int(label[0]) if self._label_ids else torch.from_numpy(label.copy())
        if kind != NO_PAIR:
            sample.pair = document
        if kind in (REJECTED, CHOSEN):
            sample.chosen = kind == CHOSEN
        if kind in (UNDESIRABLE, DESIRABLE):
            sample.label = int(kind == DESIRABLE)
        return sample

    def _images(self, images: Sequence[Mapping[str, Any]]) -> SampleImages:
        assert self._processor is not None, "only a model that takes images has samples with them"
        contents, names = [], []
        for image in images:
            path = image["path"]
            source = ImageSource(data=image["content"]) if path is None else ImageSource(path=os.fsdecode(path))
            # Limits apply here too: the file may have changed since the sample was made.
            content = encoded(source, self._processor.limits)
            # Another image may not fit the sample's tokens, and would not be the data that the fingerprint names.
            if image_digest(content) != image["digest"]:
                raise DataError(f"image {source.name} has changed since its sample was made; start the run again")
            contents.append(content)
            names.append(source.name)
        return self._processor.images(contents, names)

    def changed_files(self) -> list[list[Any]] | None:
        """Return [path, size, time of change] of all images that are files, if any has changed since the writing; else None."""
        paths, _, _, sizes, times = self._flat("images").flatten()
        # By size and time, without reading: every start of a run checks all images of its data.
        files = [
            (os.fsdecode(path), size, modified)
            for path, size, modified in zip(paths.to_pylist(), sizes.to_pylist(), times.to_pylist(), strict=True)
            if path is not None
        ]
        now = [(path, *file_state(Path(path))) for path, *_ in files]
        return None if now == files else [list(state) for state in now]

    def _column(self, name: str) -> np.ndarray:
        return self._table[name].to_numpy()[self._rows]

    def _flat(self, name: str) -> pyarrow.ChunkedArray:
        """Return the entries of the lists of all rows."""
        chunks = [chunk.flatten() for chunk in self._table[name].chunks]
        return pyarrow.chunked_array(chunks, SCHEMA.field(name).type.value_type)

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sample, int64 [samples]."""
        return self._column("length")

    @property
    def supervised(self) -> np.ndarray:
        """Return the number of tokens with a loss weight, int64 [samples]."""
        return self._column("supervised")

    @property
    def documents(self) -> np.ndarray:
        """Return the number of each sample's document, int64 [samples]."""
        return self._column("document")

    @property
    def digests(self) -> np.ndarray:
        """Return a digest of each sample's content without a classifier's label; 0 of one with another's completion."""
        return np.where(self._column("kind") == MISMATCHED, 0, self._column("content_digest"))

    @property
    def classes(self) -> np.ndarray:
        """Return the labels of a classifier, float32: ids [samples, 1], or a number for each label [samples, labels]."""
        return self._flat("label").to_numpy().reshape(len(self._table), -1)[self._rows]

    @property
    def source_numbers(self) -> np.ndarray:
        """Return the number of each sample's source, int64 [samples]."""
        return self._source_numbers[self._rows]


def write_store(
    path: Path,
    documents: Iterable[tuple[int, list[Sample]]],
    findings: Findings,
    sources: Mapping[str, str] | None = None,
    *,
    scored: bool = False,
) -> None:
    """Write documents, given as (number, samples), to a new directory; images that are files stay where they are."""
    path.mkdir()
    about: dict[str, Any] = {}
    with pyarrow.OSFile(os.fspath(path / ROWS), "wb") as file, pyarrow.ipc.new_file(file, SCHEMA) as writer:
        for batch in _batches(documents, findings, sources, scored, about):
            writer.write_batch(batch)
    # Last: it holds the fingerprint and the remarks of all documents.
    (path / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")


def samples_in_memory(
    documents: Iterable[tuple[int, list[Sample]]],
    sources: Mapping[str, str],
    processor: ImageProcessor | None,
    *,
    scored: bool = False,
) -> Samples:
    """Return documents, given as (number, samples), as a store that is not written."""
    about: dict[str, Any] = {}
    batches = list(_batches(documents, Findings(), sources, scored, about))
    return Samples(pyarrow.Table.from_batches(batches, SCHEMA), about, processor=processor)


def _batches(
    documents: Iterable[tuple[int, list[Sample]]],
    findings: Findings,
    sources: Mapping[str, str] | None,
    scored: bool,
    about: dict[str, Any],
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of documents, and then set ``about`` to what is known of all of them."""
    state, label_ids = xxhash.xxh3_64(), False
    rows: list[dict[str, Any]] = []
    size = 0
    for number, samples in documents:
        for sample in samples:
            add_to_fingerprint(state, sample)
            row = _row(sample, number, scored)
            for image in row["images"]:
                # Tokens depend on an image's size only, not on its content.
                state.update(image["digest"].to_bytes(8, "little", signed=True))
            label_ids |= sample.pair is None and isinstance(sample.label, int)
            rows.append(row)
            size += sum(row[name].nbytes for name in ("tokens", "weights", "top_ids", "top_logprobs"))
            size += sum(len(image["content"] or b"") for image in row["images"])
        if size > BATCH_BYTES:
            yield pyarrow.RecordBatch.from_pylist(rows, SCHEMA)
            rows, size = [], 0
    if rows:
        yield pyarrow.RecordBatch.from_pylist(rows, SCHEMA)
    about |= {
        "fingerprint": state.hexdigest(),
        "remarks": findings.lines(),
        "kinds": findings.kinds,
        "ends": sorted(findings.ends),
        "sources": dict(sources or {}),
        "scored": scored,
        "label_ids": label_ids,
    }


def _row(sample: Sample, document: int, scored: bool) -> dict[str, Any]:
    """Return a sample as a row of :data:`SCHEMA`."""
    # Inputs and targets overlap in all but one token: one list of ids holds both. A first token is never a target.
    first = 0 if scored else 1
    tokens = np.concatenate([sample.input_ids[:1], sample.target_ids]) if first else sample.input_ids.numpy()
    weights = np.concatenate([np.zeros(first), sample.weights]).astype(np.float32)
    candidates, images, label = sample.candidates, [], np.zeros(0)
    if sample.pair is None and sample.label is not None:  # others are kinds of a pair
        label = np.asarray([sample.label] if isinstance(sample.label, int) else sample.label)
    if isinstance(sample.images, ImageSources):
        for source, identity in zip(sample.images.sources, sample.images.identities, strict=True):
            images.append(
                {
                    # Absolute: the store is in the cache, and the next run may start in another working directory.
                    "path": os.fsencode(str(identity.file)) if source.data is None else None,
                    "content": source.data,
                    "digest": identity.digest,
                    "size": identity.size,
                    "modified": identity.modified,
                }
            )
    row: dict[str, Any] = {
        "length": len(sample),
        "supervised": int((weights > 0).sum()),
        "tokens": tokens.astype(np.int32),
        "weights": weights,
        "document": document,
        "kind": _kind(sample),
        "margin": float(sample.extra[MARGIN][0]) if MARGIN in sample.extra else math.nan,
        "label": label.astype(np.float32),
        "top_count": 0 if candidates is None else candidates.ids.shape[1],
        "top_ids": np.zeros(0, np.int32) if candidates is None else candidates.ids.numpy().astype(np.int32).ravel(),
        "top_logprobs": np.zeros(0, np.float32) if candidates is None else candidates.logprobs.numpy().ravel(),
        "images": images,
    }
    digests = np.asarray([image["digest"] for image in images], dtype=np.int64)
    content = [row["tokens"], weights, row["top_ids"], row["top_logprobs"], digests]
    row["digest"] = _digest([*content, row["label"]], row["kind"], row["margin"])
    row["content_digest"] = _digest(content, row["kind"], row["margin"])
    return row


def _digest(arrays: Iterable[np.ndarray], kind: int, margin: float) -> int:
    """Return a digest of a sample as stored, as a signed integer of 64 bits."""
    state = xxhash.xxh3_64(f"{kind} {margin!r}".encode())
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


def document_digests(store: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the documents and a digest of each one's content, equal for copies, int64 and uint64 [documents]."""
    documents, starts, counts = np.unique(store.documents, return_index=True, return_counts=True)
    # Samples of a document are neighbours; the order of its pieces, or of a pair's sides, counts.
    places = np.arange(len(store)) - np.repeat(starts, counts)
    factors = (2 * places + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return documents, np.add.reduceat(store.digests.astype(np.uint64) * factors, starts)


def hold_out(store: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
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
    train = store.select(~is_held_out, f"{store.fingerprint} without {parts} by seed {seed}")
    return train, store.select(is_held_out, f"{store.fingerprint}, {parts} by seed {seed}")
