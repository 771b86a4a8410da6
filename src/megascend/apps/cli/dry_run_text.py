"""Format the output of ``megascend train`` and ``rl`` with ``--dry-run``. Pure, except that it inspects the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style as RichStyle

from megascend.apps.cli.text import GIB, labelled, table
from megascend.runtime.io.paths import format_bytes

if TYPE_CHECKING:
    from megascend.apps.data.preview import SamplePiece
    from megascend.apps.train.dry_run import DryRun, RlDryRun, ShownSample, SupervisedDryRun
    from megascend.apps.train.layout_plan import Suggestion

MIB = 2**20
PIECE = 400
"""Characters of a piece's beginning and of its end that are shown."""
PIECES = 24
"""Pieces of a sample's beginning and of its end that are shown."""
LEARNED, NOT_LEARNED = RichStyle(color="green", bold=True), RichStyle(dim=True)


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
    def of(cls, stream: TextIO) -> Style:
        """Use colours where rich does: on a terminal, unless it is a dumb one or NO_COLOR is set."""
        console = Console(file=stream)
        return cls(console.color_system is not None and not console.no_color, console.encoding.startswith("utf"))

    @property
    def legend(self) -> str:
        newline = "↵" if self.unicode else "\\n"
        if self.colour:
            return f"{self.piece('learned', 1.0)}, {self.piece('not learned', 0.0)}; {newline} is a line break"
        return f"{self.piece('learned', 1.0)}, not learned; {newline} is a line break"

    def piece(self, text: str, weight: float) -> str:
        """Format the text of tokens by their weight; a weight other than 0 and 1 precedes it."""
        text = f"{weight:g} x {text}" if weight not in (0.0, 1.0) else text
        if self.colour:
            style = LEARNED if weight else NOT_LEARNED
            # Line by line: some terminals and pagers end colours with the line.
            return "\n".join(style.render(line, color_system=ColorSystem.STANDARD) for line in text.split("\n"))
        opening, closing = ("⟦", "⟧") if self.unicode else ("[[", "]]")
        return f"{opening}{text}{closing}" if weight else text

    def visible(self, text: str) -> str:
        """Mark line breaks; escape control characters, which could command the terminal, except tabs."""
        escaped = (
            character if character in "\n\t" or character.isprintable() else repr(character)[1:-1] for character in text
        )
        marked = "".join(escaped).replace("\n", "↵\n" if self.unicode else "\\n\n")
        return marked if self.unicode else marked.encode("ascii", "backslashreplace").decode()


def report(dry: SupervisedDryRun, style: Style) -> Iterator[str]:
    """Yield the lines of a dry run."""
    yield from _model_and_layout(dry)
    if dry.suggestion is not None:
        yield from labelled("", suggestion_lines(dry.suggestion))
    yield from labelled("steps", [_length(dry)])
    yield from _output(dry, warnings(dry))
    yield from memory_table(dry)
    yield ""
    yield from data_table(dry)
    yield from source_table(dry)
    yield from labelled("", dry.remarks)
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
    yield from labelled("engines", dry.engines)
    if config.reference is not None:
        reference = config.reference
        penalty = f"{reference.kl_estimator} in the {reference.penalty}, coefficient {reference.coefficient:g}"
        yield f"reference {reference.model}; {penalty if reference.coefficient else 'measured only'}"
    if dry.teacher is not None:
        yield f"teacher   {dry.teacher}"
    evaluated = f", {dry.held_out} for evaluation" if config.evaluation is not None else ""
    shortest, median, longest = dry.prompt_lengths
    lengths = f"{shortest} to {longest} tokens, median {median}" if shortest < longest else f"{longest} tokens each"
    yield f"prompts   {dry.prompts}{evaluated}; {lengths if longest else 'the environment makes them'}"
    trial = dry.trial
    parts = "".join(f", {name} {value:g}" for name, value in trial.rewards.items())
    turns = f" in {trial.turns} turn{'s' * (trial.turns != 1)}" if rollout.environment is not None else ""
    yield f"trial     {trial.source}: reward {trial.reward:g}{parts}{turns}, {trial.seconds:.2g} s, of {CANNED!r}"
    yield from _output(dry, memory_warning(dry, dry.engines_share))
    yield from memory_table(dry, dry.engines_share, dry.processes)


def _model_and_layout(dry: DryRun) -> Iterator[str]:
    config, shape = dry.config, dry.info.shape
    context = f", context {shape.max_position}" if shape.max_position else ""
    yield (
        f"model     {config.model}: {count(dry.info.parameter_count)} parameters, {shape.num_layers} layers of width "
        f"{shape.hidden_size}, vocabulary {shape.vocab_size}{context}"
    )
    trained = "all parameters" if config.lora is None else f"a LoRA adapter of rank {config.lora.rank}"
    if config.base_weights != "unquantised":
        trained += f" on base weights in {config.base_weights}"
    yield f"training  {trained}, engine {config.engine} on {dry.platform}, {config.precision}"
    yield from labelled("layout", dry.topology.describe().splitlines())


def suggestion_lines(suggestion: Suggestion) -> Iterator[str]:
    """Yield the layout that ``megascend plan`` would have chosen."""
    current, better = suggestion.current.time.seconds, suggestion.better.time.seconds
    yield (
        f"megascend plan predicts {suggestion.gain:.0%} shorter steps ({better:.3g} s in place of {current:.3g} s on "
        f"{suggestion.hardware.title}) with {suggestion.better.describe()}"
    )


