"""Format the output of ``megascend train`` and ``rl`` with ``--dry-run``. Pure, except that it inspects the terminal."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Column, Table

from megascend.runtime.io.paths import format_bytes

if TYPE_CHECKING:
    from megascend.apps.data.preview import SamplePiece
    from megascend.apps.train.dry_run import DryRun, RlDryRun, ShownSample
    from megascend.apps.train.layout_plan import Suggestion

GIB, MIB = 2**30, 2**20
PIECE = 400
"""Characters of a piece's beginning and of its end that are shown."""
PIECES = 24
"""Pieces of a sample's beginning and of its end that are shown."""
LAYOUT: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "pad_edge": False}
"""Layout of tables: columns divided by two spaces, without lines."""


@dataclass(frozen=True)
class Style:
    """Marking of learned text, by colours or brackets.

    Attributes:
        colour: show weights by colour; otherwise by marks.
        unicode: the output can write every character.
    """

    colour: bool
    unicode: bool = True

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Style:
        """Use colours on a terminal, unless NO_COLOR (https://no-color.org) is set or it is a dumb one."""
        # NO_COLOR counts if it is set to any non-empty value (no-color.org).
        allowed = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
        encoding = (stream.encoding or "").lower().replace("-", "")
        return cls(allowed and stream.isatty(), encoding.startswith("utf"))

    @property
    def legend(self) -> str:
        """Explain the signs."""
        newline = "↵" if self.unicode else "\\n"
        if self.colour:
            return f"{self.piece('learned', 1.0)}, {self.piece('not learned', 0.0)}; {newline} is a line break"
        opening, closing = self._marks
        return f"{opening}learned{closing}, not learned; {newline} is a line break"

    @property
    def _marks(self) -> tuple[str, str]:
        return ("⟦", "⟧") if self.unicode else ("[[", "]]")

    def piece(self, text: str, weight: float) -> str:
        """Format the text of tokens by their weight; a weight other than 0 and 1 precedes it."""
        prefix = f"{weight:g} x " if weight not in (0.0, 1.0) else ""
        if self.colour:
            code = "32;1" if weight else "2"  # bold green, dim
            # Line by line: some terminals and pagers end colours with the line.
            return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in (prefix + text).split("\n"))
        opening, closing = self._marks
        return f"{opening}{prefix}{text}{closing}" if weight else text

    def visible(self, text: str) -> str:
        """Mark line breaks; escape control characters, which could command the terminal, except tabs."""
        newline = "↵\n" if self.unicode else "\\n\n"
        marked = "".join(
            newline
            if character == "\n"
            else character
            if character == "\t" or character.isprintable()
            else repr(character)[1:-1]
            for character in text
        )
        return marked if self.unicode else marked.encode("ascii", "backslashreplace").decode()


def report(dry: DryRun, style: Style) -> Iterator[str]:
    """Yield the lines of a dry run."""
    config = dry.config
    yield from _model_and_layout(dry)
    if dry.suggestion is not None:
        yield from suggestion_lines(dry.suggestion)
    yield f"steps     {_length(dry)}"
    yield f"output    {config.output}; {format_bytes(dry.free_disk)} free there"
    yield from (f"          {line}" for line in config.template_remarks())
    yield from (f"          warning: {line}" for line in warnings(dry))
    yield ""
    yield from memory_table(dry)
    yield ""
    yield from data_table(dry)
    yield from source_table(dry)
    yield from (f"          {line}" for line in dry.remarks)
    yield ""
    yield f"the first samples of step 1, as the model sees them: {style.legend}"
    for sample in dry.examples:
        yield from sample_text(sample, style)


