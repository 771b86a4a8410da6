"""What ``megascend train --dry-run`` prints. Pure, but for the look at the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from megascend.app.disk_room import in_words

if TYPE_CHECKING:
    from megascend.app.dry_run import DryRun, ShownSample
    from megascend.data.preview import SamplePiece, SampleStatistics

GIB, MIB = 2**30, 2**20
PIECE = 400
"""Characters of a piece's beginning and of its end that are shown."""
PIECES = 24
"""Pieces of a sample's beginning and of its end that are shown."""


@dataclass(frozen=True)
class Style:
    """How learned text is told from other text.

    Attributes:
        colour: by colours; else by marks.
        unicode: the output can write every character.
    """

    colour: bool
    unicode: bool = True

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Style:
        """Colours on a terminal, unless NO_COLOR (https://no-color.org) is set or it is a dumb one."""
        wanted = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
        encoding = (stream.encoding or "").lower().replace("-", "")
        return cls(wanted and stream.isatty(), encoding.startswith("utf"))

    @property
    def legend(self) -> str:
        """What the signs mean."""
        newline = "↵" if self.unicode else "\\n"
        if self.colour:
            return f"{self.piece('learned', 1.0)}, {self.piece('not learned', 0.0)}; {newline} is a line break"
        opening, closing = self._marks
        return f"{opening}learned{closing}, not learned; {newline} is a line break"

    @property
    def _marks(self) -> tuple[str, str]:
        return ("⟦", "⟧") if self.unicode else ("[[", "]]")

    def piece(self, text: str, weight: float) -> str:
        """Text of tokens with this weight; one that is neither 0 nor 1 is written beside it."""
        beside = f"{weight:g} x " if weight not in (0.0, 1.0) else ""
        if self.colour:
            code = "32;1" if weight else "2"  # bold green, dim
            # Line by line: some terminals and pagers end colours with the line.
            return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in (beside + text).split("\n"))
        opening, closing = self._marks
        return f"{opening}{beside}{text}{closing}" if weight else text

    def visible(self, text: str) -> str:
        """Line breaks and tabs with a sign; other control characters, which could command the terminal, as escapes."""
        newline = "↵\n" if self.unicode else "\\n\n"
        shown = "".join(
            newline if each == "\n" else each if each == "\t" or each.isprintable() else repr(each)[1:-1]
            for each in text
        )
        return shown if self.unicode else shown.encode("ascii", "backslashreplace").decode()


def report(found: DryRun, style: Style) -> Iterator[str]:
    """The lines of a dry run."""
    config, topology, shape = found.config, found.topology, found.info.shape
    context = f", context {shape.max_position}" if shape.max_position else ""
    yield (
        f"model     {config.model}: {count(found.info.parameter_count)} parameters, {shape.num_layers} layers of width "
        f"{shape.hidden_size}, vocabulary {shape.vocab_size}{context}"
    )
    trained = "all parameters" if config.lora is None else f"a LoRA adapter of rank {config.lora.rank}"
    yield f"training  {trained}, engine {config.engine} on {found.platform}, {config.precision}"
    layout, *more = topology.describe().splitlines()
    yield f"layout    {layout}"
    yield from (f"          {line}" for line in more)
    yield f"steps     {_length(found)}"
    yield f"output    {config.output}; {in_words(found.free_disk)} free there"
    yield from (f"          {line}" for line in config.template_remarks())
    yield from (f"          warning: {line}" for line in warnings(found))
    yield ""
    yield from memory_table(found)
    yield ""
    yield from data_table(found)
    yield from (f"          {line}" for line in found.remarks)
    yield ""
    yield f"the first samples of step 1, as the model sees them: {style.legend}"
    for sample in found.shown:
        yield from sample_text(sample, style)


