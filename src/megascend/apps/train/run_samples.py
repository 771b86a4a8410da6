"""The samples of a supervised run: training samples and held-out samples."""

from __future__ import annotations

import contextlib
import copy
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megascend.apps.data.findings import Findings, joined
from megascend.apps.data.labels import LabelSet
from megascend.apps.data.order import Batches, batches
from megascend.apps.data.prepare import Recipe, named_inputs, prepare_samples
from megascend.apps.data.preview import SourceStatistics
from megascend.apps.data.samples import Encoder, SampleLimits
from megascend.apps.data.splits import SplitFiles
from megascend.apps.data.store import Samples, document_digests, hold_out, samples_in_memory
from megascend.apps.data.streaming import PrefetchedBatches, SourceFiles, StreamedBatches
from megascend.config import RunConfig
from megascend.config.data import DataSource
from megascend.errors import DataError
from megascend.runtime.io.paths import format_bytes, real
from megascend.training.batch.micro_batch import SequenceLayout
from megascend.training.batch.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.apps.train.objectives import LearningObjective
    from megascend.backend import Backend


def check_disjoint(training: Sequence[DataSource], validation: Sequence[DataSource]) -> None:
    """Raise DataError if a file belongs to training and validation data, or to two training sources."""
    # With prepared samples, the files themselves may be missing.
    if len(training) + len(validation) == 1 or training[0].data.prepared is not None:
        return
    readers: dict[Path, DataSource] = {}
    for source in training:
        for file in _source_files(source):
            # Other columns of the file are other data.
            if file in readers and readers[file].data.columns == source.data.columns:
                raise DataError(
                    f"{source.setting}: {source.path} and {readers[file].setting}: {readers[file].path} both hold {file}: "
                    "leave it out of one; weight says how often it is read"
                )
            readers[file] = source
    for source in validation:
        shared = [file for file in sorted(_source_files(source)) if file in readers]
        if shared:
            learned = readers[shared[0]]
            raise DataError(
                f"{source.setting}: {source.path} lies in {learned.setting}: {learned.path} (split {learned.data.split}), so the "
                f"run would train on {shared[0]}: move it, or name another split with validation.split"
            )


def _source_files(source: DataSource) -> set[Path]:
    data = source.data
    split = SplitFiles.of(source.path, data.split, data.config_name, Findings(source.setting))
    return {real(file) for file in split.files}


def check_one_kind(sources: Sequence[DataSource], stores: Sequence[Samples]) -> None:
    """Raise DataError if only some sources have pairs, margins, labels or a teacher's distributions."""
    kinds = {
        "has_pairs": "one holds preference pairs and the other does not",
        "has_margins": "only one holds pairs with 'margin'",
        "has_labels": "only one holds completions with 'label'",
        "has_candidates": "only one holds a teacher's distributions (top_ids)",
    }
    for source, store in zip(sources, stores, strict=True):
        for name, difference in kinds.items():
            if getattr(store, name) != getattr(stores[0], name):
                raise DataError(f"of {sources[0].path} and {source.path} {difference}")


def copies(train: Samples, held_out: Samples) -> tuple[str, ...]:
    """Return a remark on held-out documents that are among the training data, if any."""
    contents = document_digests(held_out)[1]
    shared = int(np.isin(contents, document_digests(train)[1]).sum())
    if not shared:
        return ()
    return (
        f"{shared} of {len(contents)} held-out documents are among those that are learned: their loss will be too low",
    )


def ambiguous_texts(stores: Sequence[Samples], labels: LabelSet) -> tuple[str, ...]:
    """Return a remark on samples of a classifier that differ only in their labels, if any."""
    _, contents = np.unique(np.concatenate([store.digests for store in stores]), return_inverse=True)
    names, classes = np.unique(np.concatenate([store.classes for store in stores]), axis=0, return_inverse=True)
    combinations = np.unique(np.stack([contents, classes.reshape(-1)], 1), axis=0)
    ambiguous = np.bincount(combinations[:, 0]) > 1
    if not ambiguous.any():
        return ()
    first, second = (names[label] for label in combinations[ambiguous[combinations[:, 0]], 1][:2])
    return (
        f"warning: {int(ambiguous.sum()):,} text{'s' * bool(ambiguous.sum() > 1)} with unlike labels, in "
        f"{int(ambiguous[contents].sum()):,} samples: one has {labels.describe(first)!r} and {labels.describe(second)!r}",
    )


