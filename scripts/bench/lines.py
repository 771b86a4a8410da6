"""The lines of the suite: for each the benchmark and options that measure it, and its rows from the figures.

A line is one call of one benchmark, which ends with a nonzero exit code if its runs do not agree numerically. Pure: nothing here
starts a process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.gate import Row

Figures = Mapping[str, Any]

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 peak in FLOP/s by a part of the device's name."""

DISK = 0.25
"""Noise of figures that involve a disk."""
START = 0.2
HOST_BOUND = 0.4
"""Noise of a step without graphs: the device waits for the host, and one host took 151, 161 and 205 ms for the same request."""


@dataclass(frozen=True)
class Size:
    """A size of a line's work at full scale.

    Attributes:
        label: its name in rows and stored ratios, since ratios of different sizes are not comparable.
        gib: device memory that it needs, in GiB: the highest peak of its runs (measured, or estimated from another size at
            18 bytes a parameter) and a margin for the allocator.
        options: options of the benchmark in addition to the line's.
    """

    label: str
    gib: float
    options: tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """A figure that others have published for a line's work, by GPU.

    Attributes:
        tokens_per_s: of one GPU.
        on: their hardware and layout.
        source: file and date, or commit.
        goal: what is expected of this package, in multiples of the figure.
    """

    tokens_per_s: float
    on: str
    source: str
    goal: float


@dataclass(frozen=True)
class Line:
    """One line of the suite.

    Attributes:
        full, tiny: options of the benchmark at either scale.
        sizes: sizes at full scale, the largest first; empty if its one size fits everywhere.
    """

    name: str
    suite: str
    bench: str
    full: Sequence[str]
    tiny: Sequence[str]
    rows: Callable[[str, Figures], list[Row]]
    deadline_s: float
    """At full scale."""
    about: str
    sizes: tuple[Size, ...] = ()
    published: Published | None = None
    cards: int = 1
    """GPUs that it needs."""


def training(name: str, figures: Figures) -> list[Row]:
    """Build rows of train: tokens per second of every run relative to the first one."""
    runs, work = figures["runs"], figures["work"]
    medians = [statistics.median(run["ms"]) for run in runs]
    tokens = 1000 * work["sequences"] * work["length"]
    return [
        Row(f"{name}/{run['run']}", tokens / ms, "tokens/s", medians[0] / ms if index else None, runs[0]["run"])
        for index, (run, ms) in enumerate(zip(runs, medians, strict=True))
    ]


def beside(published: Published) -> Callable[[str, Figures], list[Row]]:
    """Return a builder of rows of train: tokens per second of every kind of run relative to a published figure."""

    def rows(name: str, figures: Figures) -> list[Row]:
        work, ms = figures["work"], dict[str, list[float]]()
        on_gpu = work["platform"] == "cuda" or None
        for run in figures["runs"]:
            ms.setdefault(run["run"], []).extend(run["ms"])
        tokens = 1000 * work["sequences"] * work["length"] / work["ranks"]
        return [
            Row(f"{name}/{run}", speed, "tokens/s", on_gpu and speed / published.tokens_per_s, published.on)
            for run, times in ms.items()
            for speed in [tokens / statistics.median(times)]
        ]

    return rows


def card(line: Line, figures: Figures) -> dict[str, Any]:
    """Return what is stored of a published line: the work, both figures, and each run with its losses."""
    work, published = figures["work"], line.published
    assert published is not None
    runs = []
    for run in figures["runs"]:
        seconds = statistics.median(run["ms"]) / 1000
        tflops = figures["model_flops"] / seconds / work["ranks"] / 1e12
        peak = next((peak for part, peak in PEAK_BF16.items() if part in run["device"]), None)
        runs.append(
            {
                "run": run["run"],
                "tokens/s": round(work["sequences"] * work["length"] / seconds / work["ranks"]),
                "TFLOP/s": round(tflops, 1),
                "MFU": peak and round(tflops * 1e12 / peak, 3),
                "peak GiB": round(run["peak_gib"], 1),
                "loss": [round(run["losses"][index], 4) for index in (0, -1)],
                "norm": [round(run["norms"][index], 4) for index in (0, -1)],
            }
        )
    return {
        "line": line.name,
        "command": " ".join(["python scripts/bench.py", line.bench, *line.full]),
        "device": figures["runs"][0]["device"],
        "versions": figures["runs"][0]["versions"],
        **{name: work[name] for name in ("ranks", "sequences", "length", "documents", "lora", "precision")},
        "published": asdict(published),
        "runs": runs,
    }