def count(number: int) -> str:
    """Write a large number in words: ``1.72 billion``."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def _length(dry: SupervisedDryRun) -> str:
    config, plan = dry.config, dry.steps
    budget = f"{plan.budget} (auto, by the estimate)" if config.batching.micro_batch_tokens == "auto" else plan.budget
    batches = f"up to {plan.micro_batches} micro batches" if plan.micro_batches > 1 else "one micro batch"
    epochs = "streamed; of the first batch" if dry.epochs is None else f"= {dry.epochs:.3g} epochs"
    return (
        f"{config.steps} of {config.data.global_batch_size} {dry.train.unit} {epochs}; {batches} a rank, the largest with "
        f"{plan.tokens} of {budget} tokens, {plan.padding:.1%} padding (first {plan.steps} steps)"
    )


def _output(dry: DryRun, problems: Iterator[str]) -> Iterator[str]:
    """Yield where a run writes, and warnings."""
    yield f"output    {dry.config.output}; {format_bytes(dry.free_disk)} free there"
    yield from labelled("", dry.config.template_remarks())
    disk = [] if dry.disk_warning is None else [dry.disk_warning]
    yield from labelled("", (f"warning: {line}" for line in [*problems, *disk]))
    yield ""


def warnings(dry: SupervisedDryRun) -> Iterator[str]:
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


def memory_warning(dry: DryRun, engines_share: float = 0.0) -> Iterator[str]:
    """Yield a warning if the estimate exceeds what engines leave to a rank."""
    available = int(dry.device_memory * (1 - engines_share))
    if dry.memory is not None and dry.memory.total > available:
        yield (
            f"a rank will need about {size(dry.memory.total)} of memory and has {size(available)}: lower "
            "batching.micro_batch_tokens, set recompute.granularity: full, or divide the model over more ranks"
        )


def memory_table(
    dry: DryRun, engines_share: float = 0.0, processes: Mapping[str, int] = MappingProxyType({})
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
    machine = "per rank on this machine" if dry.platform == "cpu" else "on the device"
    engines = f", of which engines take {engines_share:.0%}" if engines_share else ""
    rows = [(name, bytes_, "") for name, bytes_ in (memory.items | memory.overhead).items()]
    rows.append(("total", memory.total, f"of {size(dry.device_memory)} {machine}{engines}"))
    if dry.recomputed is not None:
        rows.append(("recomputed", dry.recomputed.total, "with recompute.granularity: full"))
    rows += [(name, bytes_, "in host memory") for name, bytes_ in memory.host.items()]
    rows += [(name, bytes_, "of weights in host memory beside rank 0") for name, bytes_ in processes.items()]
    titles = ("memory", "", f"per rank{stage}, at the peak of a step (estimate)")
    yield from table(titles, ((f"  {name}", size(bytes_), note) for name, bytes_, note in rows), left=(0, 2))
    yield from (f"  {line}" for line in memory.remarks)


def size(bytes_: int) -> str:
    """Write bytes in a unit that leaves few digits."""
    return f"{bytes_ / GIB:.2f} GiB" if bytes_ >= GIB else f"{bytes_ / MIB:.1f} MiB"


def data_table(dry: SupervisedDryRun) -> Iterator[str]:
    """Yield statistics, a line for each part of the data."""
    rows = []
    for name, part in (("first batch" if dry.epochs is None else "learned", dry.train), ("held out", dry.held_out)):
        if part is not None:
            numbers = (part.samples // part.members, part.tokens, part.supervised)
            lengths = (part.shortest, part.median, round(part.mean), part.p95, part.longest)
            share = f"({part.supervised / part.tokens:.0%})"
            rows.append([name, *map("{:,}".format, numbers), share, *map("{:,}".format, lengths)])
    figures = (dry.train.unit, "tokens", "supervised", "", "shortest", "median", "mean", "95 %", "longest")
    yield from table(("data", *figures), rows)


def source_table(dry: SupervisedDryRun) -> Iterator[str]:
    """Yield the kinds of documents of each source, and the numbers of samples up to each power of two in length."""
    edges = sorted({edge for source in dry.sources for edge in source.histogram})
    rows = (
        [
            source.name,
            ", ".join(f"{number:,} {kind}" for kind, number in source.kinds.items()),
            *(f"{source.histogram.get(edge, 0):,}" for edge in edges),
        ]
        for source in dry.sources
    )
    if edges:
        yield from table(("source", "documents", *(f"to {edge:,}" for edge in edges)), rows, left=(0, 1))


def sample_text(sample: ShownSample, style: Style) -> Iterator[str]:
    """Yield a sample, its middle left out where it is long."""
    learned = sum(piece.tokens for piece in sample.pieces if piece.weight)
    yield f"--- {sample.name}: {sample.tokens} tokens, {learned} learned"
    texts = [style.piece(_shortened(piece, style), piece.weight) for piece in sample.pieces]
    left_out = len(texts) - 2 * PIECES
    if left_out > 0:
        texts[PIECES:-PIECES] = [f"\n[... {left_out} pieces ...]\n"]
    yield "".join(texts)


def _shortened(piece: SamplePiece, style: Style) -> str:
    if len(piece.text) <= 3 * PIECE:
        return style.visible(piece.text)
    left_out = len(piece.text) - 2 * PIECE
    return f"{style.visible(piece.text[:PIECE])} [... {left_out} characters ...] {style.visible(piece.text[-PIECE:])}"
