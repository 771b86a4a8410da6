"""Devices and clusters of them: what a product, attention, moved bytes or a message takes. Pure; no torch.

``devices/NAME.json`` describes a device by its data sheet and by a table of measurements
(:mod:`megascend.apps.plan.calibrate`). A table measured on another device is used by shares of the peak: a product that reaches
70 % of an H200's peak is assumed to reach 70 % of this one's. ``measured`` says which of the two it is.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from megascend.errors import ConfigError

FOLDER = Path(__file__).with_name("devices")
FORMAT = 1
Pass = Literal["forward", "input gradient", "weight gradient"]
PASSES: tuple[Pass, ...] = ("forward", "input gradient", "weight gradient")


@dataclass(frozen=True)
class Link:
    """One direction of a rank's connection: seconds before the first byte arrives, and bytes per second."""

    latency_s: float
    bytes_per_s: float


class Table:
    """Shares of the peak on a grid of sizes, interpolated between logarithms; outside the grid, its nearest value holds."""

    def __init__(self, points: Mapping[tuple[int, ...], float]) -> None:
        if not points:
            raise ConfigError("a table of measurements is empty: measure again with `megascend plan --calibrate FILE`")
        self._points = dict(points)
        dimensions = len(next(iter(points)))
        self._axes = [sorted({point[axis] for point in points}) for axis in range(dimensions)]
        self._cache: dict[tuple[float, ...], float] = {}
        self._holes: dict[tuple[int, ...], float] = {}

    def __call__(self, *sizes: float) -> float:
        """Return the share of the peak at these sizes."""
        if sizes not in self._cache:
            self._cache[sizes] = self._interpolate(sizes)
        return self._cache[sizes]

    def _interpolate(self, sizes: tuple[float, ...]) -> float:
        corners: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
        for axis, size in zip(self._axes, sizes, strict=True):
            position = bisect_right(axis, size)
            if position == 0 or position == len(axis):
                sides = [(1.0, axis[min(position, len(axis) - 1)])]
            else:
                low, high = axis[position - 1], axis[position]
                share = math.log(size / low) / math.log(high / low)
                sides = [(1 - share, low), (share, high)]
            corners = [(weight * part, (*corner, value)) for weight, corner in corners for part, value in sides if part]
        return sum(weight * self._share(corner) for weight, corner in corners)

    def _share(self, corner: tuple[int, ...]) -> float:
        """Return a measured share; where the grid has a hole, that of the nearest point."""
        if corner in self._points:
            return self._points[corner]
        # Stored separately: a share that fills one hole must not be the nearest point of another.
        if corner not in self._holes:
            nearest = min(
                self._points,
                key=lambda point: sum(abs(math.log(a / b)) for a, b in zip(point, corner, strict=True)),
            )
            self._holes[corner] = self._points[nearest]
        return self._holes[corner]


@dataclass(frozen=True)
class Measurements:
    """Tables of one calibrated device, as shares of its peak.

    Attributes:
        products: by pass: (tokens, inputs, outputs).
        grouped: by pass: (experts, rows of each, size of an expert's matrix).
        attention: forward, and backward: (length, width of a head).
        memory: (bytes moved), as a share of the data sheet's bandwidth.
    """

    device: str
    products: Mapping[Pass, Table]
    grouped: Mapping[Pass, Table]
    attention: tuple[Table, Table]
    memory: Table

    @classmethod
    def from_calibration(cls, content: Mapping[str, Any], peak: float, bytes_per_s: float) -> Measurements:
        """Read a file of :mod:`megascend.apps.plan.calibrate`."""
        if content.get("format") != FORMAT:
            raise ConfigError(f"calibration has format {content.get('format')!r}, expected {FORMAT}: measure again")
        missing = [name for name in ("products", "grouped", "attention", "element-wise") if not content.get(name)]
        if missing:
            raise ConfigError(f"calibration of {content.get('device')} lacks {', '.join(missing)}: measure again")

        def rate(amount: float, us: float) -> float:
            # A negative time would be the best of all, in silence.
            if not 0 < us < math.inf:
                raise ConfigError(f"calibration of {content.get('device')} has a time of {us} us: measure again")
            return amount / (us * 1e-6)

        def share(flops: float, us: float) -> float:
            return rate(flops, us) / peak

        products: dict[Pass, Table] = {
            name: Table({tuple(row[:3]): share(2 * math.prod(row[:3]), row[3 + index]) for row in content["products"]})
            for index, name in enumerate(PASSES)
        }
        # The shapes of experts that were measured differ in both sides; their area tells most of it.
        grouped: dict[Pass, Table] = {
            name: Table(
                {
                    (row[0], row[1], row[2] * row[3]): share(2 * math.prod(row[:4]), row[4 + index])
                    for row in content["grouped"]
                }
            )
            for index, name in enumerate(PASSES)
        }
        attention = tuple(
            Table(
                {
                    (row[0], (row[3] + row[4]) // 2): share(
                        attention_flops(row[0], row[1] * (row[3] + row[4]) / 2) * factor, row[5 + index]
                    )
                    for row in sorted(content["attention"], key=lambda row: row[1])  # of equal widths, most heads
                }
            )
            for index, factor in enumerate((1.0, BACKWARD_ATTENTION))
        )
        memory = Table({(row[0],): rate(row[0], row[1]) / bytes_per_s for row in content["element-wise"]})
        return cls(str(content["device"]), products, grouped, (attention[0], attention[1]), memory)