def small(name: str, figures: Figures) -> list[Row]:
    """Build rows of small: eager requests relative to device time, and graphs relative to eager."""
    rows = []
    for tokens, eager in figures["eager"]["request"].items():
        graphs = figures["graphs"]["request"][tokens]
        eager_ms, graphs_ms = statistics.median(eager["step"]), statistics.median(graphs["step"])
        share = eager["device"] / eager_ms if math.isfinite(eager["device"]) else None
        rows.append(Row(f"{name}/{tokens} eager", eager_ms, "ms", share, "the device's own time", HOST_BOUND))
        rows.append(Row(f"{name}/{tokens} graphs", graphs_ms, "ms", eager_ms / graphs_ms, "eager", HOST_BOUND))
        busy = graphs["device"] / graphs_ms if math.isfinite(graphs["device"]) else None
        rows.append(Row(f"{name}/{tokens} graphs, busy", graphs_ms, "ms", busy, "the device's own time", 0.05))
    return rows


def mixed(name: str, figures: Figures) -> list[Row]:
    """Build rows of lora: all tenants in one batch, relative to a single adapter and to tenants in turn."""
    rows = []
    for size in figures["sizes"]:
        tenants, length = size["size"]
        ms = {mode: statistics.median(size[mode]["ms"]) for mode in "abc"}
        label, speed = f"{name}/{tenants} x {length}", 1000 * tenants * length / ms["b"]
        rows.append(Row(label, speed, "tokens/s", ms["c"] / ms["b"], "a single adapter"))
        rows.append(Row(f"{label}, in turn", speed, "tokens/s", ms["a"] / ms["b"], "tenants in turn", 0.1))
    return rows


def files(way: str, against: str, of: str) -> Callable[[str, Figures], list[Row]]:
    """Return a builder of rows of files: seconds of ``way`` relative to the disk's for the same bytes."""

    def rows(name: str, figures: Figures) -> list[Row]:
        seconds = {mode: min(times) for mode, times in figures["seconds"].items()}
        ratio = seconds[against] / seconds[way]
        return [
            Row(f"{name}/{against}", seconds[against], "s", None, ""),
            Row(f"{name}/{way}", seconds[way], "s", ratio, of, DISK),
        ]

    return rows


def save(name: str, figures: Figures) -> list[Row]:
    """Build rows of checkpoint."""
    sync, stall = min(figures["sync_s"]), min(figures["async_stall_s"])
    single_write, parallel_writes, read = figures["disk_write_s"], figures["disk_writes_s"], figures["disk_read_s"]
    return [
        Row(f"{name}/plain file written", single_write, "s", None, ""),
        Row(f"{name}/plain files at once", parallel_writes, "s", None, ""),
        Row(f"{name}/sync", sync, "s", min(single_write, parallel_writes) / sync, "the faster of these", DISK),
        Row(f"{name}/async, training waits", stall, "s", sync / stall, "sync", DISK),
        Row(f"{name}/load", figures["load_s"], "s", read / figures["load_s"], "a plain file read", DISK),
    ]


def start(name: str, figures: Figures) -> list[Row]:
    """Build rows of start: the share of imports in each start."""
    imports, ready = figures["imports_s"], figures["ready_s"]
    rows = [
        Row(f"{name}/imports", imports, "s", None, ""),
        Row(f"{name}/MegatronBackend, beside imports", ready, "s", imports / (imports + ready), "imports alone", START),
    ]
    steps = {"first_step_s": "train", "kept_s": "train, self-check known", "torchrun_s": "train under torchrun"}
    for key, label in steps.items():
        first = figures[key]
        rows.append(Row(f"{name}/{label}, first step", first, "s", imports / first, "imports alone", START))
    return rows


def layers(count: int, gib: float) -> Size:
    """Return a size of a model by its number of layers."""
    return Size(f"{count}-layers", gib, ("--layers", str(count)))


def published(name: str, work: str, run: str, figure: Published, size: Size, deadline_s: float) -> Line:
    """Return a line of train whose work others have published; its run is done twice."""
    tiny = f"--tiny --sequences 2 --steps 2 --run megascend {'--lora 4' if '--lora' in work else ''}"
    return Line(
        name, "published", "train", words(f"{work} --run {run} --run {run}"), words(tiny), beside(figure), deadline_s,
        f"{work.split()[1]}, {figure.on}", (size,), figure,
    )  # fmt: skip


