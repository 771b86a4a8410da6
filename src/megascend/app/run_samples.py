"""The samples of a supervised run: those that are learned, and those that are held out."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from megascend.batch.micro_batch import SequenceLayout
from megascend.config import Data, RunConfig
from megascend.data.findings import Findings, joined
from megascend.data.order import Batches, batches
from megascend.data.prepare import prepare_samples
from megascend.data.samples import SampleLimits
from megascend.data.splits import files_of
from megascend.data.store import SampleSubset, all_samples, hold_out
from megascend.errors import DataError
from megascend.io.paths import real

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megascend.app.objectives import LearningObjective
    from megascend.backend import Backend


def check_apart(sources: Sequence[tuple[Path, Data, str]]) -> None:
    """Refuse to measure the validation loss on files that are learned.

    Args:
        sources: as :meth:`megascend.config.RunConfig.data_sources` has them.
    """
    if len(sources) == 1:
        return
    learned, held_out = (
        {real(file) for file in files_of(path, data.split, data.config_name, Findings(setting))}
        for path, data, setting in sources
    )
    shared = sorted(learned & held_out)
    if shared:
        (path, data, _), (other, _, setting) = sources
        raise DataError(
            f"{setting}: {other} lies in data.path: {path} (split {data.split}), so the run would train on {shared[0]}: move it, "
            "or name another split with validation.split"
        )


@dataclass(frozen=True)
class RunSamples:
    """Training and validation samples of a run.

    Attributes:
        held_out: None without a validation set.
        longest: tokens of the longest sample of both.
        remarks: descriptions of data that was left out, cut or not read.
    """

    learned: SampleSubset
    held_out: SampleSubset | None
    longest: int
    remarks: tuple[str, ...]

    @classmethod
    def prepare(cls, config: RunConfig, tokenizer: PreTrainedTokenizerBase, limits: SampleLimits) -> RunSamples:
        """Read, check and tokenise all data of a run. Local: ranks need not meet."""
        sources = config.data_sources()
        # Before anything is tokenised, which may take minutes.
        check_apart(sources)
        stores, problems = [], []
        for path, data, setting in sources:
            try:
                stores.append(
                    prepare_samples(path, data, tokenizer, limits, config.model, setting, config.template_date)
                )
            except DataError as error:
                # Problems of all sources at once: a user fixes them in one go.
                problems.append(error)
        if problems:
            raise joined(problems)
        remarks = tuple(line for store in stores for line in store.remarks)
        longest = max(int(store.lengths.max()) for store in stores)
        learned = stores[0]
        if config.validation is None:
            return cls(all_samples(learned), None, longest, remarks)
        if len(stores) == 1:
            rest, held_out = hold_out(learned, config.validation.fraction, config.seed)
            return cls(rest, held_out, longest, remarks)
        if stores[1].has_pairs != learned.has_pairs:
            raise DataError(f"of {sources[0][0]} and {sources[1][0]} one holds preference pairs and the other does not")
        if stores[1].has_margins != learned.has_margins:
            raise DataError(f"of {sources[0][0]} and {sources[1][0]} only one holds pairs with 'margin'")
        if stores[1].has_labels != learned.has_labels:
            raise DataError(f"of {sources[0][0]} and {sources[1][0]} only one holds completions with 'label'")
        if stores[1].has_candidates != learned.has_candidates:
            raise DataError(
                f"of {sources[0][0]} and {sources[1][0]} only one holds a teacher's distributions (top_ids)"
            )
        return cls(all_samples(learned), all_samples(stores[1]), longest, remarks)

    def longest_unit(self, layout: SequenceLayout) -> int:
        """Tokens that fit the longest sample, or pair, with its padding."""
        return layout.padded_length(self.longest) * (2 if self.learned.has_pairs else 1)

    def check_lengths(self, backend: Backend) -> None:
        """Refuse samples beyond what the engine, which may have a limit of its own, takes."""
        if self.longest > backend.max_length:
            raise DataError(
                f"the longest sample has {self.longest} tokens, and the engine takes {backend.max_length}: set "
                f"batching.max_length: {backend.max_length}"
            )

    def batches(self, config: RunConfig, objective: LearningObjective) -> Batches[int]:
        """Return the stream of global batches, as indices of samples or pairs."""
        units = range(objective.units(self.learned))
        data, learned = config.data, self.learned
        return batches(
            units,
            data.global_batch_size,
            config.seed,
            data.shuffle,
            learned.fingerprint,
            sources=learned.sources,
            on_changed=data.on_changed,
        )

    def check_alike(self, backend: Backend) -> None:
        """Refuse samples that are not the same on all ranks, of hosts with other files or another date. Collective."""
        from megascend.distributed.objects import gather_objects

        # Fingerprints travel, not samples.
        prints = [part.fingerprint for part in (self.learned, self.held_out) if part is not None]
        local = (socket.gethostname(), prints, self.learned.sources)
        ranks = gather_objects(local, "world", backend.groups, "check_alike()")
        host, first, sources = ranks[0]
        for rank, (other_host, other, other_sources) in enumerate(ranks):
            if other != first:
                names = [name for name in sources if sources[name] != other_sources.get(name)]
                causes = f": {', '.join(names)}" if names else ""
                raise DataError(
                    f"rank {rank} on {other_host} has other samples than rank 0 on {host}{causes}; give all hosts the same "
                    "files, and set template_date where they were started around midnight or in several time zones"
                )

    def drawn_units(self, config: RunConfig, objective: LearningObjective) -> set[int]:
        """Return the indices drawn in the steps of this run."""
        # The same stream as in training, so these are the very units that it will draw.
        return {unit for batch in islice(self.batches(config, objective), config.steps) for unit in batch}

    def describe(self) -> str:
        """Return how many samples there are, or pairs of them."""
        members, unit = self.learned.members, self.learned.unit
        suffix = "" if self.held_out is None else f" and {len(self.held_out) // members} held out"
        return f"{len(self.learned) // members} {unit}{suffix}"