def padding_remark(tokenizer: PreTrainedTokenizerBase, limits: SampleLimits) -> tuple[str, ...]:
    """Return a remark if the tokenizer's padding token is not the one that transformers skips at the end of a scored sample."""
    padding: Any = tokenizer.pad_token_id
    if not limits.scored or limits.padding is None or padding in (None, limits.padding):
        return ()
    return (
        f"warning: pad_token_id is {limits.padding} in config.json, and {padding} ({tokenizer.pad_token!r}) in the tokenizer: in "
        "batches that it pads, transformers reads scores at a padding token: set pad_token_id to the tokenizer's",
    )


def source_names(sources: Sequence[DataSource]) -> list[str]:
    """Return a short name for each source: that of its file or folder, or its path where two have the same."""
    names = [source.path.name for source in sources]
    return [name if names.count(name) == 1 else str(source.path) for name, source in zip(names, sources, strict=True)]


@dataclass(frozen=True)
class RunSamples:
    """Training and validation samples of a run.

    Attributes:
        held_out: None without a validation set.
        longest: tokens of the longest sample of both.
        kinds: number of documents of each kind, of each training source; empty of streams.
        ends: tokens that end an answer or a text, and are learned; of streams, those so far.
    """

    train: Samples
    held_out: Samples | None
    longest: int
    remarks: tuple[str, ...]
    kinds: tuple[dict[str, int], ...] = field(default=(), kw_only=True)
    ends: set[int] = field(default_factory=set, kw_only=True)

    @classmethod
    def prepare(cls, config: RunConfig, tokenizer: PreTrainedTokenizerBase, limits: SampleLimits) -> RunSamples:
        """Read, check and tokenise the data of a run: all of it, or the first batch of a stream. Local."""
        if config.data.streaming:
            return StreamedSamples.open(config, tokenizer, limits)
        training, sources = config.data.training_sources(), config.data_sources()
        # Before anything is tokenised, which may take minutes.
        check_disjoint(training, sources[len(training) :])
        stores, problems = [], []
        for source in sources:
            try:
                stores.append(prepare_samples(source, tokenizer, limits, config.model, config.template_date))
            except DataError as error:
                # Problems of all sources at once: a user fixes them in one go.
                problems.append(error)
        if problems:
            raise joined(problems)
        check_one_kind(sources, stores)
        remarks = tuple(line for store in stores for line in store.remarks) + padding_remark(tokenizer, limits)
        longest = max(int(store.lengths.max()) for store in stores)
        kinds = tuple(store.kinds for store in stores[: len(training)])
        ends = {end for store in stores[: len(training)] for end in store.ends}
        train, held_out = Samples.join(stores[: len(training)]), None
        if stores[len(training) :]:
            held_out = Samples.join(stores[len(training) :])
            remarks += copies(train, held_out)
        if limits.labels is not None:
            remarks += ambiguous_texts(stores, limits.labels)
        if config.validation is not None and config.validation.fraction:
            train, held_out = hold_out(train, config.validation.fraction, config.seed)
        parts = train, held_out
        for part, subject in zip(parts, ("training samples", "held-out samples"), strict=True):
            if limits.labels is not None and part is not None:
                remarks += tuple(limits.labels.remarks(part.classes, subject))
        return cls(*parts, longest, remarks, kinds=kinds, ends=ends)

    def longest_unit(self, layout: SequenceLayout) -> int:
        """Return the tokens of the longest sample, or pair, with its padding."""
        return layout.padded_length(self.longest) * (2 if self.train.has_pairs else 1)

    def check_lengths(self, backend: Backend) -> None:
        """Refuse samples above the engine's limit, which may be lower than the run's."""
        if self.longest > backend.max_length:
            raise DataError(
                f"the longest sample has {self.longest} tokens, and the engine takes {backend.max_length}: set "
                f"batching.max_length: {backend.max_length}"
            )

    def batches(self, config: RunConfig, objective: LearningObjective) -> Batches[int] | PrefetchedBatches:
        """Return the stream of global batches, for :meth:`next_batch`."""
        return self.unit_batches(config, objective)

    def next_batch(
        self, stream: Batches[int] | PrefetchedBatches, objective: LearningObjective, backend: Backend
    ) -> list[Sample]:
        """Return the samples of the next batch of the training stream. Collective."""
        assert isinstance(stream, Batches)
        return objective.batch(self.train, next(stream))

    def unit_batches(self, config: RunConfig, objective: LearningObjective) -> Batches[int]:
        """Return the stream of global batches, as indices of samples or pairs."""
        units = range(objective.units(self.train))
        data, train = config.data, self.train
        sources = data.training_sources()
        mixture: list[tuple[Sequence[int], float | None]] = []
        if train.has_sources:
            # Samples of a source, and so its units, are neighbours.
            ends = np.cumsum([0, *np.bincount(train.source_numbers, minlength=len(sources)) // train.members]).tolist()
            for source, first, end in zip(sources, ends, ends[1:], strict=False):
                if first == end:
                    raise DataError(
                        f"{source.setting}: {source.path}: validation.fraction holds out all of its documents: add data to it, "
                        "or set validation.path"
                    )
                mixture.append((range(first, end), source.weight))
        return batches(
            units,
            data.global_batch_size,
            config.seed,
            data.shuffle,
            train.fingerprint,
            mixture=mixture,
            sources=train.sources,
            on_changed=data.on_changed,
        )

    def source_statistics(self, config: RunConfig) -> list[SourceStatistics]:
        """Return figures of each training source; none of streams."""
        names = source_names(config.data.training_sources())
        return [
            SourceStatistics.measure(name, kinds, self.train.source_samples(number))
            for number, (name, kinds) in enumerate(zip(names, self.kinds, strict=False))
        ]

    def held_out_parts(self, config: RunConfig) -> dict[str, Samples]:
        """Return the held-out samples by source; under one name, ``""``, for a single source and for labelled data."""
        assert self.held_out is not None
        numbers = sorted(set(self.held_out.source_numbers.tolist()))
        # A reference point is estimated from all of them.
        if len(numbers) == 1 or self.held_out.has_labels:
            return {"": self.held_out}
        names = source_names(config.data.training_sources())
        return {names[number]: self.held_out.source_samples(number) for number in numbers}

    def mixture(self, config: RunConfig, stream: Batches[int] | PrefetchedBatches) -> list[str]:
        """Return a line for each of several sources: its share of the samples, and how often the run reads it, if known."""
        sources, draws = config.data.training_sources(), config.steps * config.data.global_batch_size
        if len(sources) == 1:
            return []
        lines = [
            f"{source.path}: {share:.2%} of the {self.train.unit}"
            for source, share in zip(sources, stream.shares, strict=True)
        ]
        if isinstance(stream, PrefetchedBatches):
            return lines
        return [
            f"{line}, {size:,} read {share * draws / size:.3g} times in {config.steps} steps"
            for line, share, size in zip(lines, stream.shares, stream.sizes, strict=True)
        ]

    def check_same_on_all_ranks(self, backend: Backend) -> None:
        """Raise DataError if ranks have different samples, for example because of other files or another date. Collective."""
        from megascend.runtime.distributed.objects import gather_objects

        # Fingerprints are compared, not samples.
        prints = [part.fingerprint for part in (self.train, self.held_out) if part is not None]
        local = (socket.gethostname(), prints, self.train.sources)
        ranks = gather_objects(local, "world", backend.groups, "check_same_on_all_ranks()")
        host, first, sources = ranks[0]
        for rank, (other_host, other, other_sources) in enumerate(ranks):
            if other != first:
                names = [name for name in sources if sources[name] != other_sources.get(name)]
                causes = f": {', '.join(names)}" if names else ""
                raise DataError(
                    f"rank {rank} on {other_host} has other samples than rank 0 on {host}{causes}; give all hosts the same "
                    "files and the same template_date"
                )

    def drawn_units(
        self, config: RunConfig, objective: LearningObjective, saved: Sequence[tuple[int, dict[str, Any]]]
    ) -> set[int]:
        """Return the indices drawn in the steps of this run.

        Args:
            saved: step and position in the data of each checkpoint that the run may resume from.
        """
        # The same streams as in training, which will draw these units.
        streams = [(0, self.unit_batches(config, objective))]
        for step, position in saved:
            stream = self.unit_batches(config, objective)
            # A position that cannot be resumed is reported when it is.
            with contextlib.suppress(DataError):
                stream.load_state_dict(position)
                streams.append((step, stream))
        return {
            unit for step, stream in streams for batch in islice(stream, max(0, config.steps - step)) for unit in batch
        }

    def describe(self) -> str:
        members, unit = self.train.members, self.train.unit
        suffix = "" if self.held_out is None else f" and {len(self.held_out) // members} held out"
        return f"{len(self.train) // members} {unit}{suffix}"


@dataclass(frozen=True)
class StreamedSamples(RunSamples):
    """Samples of a run that are read and tokenised as steps need them.

    ``train`` are those of the first batch, which decide what kind of data a run learns from; ``longest`` is the limit, as the
    longest sample is not known.

    Attributes:
        open_stream: opens the stream at its beginning.
        kind: of the samples of the first batch, see :class:`StreamedBatches`.
    """

    open_stream: Callable[[], StreamedBatches]
    kind: tuple[bool, bool, bool] | None
    files: tuple[Path, ...]

    @classmethod
    def open(cls, config: RunConfig, tokenizer: PreTrainedTokenizerBase, limits: SampleLimits) -> StreamedSamples:
        """Read the first batch, so that data of which nothing can be learned are refused now, and all validation data."""
        data, sources = config.data, config.data.training_sources()
        validation = config.validation.sources(data) if config.validation is not None else []
        check_disjoint(sources, validation)
        # A copy of the tokenizer: a thread uses it, and concurrent use is an error ("Already borrowed").
        recipe = Recipe.of(data, tokenizer, limits, config.model, config.template_date)
        recipe = replace(recipe, tokenizer=copy.deepcopy(tokenizer))
        image_processor, files = recipe.image_processor, [SourceFiles(source) for source in sources]
        inputs: dict[str, str] = {}
        ends: set[int] = set()
        for source, source_files in zip(sources, files, strict=True):
            inputs |= named_inputs(recipe.inputs(source_files.identity, source.data), source.setting)

        def open_stream() -> StreamedBatches:
            def encoder(findings: Findings) -> Encoder:
                findings.ends = ends  # those of later batches, too
                return recipe.encoder(findings)

            return StreamedBatches(
                sources, data.global_batch_size, config.seed, encoder, inputs, image_processor, files
            )

        stream = open_stream()
        first = next(stream)
        # As a store, so that objectives and dry runs read both in the same way.
        train = samples_in_memory(enumerate(_documents(first)), inputs, image_processor, scored=limits.scored)
        stores = [
            prepare_samples(source, tokenizer, limits, config.model, config.template_date) for source in validation
        ]
        check_one_kind([*sources[:1], *validation], [train, *stores])
        held_out = Samples.join(stores) if stores else None
        remarks = tuple(line for part in (*files, *stores) for line in part.remarks) + padding_remark(tokenizer, limits)
        all_files = tuple(file for part in files for file in part.files)
        return cls(train, held_out, limits.length, remarks, open_stream, stream.kind, all_files, ends=ends)

    def batches(self, config: RunConfig, objective: LearningObjective) -> PrefetchedBatches:
        """Return the stream of global batches of samples, from its beginning."""
        stream = self.open_stream()
        stream.kind = self.kind
        return PrefetchedBatches(stream)

    def next_batch(
        self, stream: Batches[int] | PrefetchedBatches, objective: LearningObjective, backend: Backend
    ) -> list[Sample]:
        """Return the next batch of the training stream, the same on all ranks. Collective.

        Raises:
            DataError: on every rank: one of them cannot read it, or has read other samples than the others.
        """
        from megascend.runtime.distributed.objects import gather_objects

        assert isinstance(stream, PrefetchedBatches)
        batch, error = None, None
        try:
            batch = stream.take()
        except DataError as problem:
            error = problem
        # Every rank takes its share of its own list: if these differed, samples would silently be left out or learned twice.
        local = (socket.gethostname(), None if batch is None else batch.digest, None if error is None else str(error))
        ranks = gather_objects(local, "world", backend.groups, "next_batch()")
        first_host, first, _ = ranks[0]
        message = None
        for rank, (host, digest, problem) in enumerate(ranks):
            if problem is not None:
                alike = all(other == problem for _, _, other in ranks)
                message = problem if alike else f"rank {rank} on {host}: {problem}"
                break
            if digest != first and all(other is None for _, _, other in ranks):
                message = (
                    f"rank {rank} on {host} has read other samples than rank 0 on {first_host} for this step: their files "
                    "differ between the beginnings and ends that were compared, or a file or image could not be read on one"
                )
                break
        if message is not None:
            shared = DataError(message)
            shared.on_all_ranks = True
            raise shared from error
        assert batch is not None
        return batch.samples

    def describe(self) -> str:
        size = sum(file.stat().st_size for file in self.files if file.is_file())
        suffix = "" if self.held_out is None else f" and {len(self.held_out) // self.train.members} held out"
        count = f"{len(self.files)} file{'s' * (len(self.files) != 1)}"
        return f"{self.train.unit} streamed from {count}{f' ({format_bytes(size)})' if size else ''}{suffix}"


def _documents(batch: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Yield the samples of each unit of a batch."""
    for _, unit in groupby(
        enumerate(batch), lambda entry: entry[0] if entry[1].pair is None else -1 - int(str(entry[1].pair))
    ):
        yield [sample for _, sample in unit]