def count(number: int) -> str:
    """A large number in words: ``1.72 billion``."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def _length(found: DryRun) -> str:
    config, plan = found.config, found.steps
    unit = "pairs" if config.dpo is not None else "samples"
    budget = f"{plan.budget} (auto, by the estimate)" if config.batching.micro_batch_tokens == "auto" else plan.budget
    most = f"up to {plan.micro_batches} micro batches" if plan.micro_batches > 1 else "one micro batch"
    return (
        f"{config.steps} of {config.data.global_batch_size} {unit} = {found.epochs:.3g} epochs; {most} a rank, the largest with "
        f"{plan.tokens} of {budget} tokens, {plan.padding:.1%} padding (first {plan.steps} steps)"
    )


def warnings(found: DryRun) -> Iterator[str]:
    """What will work, and probably is not meant."""
    config = found.config
    if found.steps.idle:
        yield (
            f"some of the {found.topology.data} data parallel ranks have no sample in a step: raise data.global_batch_size "
            f"({config.data.global_batch_size})"
        )
    if config.schedule.kind != "constant" and 0 < config.schedule.total_steps < config.steps:
        yield (
            f"schedule.total_steps: {config.schedule.total_steps} ends before the {config.steps} steps do; the rest learn with "
            f"min_lr {config.schedule.min_lr:g}"
        )
    if found.memory is not None and found.memory.total > found.device_memory:
        yield (
            f"a rank will need about {size(found.memory.total)} of memory and has {size(found.device_memory)}: lower "
            "batching.micro_batch_tokens, set recompute.granularity: full, or divide the model over more ranks"
        )
    if found.disk_warning is not None:
        yield found.disk_warning


def memory_table(found: DryRun) -> Iterator[str]:
    """The memory that a rank will need, item by item."""
    memory = found.memory
    if memory is None:
        yield f"memory    there is no estimate for engine {found.config.engine}"
        return
    of_stage = f", of pipeline stage {memory.stage + 1}" if found.topology.pipeline > 1 else ""
    yield f"{'memory':<30}{'':>12}  of a rank{of_stage}, at the peak of a step (estimate)"
    for name, bytes_ in (memory.items | memory.overhead).items():
        yield f"  {name:<28}{size(bytes_):>12}"
    machine = "this machine has for each rank" if found.platform == "cpu" else "the device has"
    yield f"  {'all':<28}{size(memory.total):>12}  {machine} {size(found.device_memory)}"
    if found.recomputed is not None:
        yield f"  {'recomputed':<28}{size(found.recomputed.total):>12}  with recompute.granularity: full"
    yield from (f"  {line}" for line in memory.remarks)


def size(bytes_: int) -> str:
    """Bytes in a unit that leaves few digits."""
    return f"{bytes_ / GIB:.2f} GiB" if bytes_ >= GIB else f"{bytes_ / MIB:.1f} MiB"


def data_table(found: DryRun) -> Iterator[str]:
    """Statistics, a line for each part of the data."""
    each, unit = (2, "pairs") if found.config.dpo is not None else (1, "samples")
    yield (
        f"{'data':<10}{unit:>10}{'tokens':>14}{'supervised':>14}{'':>9}{'shortest':>10}{'median':>8}{'mean':>8}{'95 %':>8}"
        f"{'longest':>9}"
    )
    yield _row("learned", found.learned, each)
    if found.held_out is not None:
        yield _row("held out", found.held_out, each)


def _row(name: str, part: SampleStatistics, each: int) -> str:
    share = part.supervised / part.tokens
    return (
        f"{name:<10}{part.samples // each:>10,}{part.tokens:>14,}{part.supervised:>14,} {f'({share:.0%})':>8}{part.shortest:>10,}"
        f"{part.median:>8,}{part.mean:>8,.0f}{part.p95:>8,}{part.longest:>9,}"
    )


def sample_text(sample: ShownSample, style: Style) -> Iterator[str]:
    """A sample, its middle left out where it is long."""
    tokens = sum(piece.tokens for piece in sample.pieces) - 1  # the last one is predicted, and not read
    learned = sum(piece.tokens for piece in sample.pieces if piece.weight)
    yield f"--- {sample.name}: {tokens} tokens, {learned} learned"
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
