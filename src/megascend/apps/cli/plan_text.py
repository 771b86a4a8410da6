"""Format the output of ``megascend plan``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from megascend.apps.cli.dry_run_text import count
from megascend.apps.cli.text import GIB, table
from megascend.apps.plan.hardware import Hardware
from megascend.apps.plan.pipeline import TimedPass
from megascend.apps.plan.rl import Split
from megascend.apps.plan.search import Candidate, difference
from megascend.apps.train.layout_plan import LayoutPlan, run_file
from megascend.config import RunConfig
from megascend.errors import redacted
from megascend.runtime.io.paths import format_bytes

WIDTH = 110
"""Columns of a pipeline's drawing."""
DRAWN_ROUNDS = 3
"""Rounds of one micro batch for each stage that are drawn of a longer step."""
FORWARD, BACKWARD, IDLE = "0123456789", "abcdefghij", "."
SHOWN_SPLITS = 5
"""Divisions between engines and trainer that are shown."""
SHOWN_PARTS = 3
"""Parts in which a layout differs from the best one, that are shown."""


def report(plan: LayoutPlan, *, explain: bool = False) -> Iterator[str]:
    """Yield the lines of a plan."""
    request, hardware = plan.request, plan.hardware
    info = plan.info
    mode = "all parameters" if request.config.lora is None else f"LoRA of rank {request.config.lora.rank}"
    yield (
        f"model     {request.config.model}: {count(info.parameter_count)} parameters "
        f"({count(info.active_matmul_parameters)} multiply a token), {mode}"
    )
    nodes = -(-request.cards // hardware.cards_per_node)
    yield f"cluster   {request.cards} x {hardware.title}, {nodes} node{'s' if nodes > 1 else ''}"
    yield f"step      {request.global_batch} samples of {request.length} tokens: {request.tokens:,} tokens"
    yield (
        f"searched  {plan.plan.legal} legal layouts, {plan.plan.fitting} variants of them that fit; "
        f"{plan.plan.evaluations} evaluations"
    )
    if hardware.warning:
        yield f"warning   {hardware.warning}"
    if plan.unchecked:
        yield f"warning   the engine did not check these layouts: {plan.unchecked}"
    yield from (f"refused   {candidate.describe()}: {reason}" for candidate, reason in plan.refused)
    if not plan.layouts:
        yield from _nothing_fits(plan)
        return
    yield ""
    yield from _table(plan.layouts)
    best = plan.layouts[0]
    for rank, other in enumerate(plan.layouts[1:], start=2):
        yield f"{rank} loses {1000 * (other.time.seconds - best.time.seconds):,.1f} ms to 1: {_reasons(best, other)}"
    yield ""
    yield f"layout 1: {plan.mfu:.1%} of the peak (MFU, without recomputation)"
    yield from _parts(best)
    if explain:
        yield ""
        yield from draw(best)
    yield ""
    yield "the run file of layout 1:"
    yield run_file(best).rstrip("\n")


def report_split(splits: list[Split], config: RunConfig, hardware: Hardware, length: int) -> Iterator[str]:
    """Yield the lines of a division between engines and trainer."""
    yield (
        f"cluster   {splits[0].engines.devices + splits[0].trainer.topology.world_size} x {hardware.title}; a step is "
        f"{config.data.global_batch_size} responses of {length} tokens"
    )
    if hardware.warning:
        yield f"warning   {hardware.warning}"
    yield "warning   the speed of engines is a bound by memory bandwidth, and was not compared with measurements"
    titles = ("engines", "sampling, s", "trainer", "training, s", "one waits", "layout of the trainer")
    rows = (
        (
            f"{split.engines.devices // split.engines.tensor} x TP{split.engines.tensor}",
            f"{split.generation_s:.3g}",
            str(split.trainer.topology.world_size),
            f"{split.trainer.time.seconds:.3g}",
            f"{split.idle:.0%}",
            split.trainer.describe(),
        )
        for split in splits[:SHOWN_SPLITS]
    )
    yield from table(titles, rows, left=(5,))


def _nothing_fits(plan: LayoutPlan) -> Iterator[str]:
    if plan.plan.smallest is None:
        yield (
            f"\nno layout: {plan.request.global_batch} samples, {plan.request.cards} devices and this model have no legal "
            "layout in common: change the number of devices, or raise the batch"
        )
        return
    topology, memory = plan.plan.smallest
    yield (
        f"\nno layout fits: the one that needs least, {memory.total / GIB:.1f} GiB of {plan.hardware.memory / GIB:.1f} GiB, is "
        f"{topology.describe().splitlines()[0]}: use more devices, shorter samples, or LoRA"
    )


def _table(candidates: list[Candidate]) -> Iterator[str]:
    rows = (
        (
            str(rank),
            candidate.describe(),
            f"{candidate.time.seconds:.3g}",
            f"{candidate.tokens_per_second:,.0f}",
            f"{candidate.memory.total / GIB:.1f}",
            f"{candidate.time.bubble / candidate.time.seconds:.0%}",
        )
        for rank, candidate in enumerate(candidates, start=1)
    )
    yield from table(("", "layout", "s/step", "tokens/s/device", "GiB", "bubble"), rows, left=(1,))


def _reasons(best: Candidate, other: Candidate) -> str:
    changes = difference(best, other)[:SHOWN_PARTS]
    return ", ".join(f"{name} {1000 * seconds:+,.1f} ms" for name, seconds in changes)


def _parts(candidate: Candidate) -> Iterator[str]:
    """Yield time and memory by part, side by side."""
    seconds, memory = candidate.time.seconds, candidate.memory
    times = [
        (name, f"{1000 * part:,.1f} ms", f"{part / seconds:.1%}")
        for name, part in sorted(candidate.time.parts.items(), key=lambda part: -part[1])
    ]
    on_host = {f"{name} (host)": size for name, size in memory.host.items()}
    sizes = [(name, format_bytes(size)) for name, size in (memory.items | memory.overhead | on_host).items()]
    rows = ([*time, *size][:5] for time, size in zip_longest(times, sizes, fillvalue=("", "", "")))
    yield from table(("time of a step", "", "", f"memory of a rank of stage {memory.stage + 1}", ""), rows, left=(0, 3))


def draw(candidate: Candidate, width: int = WIDTH) -> Iterator[str]:
    """Draw the passes of a step, a line for each stage."""
    time = candidate.time
    stages = len(time.durations)
    if stages == 1:
        yield "one pipeline stage: passes follow each other, and nothing waits"
        return
    count = min(time.micro_batches, DRAWN_ROUNDS * stages)
    spans = type(time)(time.busy, time.durations, count, time.transfer, time.overlaps).spans()
    end = spans[-1].end
    part = f"the first {count} of {time.micro_batches}" if count < time.micro_batches else f"all {count}"
    yield (
        f"pipeline of {part} micro batches, {1000 * end:,.0f} ms: digits are forward and letters backward passes (0 and a of the "
        "same micro batch), dots are waits"
    )
    layers = [""] * stages
    if candidate.topology.is_uneven:
        yield "after a stage's number: layers of its chunks"
        total = sum(candidate.topology.chunk_layers)
        layers = ["+".join(str(len(chunk)) for chunk in candidate.topology.layers_of(n, total)) for n in range(stages)]
        widest = max(map(len, layers))
        layers = [f"{text:>{widest}} " for text in layers]
    for stage in range(stages):
        line = _line([span for span in spans if span.stage == stage], end, width)
        yield f"stage {stage + 1:>2} {layers[stage]}{line}"


def _line(spans: list[TimedPass], end: float, width: int) -> str:
    line = [IDLE] * width
    for span in spans:
        first, last = (round(moment / end * width) for moment in (span.start, span.end))
        sign = (FORWARD if span.forward else BACKWARD)[span.micro_batch % 10]
        for column in range(first, max(last, first + 1)):
            if column < width:
                line[column] = sign
    return "".join(line)


def as_json(plan: LayoutPlan) -> dict[str, Any]:
    """Return a plan for other programs."""
    return {
        "device": plan.hardware.name,
        "measured": plan.hardware.measured,
        "cards": plan.request.cards,
        "length": plan.request.length,
        "global_batch": plan.request.global_batch,
        "legal": plan.plan.legal,
        "fitting": plan.plan.fitting,
        "evaluations": plan.plan.evaluations,
        "unchecked": plan.unchecked,
        "layouts": [_layout(candidate) for candidate in plan.layouts],
    }


def _layout(candidate: Candidate) -> Mapping[str, Any]:
    return {
        "description": candidate.describe(),
        "seconds": candidate.time.seconds,
        "tokens_per_second_per_device": candidate.tokens_per_second,
        "micro_batch": candidate.micro_batch,
        "micro_batches": candidate.micro_batches,
        "time": candidate.time.parts,
        "memory": {**candidate.memory.items, **candidate.memory.overhead},
        "memory_total": candidate.memory.total,
        "host_memory": dict(candidate.memory.host),
        "settings": redacted(candidate.config.model_dump(mode="json", exclude_defaults=True)),
    }