words = str.split
PACKS = "--sequences 32 --length 2048 --documents 5"
CARDS = "Megatron-Bridge 067f987d, examples/model_verification_cards"
BASELINES = "prime-rl 559b4477, benchmarks/baselines (2026-01-15), recompute"
DENSE = "--run bare --run megascend --run megascend:graphs=true"
TINY = "--tiny --steps 2 --run bare --run megascend"

LINES = (
    Line(
        "dense-1.7b", "dense", "train", words(f"--warmup 4 --steps 8 {DENSE}"), words(TINY), training, 360,
        "Qwen3-1.7B shapes, 8 x 4096 tokens a step, all parameters", (layers(28, 57), layers(14, 44)),
    ),
    Line(
        "dense-4b", "dense", "train", words(f"--model 4b --warmup 2 --steps 5 {DENSE}"), words(f"--layers 3 {TINY}"), training,
        480, "Qwen3-4B shapes, likewise", (layers(36, 118), layers(18, 66), layers(9, 44)),
    ),
    Line(
        "moe", "moe", "train",
        words("--model 30b-a3b --warmup 3 --steps 5 --run bare --run megascend:micro_batch_tokens=16384"),
        words(f"--model tiny-moe {TINY}"), training, 360, "Qwen3-30B-A3B shapes, 8 x 4096 tokens a step, all parameters",
        (layers(6, 96), layers(4, 74), layers(2, 50)),
    ),
    Line(
        "small", "small", "small", words("--requests 0 --mixed"), words("--tiny --requests 0 --tokens 24 --mixed"), small, 240,
        "one LoRA request of 256, 1024, 4096 tokens, 1.7B shapes",
    ),
    Line(
        "small-moe", "small", "small",
        words("--model 30b-a3b --layers 6 --requests 0 --tokens 256 1024 --mixed"),
        words("--tiny --model tiny-moe --requests 0 --tokens 24 --mixed"), small, 240,
        "one LoRA request of 256, 1024 tokens, adapters on all experts, 30B-A3B shapes, 6 layers",
    ),
    Line(
        "mixed", "mixed", "lora", words("--graphs --micro-batch-tokens 8192 --steps 5"), words("--tiny"), mixed, 240,
        "8 x 1024 and 32 x 512 tokens of as many LoRA tenants, 1.7B shapes",
    ),
    Line(
        "load", "load", "files", words("--what load"), words("--what load --tiny"),
        files("MegatronBackend", against="reads", of="parallel direct reads"), 300,
        "a Hugging Face directory of 4B shapes, out of no page cache",
    ),
    Line(
        "export", "export", "files", words("--what export"), words("--what export --tiny"),
        files("export", against="writes", of="parallel writes"), 240, "the same directory written, fsync included",
    ),
    Line(
        "save", "save", "checkpoint", words("--saves 2 --syncs 1"), words("--tiny --saves 2 --syncs 1"), save, 300,
        "a checkpoint with optimizer state, 1.7B shapes",
    ),
    Line("start", "start", "start", [], [], start, 200, "a tiny model: until ready, until its first step is done"),
    published(
        "lora-8b",
        f"--model 8b --lora 8 --targets q_proj,k_proj,v_proj,o_proj {PACKS} --warmup 2 --steps 5",
        "megascend:micro_batch_tokens=8192",
        Published(8429.3, "one H100, packs of 2048", f"{CARDS}/qwen3-8b, peft", 1.2),
        Size("36-layers", 76, ()), deadline_s=300,
    ),
    published(
        "lora-4b-16k",
        "--model 4b --lora 16 --sequences 2 --length 16384 --warmup 2 --steps 4",
        "megascend:recompute=layernorm+mlp",
        Published(6229.2, "one H100", f"{BASELINES}, 16384", 1.5),
        Size("36-layers", 60, ()), deadline_s=240,
    ),
    published(
        "lora-4b-64k",
        "--model 4b --lora 16 --sequences 2 --length 65536 --warmup 1 --steps 2",
        "megascend:recompute=layernorm+mlp",
        Published(4164.1, "one H100", f"{BASELINES}, 65536", 1.5),
        Size("36-layers", 120, ()), deadline_s=360,
    ),
    published(
        "lora-30b-a3b-16k",
        "--model 30b-a3b --lora 16 --sequences 2 --length 16384 --warmup 1 --steps 2",
        "megascend:recompute=full",
        Published(4137.5, "each of 8 H100", f"{BASELINES}, 16384", 3.0),
        Size("48-layers", 79, ()), deadline_s=480,
    ),
    published(
        "lora-gpt-oss-20b",
        f"--model tests/models/published/gpt-oss-20b.json --lora 32 {PACKS} --warmup 2 --steps 4",
        "megascend:micro_batch_tokens=8192",
        Published(5171.5, "one H100, packs of 2048", f"{CARDS}/gpt-oss-20b, peft", 2.0),
        Size("24-layers", 120, ()), deadline_s=480,
    ),
    published(
        "nemotron-4b",
        "--model tests/models/published/nemotron-3-nano-4b.json --sequences 8 --length 4096 --warmup 3 --steps 5",
        "megascend",
        Published(19581.2, "each of 8 H100, DP8", f"{CARDS}/nemotron-3-nano-4b, pretrain", 1.0),
        Size("42-layers", 120, ()), deadline_s=300,
    ),
    Line(
        "eight-dense", "eight", "train",
        words("--model 8b --ranks 8 --sequences 32 --warmup 3 --steps 5 --run megascend --run megascend:tensor=2")
        + words("--run megascend:pipeline=2:virtual_pipeline=2 --run fsdp:compile=true"),
        words("--tiny --ranks 4 --layers 4 --run megascend --run megascend:tensor=2")
        + words("--run megascend:pipeline=2:virtual_pipeline=2 --run fsdp"),
        training, 480, "Qwen3-8B shapes on eight GPUs, all parameters: DP8, TP2, PP2 x VPP2, engine fsdp", cards=8,
    ),
    Line(
        "eight-long", "eight", "train",
        words("--model 8b --ranks 8 --sequences 1 --length 131072 --warmup 1 --steps 3")
        + words("--run megascend:context=8 --run megascend:context=8:recompute=full"),
        words("--tiny --ranks 2 --run megascend --run megascend:context=2"),
        training, 480, "Qwen3-8B shapes on eight GPUs, 131,072 tokens: CP8", cards=8,
    ),
    Line(
        "eight-moe", "eight", "train",
        words("--model 30b-a3b --ranks 8 --sequences 32 --warmup 2 --steps 4 --run megascend:expert=8")
        + words("--run megascend:tensor=2:expert=8:expert_tensor=1 --run fsdp:expert=8:compile=true"),
        words("--tiny --model tiny-moe --ranks 4 --run megascend:expert=4")
        + words("--run megascend:tensor=2:expert=4:expert_tensor=1 --run fsdp:expert=4"),
        training, 590, "Qwen3-30B-A3B shapes on eight GPUs, all parameters: EP8, TP2 x EP8, engine fsdp", cards=8,
    ),
    Line(
        "eight-lora", "eight", "train",
        words("--model 30b-a3b --lora 16 --ranks 8 --sequences 16 --length 16384 --warmup 1 --steps 3")
        + words("--run megascend:expert=8:recompute=full --run megascend:recompute=full"),
        words("--tiny --model tiny-moe --lora 4 --ranks 2 --run megascend:expert=2 --run megascend"),
        training, 590, "Qwen3-30B-A3B shapes on eight GPUs, LoRA, 16,384 tokens: EP8, DP8", cards=8,
    ),
)  # fmt: skip


def select(only: str | None) -> list[Line]:
    """Return the lines of ``--only``: names of suites or lines.

    Raises:
        ValueError: a name is unknown.
    """
    if only is None:
        return list(LINES)
    names = [name for name in only.split(",") if name]
    choices = {name for line in LINES for name in (line.name, line.suite)}
    if unknown := [name for name in names if name not in choices]:
        raise ValueError(f"--only {','.join(unknown)}: there are {', '.join(sorted(choices))}")
    return [line for line in LINES if line.name in names or line.suite in names]


def sized(line: Line, memory_gib: float) -> Line:
    """Return ``line`` at the largest of its sizes that a device of ``memory_gib`` GiB holds, with that size in its name.

    Raises:
        ValueError: the smallest size needs more.
    """
    if not line.sizes:
        return line
    size = next((size for size in line.sizes if size.gib <= memory_gib), None)
    if size is None:
        smallest = line.sizes[-1]
        raise ValueError(
            f"its smallest size, {smallest.label}, needs {smallest.gib:g} GiB of device memory; this device has {memory_gib:.1f}"
        )
    return replace(line, name=f"{line.name}@{size.label}", full=[*line.full, *size.options], sizes=())