def report_rl(dry: RlDryRun, style: Style) -> Iterator[str]:
    """Yield the lines of a dry run of ``rl``, which shows no samples: responses do not exist yet."""
    from megascend.apps.rl.learn import describe_objective
    from megascend.apps.rl.trial import CANNED

    config, rollout = dry.config, dry.config.rollout
    yield from _model_and_layout(dry)
    yield f"steps     {config.steps} of {rollout.prompts_per_step} x {rollout.group_size} responses; lag {rollout.max_lag}"
    yield f"objective {describe_objective(config.objective)}"
    for index, line in enumerate(dry.engines):
        yield f"{'' if index else 'engines':<10}{line}"
    if config.reference is not None:
        reference = config.reference
        penalty = f"{reference.kl_estimator} in the {reference.penalty}, coefficient {reference.coefficient:g}"
        yield f"reference {reference.model}; {penalty if reference.coefficient else 'measured only'}"
    if dry.teacher is not None:
        yield f"teacher   {dry.teacher}"
    evaluated = f", {dry.held_out} for evaluation" if config.evaluation is not None else ""
    shortest, median, longest = dry.prompt_lengths
    lengths = "; the environment makes them"
    if longest:
        lengths = (
            f"; {shortest} to {longest} tokens, median {median}" if shortest < longest else f"; {longest} tokens each"
        )
    yield f"prompts   {dry.prompts}{evaluated}{lengths}"
    trial = dry.trial
    parts = "".join(f", {name} {value:g}" for name, value in trial.rewards.items())
    turns = f" in {trial.turns} turn{'s' * (trial.turns != 1)}" if config.rollout.environment is not None else ""
    yield f"trial     {trial.source}: reward {trial.reward:g}{parts}{turns}, {trial.seconds:.2g} s, of {CANNED!r}"
    yield f"output    {config.output}; {format_bytes(dry.free_disk)} free there"
    yield from (f"          {line}" for line in config.template_remarks())
    yield from (
        f"          warning: {line}"
        for line in [*memory_warning(dry, dry.engines_share), dry.disk_warning]
        if line is not None
    )
    yield ""
    yield from memory_table(dry, dry.engines_share, dry.processes)


def _model_and_layout(dry: DryRun | RlDryRun) -> Iterator[str]:
    config, topology, shape = dry.config, dry.topology, dry.info.shape
    context = f", context {shape.max_position}" if shape.max_position else ""
    yield (
        f"model     {config.model}: {count(dry.info.parameter_count)} parameters, {shape.num_layers} layers of width "
        f"{shape.hidden_size}, vocabulary {shape.vocab_size}{context}"
    )
    trained = "all parameters" if config.lora is None else f"a LoRA adapter of rank {config.lora.rank}"
    if config.base_weights != "unquantised":
        trained += f" on base weights in {config.base_weights}"
    yield f"training  {trained}, engine {config.engine} on {dry.platform}, {config.precision}"
    layout, *details = topology.describe().splitlines()
    yield f"layout    {layout}"
    yield from (f"          {line}" for line in details)


def suggestion_lines(suggestion: Suggestion) -> Iterator[str]:
    """Yield the layout that ``megascend plan`` would have chosen."""
    current, better = suggestion.current.time.seconds, suggestion.better.time.seconds
    yield (
        f"          megascend plan predicts {suggestion.gain:.0%} shorter steps ({better:.3g} s in place of {current:.3g} s on "
        f"{suggestion.hardware.title}) with {suggestion.better.describe()}"
    )