UNDER_LOAD = 0.95
"""Speed of products and attention in a step, relative to the calibration's: a step keeps the device at its power limit, which
lowers the clock. One number for all devices and models, chosen so that it suits the steps measured here (docs/planning.md)."""
BACKWARD_ATTENTION = 2.5
"""Products of the backward pass of flash attention, relative to the forward pass: five to two."""


def attention_flops(length: float, width: float) -> float:
    """Return the FLOPs of causal attention of one sample, forward; ``width``: mean of all query and all value heads."""
    return 2 * length**2 * width


@dataclass(frozen=True)
class Hardware:
    """A device, and the cluster that is made of it.

    Attributes:
        name: as on the command line; ``title``: as a data sheet writes it.
        platform: value of the setting ``platform``.
        memory: bytes of the device.
        peak: dense bf16 FLOP/s of the data sheet; ``bytes_per_s``: bandwidth of its memory.
        fp8: peak of fp8 products relative to bf16; 1: none.
        cards_per_node: devices that ``node`` connects; ``network`` connects devices of different nodes.
        launch_s: seconds of the host for one kernel; ``gap_s``: seconds between two kernels that were launched in time.
        measurements: tables, of this device or of another.
        measured: the tables were measured on this device.
        sources: where the figures are from.
    """

    name: str
    title: str
    platform: str
    memory: int
    peak: float
    bytes_per_s: float
    fp8: float
    cards_per_node: int
    node: Link
    network: Link
    launch_s: float
    gap_s: float
    measurements: Measurements
    measured: bool
    sources: tuple[str, ...] = field(default=())

    def product(self, tokens: float, inputs: float, outputs: float, kind: Pass) -> float:
        """Return the seconds of one of a linear layer's three products."""
        if min(tokens, inputs, outputs) <= 0:
            return 0.0
        share = self.measurements.products[kind](tokens, inputs, outputs)
        computing = 2 * tokens * inputs * outputs / (self.peak * UNDER_LOAD * share)
        # Shapes below the grid: their operands have to be read at least.
        return max(computing, 2 * (tokens * inputs + inputs * outputs + tokens * outputs) / self.bytes_per_s)

    def grouped_product(self, experts: float, rows: float, inputs: float, outputs: float, kind: Pass) -> float:
        """Return the seconds of one grouped product of experts with ``rows`` rows each."""
        if min(experts, rows, inputs, outputs) <= 0:
            return 0.0
        share = self.measurements.grouped[kind](experts, rows, inputs * outputs)
        computing = 2 * experts * rows * inputs * outputs / (self.peak * UNDER_LOAD * share)
        moved = 2 * experts * (rows * inputs + inputs * outputs + rows * outputs)
        return max(computing, moved / self.bytes_per_s)

    def attention(self, tokens: float, length: float, width: float, head_dim: float, *, backward: bool) -> float:
        """Return the seconds of causal attention.

        Args:
            tokens: of all samples; ``length``: of one of them.
            width: mean of the widths of all query heads, and of all value heads, on the rank.
            head_dim: mean of the widths of a query head and a value head.
        """
        flops = tokens / length * attention_flops(length, width) * (BACKWARD_ATTENTION if backward else 1.0)
        return flops / (self.peak * UNDER_LOAD * self.measurements.attention[backward](length, head_dim))

    def moved(self, count: float, kernels: float = 1.0) -> float:
        """Return the seconds in which ``kernels`` element-wise kernels move ``count`` bytes."""
        if count <= 0:
            return 0.0
        return count / (self.bytes_per_s * self.measurements.memory(count / kernels))

    # --- collectives ---

    def collective(self, kind: str, size: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a collective of ``ranks``.

        Args:
            kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``send``.
            size: bytes of the larger side on a rank; of all_to_all, what a rank sends, including to itself.
        """
        return collective_seconds(self, kind, size, len(ranks), nodes_of(tuple(ranks), self.cards_per_node))

    @cached_property
    def warning(self) -> str | None:
        """Return a sentence about figures that nobody measured on this device."""
        if self.measured:
            return None
        return (
            f"{self.title}: nothing was measured on this device: peaks are the vendor's, and kernels are assumed to reach the "
            f"same share of them as on {self.measurements.device}"
        )


@lru_cache(maxsize=65536)
def nodes_of(ranks: tuple[int, ...], cards_per_node: int) -> int:
    """Count the nodes that hold these ranks."""
    return len({rank // cards_per_node for rank in ranks})


def collective_seconds(hardware: Hardware, kind: str, size: float, ranks: int, nodes: int) -> float:
    """Return the seconds of a collective of ``ranks`` ranks that are spread evenly over ``nodes`` nodes.

    Rings pass every link: within a node a rank's own, and between nodes those of all members that a node has, since each member
    has its own network card. An all-to-all sends to each peer over the link that leads to it.
    """
    if ranks == 1 or size <= 0:
        return 0.0
    node, network = hardware.node, hardware.network
    inside = max(1, ranks // nodes)
    share = (ranks - 1) / ranks
    if kind == "send":
        link = network if nodes > 1 else node
        return link.latency_s + size / link.bytes_per_s
    if kind == "all_to_all":
        local = size * (inside - 1) / ranks / node.bytes_per_s
        remote = size * (ranks - inside) / ranks / network.bytes_per_s
        latency = node.latency_s if nodes == 1 else network.latency_s
        return latency + max(local, remote)
    rate = node.bytes_per_s if nodes == 1 else min(node.bytes_per_s, inside * network.bytes_per_s)
    # Latency grows with the logarithm: libraries change from rings to trees where it matters.
    latency = node.latency_s * math.log2(max(2, inside)) + (network.latency_s * math.log2(nodes) if nodes > 1 else 0.0)
    factor = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}[kind]
    return latency + factor * share * size / rate


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json") if not path.stem.endswith("-measured"))


def matching(device_name: str) -> Hardware | None:
    """Return the described device whose driver reports this name; None if there is none."""
    parts = {
        part: name
        for name in names()
        for part in json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["names"]
    }
    matches = [part for part in parts if part in device_name]
    return load(parts[max(matches, key=len)]) if matches else None  # GB200 has B200 in its name


@lru_cache(maxsize=16)
def load(name: str, calibration: Path | None = None) -> Hardware:
    """Return a described device, with this package's measurements or those of a calibration.

    Raises:
        ConfigError: no description has this name, or the calibration cannot be used.
    """
    name = name.lower()
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        raise ConfigError(f"--device {name}: no device of this name is described; known: {', '.join(names())}")
    content = json.loads(path.read_text(encoding="utf-8"))
    source = FOLDER / f"{content['measurements']}-measured.json"
    measured_on = json.loads((FOLDER / f"{content['measurements']}.json").read_text(encoding="utf-8"))
    tables = json.loads(source.read_text(encoding="utf-8"))
    measurements = Measurements.from_calibration(tables, measured_on["peak_flops"], measured_on["bytes_per_s"])
    hardware = Hardware(
        name=name,
        title=content["title"],
        platform=content["platform"],
        memory=content["memory"],
        peak=content["peak_flops"],
        bytes_per_s=content["bytes_per_s"],
        fp8=content.get("fp8", 1.0),
        cards_per_node=content["cards_per_node"],
        node=_link(content["node"]),
        network=_link(content["network"]),
        launch_s=content["launch_us"] * 1e-6,
        gap_s=content["gap_us"] * 1e-6,
        measurements=measurements,
        measured=content["measurements"] == name and not tables.get("provisional"),
        sources=tuple(content["sources"]),
    )
    return hardware if calibration is None else calibrated(hardware, calibration)


def calibrated(hardware: Hardware, path: Path) -> Hardware:
    """Return a device with the tables of a calibration file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--calibration {path}: cannot be read: {error}") from None
    if content.get("toy"):
        raise ConfigError(f"--calibration {path}: was measured on a CPU, with sizes that only check the program")
    try:
        measurements = Measurements.from_calibration(content, hardware.peak, hardware.bytes_per_s)
    except ConfigError as error:
        raise ConfigError(f"--calibration {path}: {error}") from None
    return replace(hardware, measurements=measurements, measured=True, memory=content.get("memory") or hardware.memory)


def _link(content: Mapping[str, float]) -> Link:
    return Link(content["latency_us"] * 1e-6, content["bytes_per_s"])