def count(number: int) -> str:
    """Write a large number in words: ``1.72 billion``."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def _length(dry: DryRun) -> str:
    config, plan = dry.config, dry.steps
    unit = dry.train.unit
    budget = f"{plan.budget} (auto, by the estimate)" if config.batching.micro_batch_tokens == "auto" else plan.budget
    count = f"up to {plan.micro_batches} micro batches" if plan.micro_batches > 1 else "one micro batch"
    epochs = "streamed; of the first batch" if dry.epochs is None else f"= {dry.epochs:.3g} epochs"
    return (
        f"{config.steps} of {config.data.global_batch_size} {unit} {epochs}; {count} a rank, the largest with "
        f"{plan.tokens} of {budget} tokens, {plan.padding:.1%} padding (first {plan.steps} steps)"
    )


def warnings(dry: DryRun) -> Iterator[str]:
    """Yield warnings about settings that work but are probably not intended."""
    config = dry.config
    if dry.steps.idle:
        yield (
            f"some of the {dry.topology.data} data parallel ranks have no sample in a step: raise data.global_batch_size "
            f"({config.data.global_batch_size})"
        )
    # Legal for a run that will be extended, but more often a forgotten setting.
    if config.schedule.kind != "constant" and 0 < config.schedule.total_steps < config.steps:
        yield (
            f"schedule.total_steps: {config.schedule.total_steps} ends before the {config.steps} steps do; the rest learn with "
            f"min_lr {config.schedule.min_lr:g}"
        )
    yield from memory_warning(dry)
    if dry.disk_warning is not None:
        yield dry.disk_warning


def memory_warning(dry: DryRun | RlDryRun, engines_share: float = 0.0) -> Iterator[str]:
    """Yield a warning if the estimate exceeds what engines leave to a rank."""
    available = int(dry.device_memory * (1 - engines_share))
    if dry.memory is not None and dry.memory.total > available:
        yield (
            f"a rank will need about {size(dry.memory.total)} of memory and has {size(available)}: lower "
            "batching.micro_batch_tokens, set recompute.granularity: full, or divide the model over more ranks"
        )


def memory_table(
    dry: DryRun | RlDryRun, engines_share: float = 0.0, processes: Mapping[str, int] = MappingProxyType({})
) -> Iterator[str]:
    """Yield the memory that a rank will need, item by item.

    Args:
        engines_share, processes: as of :class:`megascend.apps.train.dry_run.RlDryRun`.
    """
    memory = dry.memory
    if memory is None:
        yield f"memory    not estimated for engine {dry.config.engine}"
        return
    stage = f", of pipeline stage {memory.stage + 1}" if dry.topology.pipeline > 1 else ""
    table = Table("memory", Column(justify="right"), f"per rank{stage}, at the peak of a step (estimate)", **LAYOUT)
    for name, bytes_ in (memory.items | memory.overhead).items():
        table.add_row(f"  {name}", size(bytes_))
    machine = "per rank on this machine" if dry.platform == "cpu" else "on the device"
    engines = f", of which engines take {engines_share:.0%}" if engines_share else ""
    table.add_row("  total", size(memory.total), f"of {size(dry.device_memory)} {machine}{engines}")
    if dry.recomputed is not None:
        table.add_row("  recomputed", size(dry.recomputed.total), "with recompute.granularity: full")
    for name, bytes_ in memory.host.items():
        table.add_row(f"  {name}", size(bytes_), "in host memory")
    for name, bytes_ in processes.items():
        table.add_row(f"  {name}", size(bytes_), "of weights in host memory beside rank 0")
    yield from plain(table)
    yield from (f"  {line}" for line in memory.remarks)


def size(bytes_: int) -> str:
    """Write bytes in a unit that leaves few digits."""
    return f"{bytes_ / GIB:.2f} GiB" if bytes_ >= GIB else f"{bytes_ / MIB:.1f} MiB"


def data_table(dry: DryRun) -> Iterator[str]:
    """Yield statistics, a line for each part of the data."""
    figures = (dry.train.unit, "tokens", "supervised", "", "shortest", "median", "mean", "95 %", "longest")
    table = Table("data", *(Column(name, justify="right") for name in figures), **LAYOUT)
    for name, part in (
        ("learned" if dry.epochs is not None else "first batch", dry.train),
        ("held out", dry.held_out),
    ):
        if part is not None:
            numbers = (part.samples // part.members, part.tokens, part.supervised)
            lengths = (part.shortest, part.median, round(part.mean), part.p95, part.longest)
            share = f"({part.supervised / part.tokens:.0%})"
            table.add_row(name, *map("{:,}".format, numbers), share, *map("{:,}".format, lengths))
    yield from plain(table)


def source_table(dry: DryRun) -> Iterator[str]:
    """Yield the kinds of documents of each source, and the numbers of samples up to each power of two in length."""
    edges = sorted({edge for source in dry.sources for edge in source.histogram})
    if not edges:
        return
    table = Table("source", "documents", *(Column(f"to {edge:,}", justify="right") for edge in edges), **LAYOUT)
    for source in dry.sources:
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in source.kinds.items())
        table.add_row(source.name, kinds, *(f"{source.histogram.get(edge, 0):,}" for edge in edges))
    yield from plain(table)


def plain(table: Table) -> Iterator[str]:
    """Yield the lines of a table as plain text, unwrapped."""
    # Wide, and without markup: rich would wrap lines to the terminal, and read brackets in paths as tags.
    console = Console(file=io.StringIO(), width=1000, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    yield from (line.rstrip() for line in captured.get().splitlines())


def sample_text(sample: ShownSample, style: Style) -> Iterator[str]:
    """Yield a sample, its middle left out where it is long."""
    learned = sum(piece.tokens for piece in sample.pieces if piece.weight)
    yield f"--- {sample.name}: {sample.tokens} tokens, {learned} learned"
    text = ""
    for index, piece in enumerate(sample.pieces):
        left_out = len(sample.pieces) - 2 * PIECES
        if left_out > 0 and PIECES <= index < PIECES + left_out:
            text += f"\n[... {left_out} pieces ...]\n" if index == PIECES else ""
            continue
        text += style.piece(_shortened(piece, style), piece.weight)
    yield text


def _shortened(piece: SamplePiece, style: Style) -> str:
    if len(piece.text) <= 3 * PIECE:
        return style.visible(piece.text)
    left_out = len(piece.text) - 2 * PIECE
    return f"{style.visible(piece.text[:PIECE])} [... {left_out} characters ...] {style.visible(piece.text[-PIECE:])}"
