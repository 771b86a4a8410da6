"""Manifest of an update: its tensors and their split into buckets, known to both sides before the first byte. Pure, no torch.

A manifest is untrusted input (the trainer's request to an engine): parsing checks and bounds every field.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import accumulate
from typing import Any, TypeVar

from weightwire.errors import ManifestError

T = TypeVar("T")

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Supported torch dtypes by name, with the bytes of one element."""

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""The index of a layer in the name of a tensor."""

FORMAT = 1
# Limits of what an engine parses and allocates for a request, far above any model that is trained today.
MAX_TENSORS = 1_000_000
MAX_DIMENSIONS = 8
MAX_NAME = 512
MAX_BYTES = 2**46
MAX_BUCKET_BYTES = 2**33
MAX_BUCKETS = 2**20
MAX_ADAPTER_JSON = 65536


def in_prediction_head(name: str, layers: range) -> bool:
    """Check whether a tensor, by its Hugging Face name, is part of a head for multi-token prediction.

    Such tensors are named ``mtp.*`` or, in DeepSeek-V3 and GLM-4.5, like ``num_nextn_predict_layers`` layers after the last.

    Args:
        layers: indices of those layers.
    """
    layer = LAYER.search(name)
    # The added dot also finds a name that begins with "mtp.".
    return (layer is not None and int(layer[1]) in layers) or ".mtp." in f".{name}"


def default_bucket_bytes(device_type: str) -> int:
    """Return the default bucket size in bytes for buckets on a type of device.

    The host needs several tenths of a millisecond for a bucket, about what 256 MiB take between two GPUs.
    """
    return (256 if device_type == "cpu" else 512) * 2**20


@dataclass(frozen=True)
class TensorSpec:
    """Name (Hugging Face's or, of an adapter, peft's), torch dtype by name, and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def check(self) -> None:
        # Printable: names go into messages and logs of the engine.
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_NAME or not self.name.isprintable():
            raise ManifestError(f"manifest: {self.name!r:.80} is not the name of a tensor")
        if self.dtype not in DTYPE_BYTES:
            raise ManifestError(f"manifest: {self.name} has dtype {self.dtype!r:.40}; known: {', '.join(DTYPE_BYTES)}")
        if len(self.shape) > MAX_DIMENSIONS or not all(is_count(size, MAX_BYTES) for size in self.shape):
            raise ManifestError(f"manifest: {self.name} has shape {self.shape!r:.80}")


@dataclass(frozen=True)
class AdapterInfo:
    """Adapter whose factors a manifest's tensors are, instead of a model's weights.

    Attributes:
        name: name of the adapter in requests to the engine.
        config: the content of peft's ``adapter_config.json``.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= 128 or not self.name.isprintable():
            raise ManifestError(f"manifest: {self.name!r:.80} is not the name of an adapter")
        # An engine that loads adapters from files uses the name in a path.
        if "/" in self.name or self.name.startswith("."):
            raise ManifestError(f"manifest: adapter name {self.name!r} looks like a path")
        if not isinstance(self.config, Mapping):
            raise ManifestError(f"manifest: the configuration of adapter {self.name} is not a mapping")
        try:
            text = json.dumps(dict(self.config), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ManifestError(
                f"manifest: the configuration of adapter {self.name} is not valid JSON: {error}"
            ) from None
        if len(text) > MAX_ADAPTER_JSON:
            raise ManifestError(
                f"manifest: the configuration of adapter {self.name} has {len(text)} characters; at most "
                f"{MAX_ADAPTER_JSON} are possible"
            )


@dataclass(frozen=True)
class Manifest:
    """Tensors of an update in the order in which they are sent, their bucket size, and the digest of the buckets.

    Attributes:
        version: version of the weights: increases with every update of the same :attr:`target`.
        tensors: tensors in the order in which they are sent. Names are unique.
        bucket_bytes: size of all buckets but the last.
        digest: name of an algorithm of :mod:`weightwire.digest`.
        adapter: the adapter whose factors these are; None for a model.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int = 256 * 2**20
    digest: str = "multilinear64"
    adapter: AdapterInfo | None = None

    def __post_init__(self) -> None:
        if not is_count(self.version, 2**62):
            raise ManifestError(f"manifest: version {self.version!r:.40} is not an integer >= 0")
        if not 0 < len(self.tensors) <= MAX_TENSORS:
            raise ManifestError(f"manifest: {len(self.tensors)} tensors; 1 to {MAX_TENSORS} are possible")
        if not is_count(self.bucket_bytes, MAX_BUCKET_BYTES) or self.bucket_bytes < 1:
            raise ManifestError(
                f"manifest: bucket_bytes {self.bucket_bytes!r:.40} is not between 1 and {MAX_BUCKET_BYTES}"
            )
        if not isinstance(self.digest, str) or not 0 < len(self.digest) <= 64:
            raise ManifestError(f"manifest: {self.digest!r:.80} is not the name of a digest")
        _check_specs(self.tensors)
        if self.adapter is not None:
            self.adapter.check()
        if self.nbytes > MAX_BYTES or self.nbytes > self.bucket_bytes * MAX_BUCKETS:
            raise ManifestError(
                f"manifest: {self.nbytes} bytes in buckets of {self.bucket_bytes}; at most {MAX_BYTES} bytes and "
                f"{MAX_BUCKETS} buckets are possible"
            )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, the traffic to each receiver."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def target(self) -> str:
        """Return the target of the update: ``model``, or ``adapter NAME``."""
        return "model" if self.adapter is None else f"adapter {self.adapter.name}"

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the JSON, by which the seal names its manifest."""
        # Sorted: the order of keys in an adapter's configuration need not survive the way to the engine.
        text = json.dumps({**self._fields(), "tensors": []}, sort_keys=True)
        # The tensors' text is often that of the update before. Only the version follows them.
        head, _, tail = text.rpartition('"tensors": []')
        return hashlib.sha256(f'{head}"tensors": {_json_text(self.tensors)}{tail}'.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {**self._fields(), "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in self.tensors]}

    def _fields(self) -> dict[str, Any]:
        adapter = self.adapter
        return {
            "format": FORMAT,
            "version": self.version,
            "bucket_bytes": self.bucket_bytes,
            "digest": self.digest,
            "adapter": None if adapter is None else {"name": adapter.name, "config": dict(adapter.config)},
        }

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Parse the untrusted output of :meth:`to_json`."""
        fields = exactly(data, ("format", "version", "tensors", "bucket_bytes", "digest", "adapter"), "manifest")
        if fields["format"] != FORMAT:
            raise ManifestError(f"manifest: format {fields['format']!r:.40}; this side supports format {FORMAT}")
        tensors = _specs(fields["tensors"])
        adapter = fields["adapter"]
        if adapter is not None:
            adapter = AdapterInfo(**exactly(adapter, ("name", "config"), "manifest: adapter"))
        return cls(fields["version"], tensors, fields["bucket_bytes"], fields["digest"], adapter)

    def expect(self, specs: Iterable[TensorSpec]) -> None:
        """Compare the tensors with the expected ones, in any order."""
        expected, present = ({spec.name: spec for spec in source} for source in (specs, self.tensors))
        problems = [f"{name} is missing" for name in expected if name not in present]
        problems += [f"{name} is not one of the model's" for name in present if name not in expected]
        for name in expected.keys() & present.keys():
            want, have = expected[name], present[name]
            if want != have:
                problems.append(f"{name} comes as {have.dtype} {list(have.shape)}, not {want.dtype} {list(want.shape)}")
        if problems:
            suffix = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ManifestError(f"version {self.version}: {'; '.join(sorted(problems)[:8])}{suffix}")


def _last_result(function: Callable[..., T]) -> Callable[..., T]:
    """Keep the last result of a function of tensors: those of an update are the same object as those of the one before.

    A mixture of experts has tens of thousands, and looking at each takes longer than sending them.
    """
    last: tuple[Any, Any, Any] = None, None, None

    @wraps(function)
    def call(specs: Sequence[TensorSpec], *rest: Any) -> T:
        nonlocal last
        key, arguments, result = last
        # A list may have changed.
        if key is not specs or arguments != rest or not isinstance(specs, tuple):
            result = function(specs, *rest)
            last = specs, rest, result  # as a whole: threads see one or the other
        return result

    return call


_last_rows: tuple[Any, tuple[TensorSpec, ...]] = None, ()
"""Rows that were parsed last, and their specs."""


def _specs(rows: Any) -> tuple[TensorSpec, ...]:
    """Parse untrusted rows of ``[name, dtype, shape]``; equal rows yield the same object."""
    global _last_rows
    # Bounded here as well as in the constructor, which sees the rows only when all of them have been parsed.
    check_size(rows, list, MAX_TENSORS, "manifest: tensors")
    last, specs = _last_rows
    # True and 1.0 are equal to 1, and are no sizes.
    if rows != last or not all(type(size) is int for row in rows for size in row[2]):
        specs = tuple(map(_spec, rows))
        _last_rows = rows, specs
    return specs


@_last_result
def _check_specs(specs: tuple[TensorSpec, ...]) -> None:
    """Raise ManifestError if a spec is invalid, or two have one name."""
    names = set()
    for spec in specs:
        spec.check()
        if spec.name in names:
            raise ManifestError(f"manifest: {spec.name} is listed twice")
        names.add(spec.name)


@_last_result
def _json_text(specs: tuple[TensorSpec, ...]) -> str:
    """Return the tensors as ``json.dumps`` writes them."""
    return json.dumps([[spec.name, spec.dtype, list(spec.shape)] for spec in specs])


def exactly(data: Any, names: tuple[str, ...], label: str) -> dict[str, Any]:
    """Return ``data`` after checking that it is a mapping with exactly these fields."""
    if not isinstance(data, dict):
        raise ManifestError(f"{label}: a mapping was expected, not {type(data).__name__}")
    if missing := [name for name in names if name not in data]:
        raise ManifestError(f"{label}: without {', '.join(missing)}")
    if extra := [repr(name)[:40] for name in data if name not in names]:
        raise ManifestError(f"{label}: unknown fields {', '.join(extra[:8])}")
    return data


def check_size(data: Any, kind: type[list[Any]] | type[dict[Any, Any]], limit: int, label: str) -> None:
    """Raise ManifestError unless untrusted ``data`` is a list (a mapping) of at most ``limit`` entries."""
    if not isinstance(data, kind):
        expected = "list" if kind is list else "mapping"
        raise ManifestError(f"{label}: a {expected} was expected, not {type(data).__name__}")
    if len(data) > limit:
        raise ManifestError(f"{label}: {len(data)} entries; at most {limit} are possible")


def _spec(row: Any) -> TensorSpec:
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[1], str) or not isinstance(row[2], list):
        raise ManifestError(f"manifest: {row!r:.120} is not [name, dtype, shape]")
    if len(row[2]) > MAX_DIMENSIONS:
        raise ManifestError(f"manifest: {row[0]!r:.80} has {len(row[2])} dimensions")
    # The name and the sizes are checked by the constructor of the manifest, with all others.
    return TensorSpec(row[0], row[1], tuple(row[2]))


def is_count(value: Any, limit: int) -> bool:
    """Check for an integer from 0 to ``limit``."""
    # isinstance(True, int) holds, and JSON has booleans.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


# --- buckets ---
#
# The bytes of all tensors are concatenated, without gaps, in the manifest's order; a bucket is the next ``bucket_bytes`` of
# them. So a tensor may begin in one bucket and end in another, and only payload is sent.


@dataclass(frozen=True)
class Piece:
    """Slice of a tensor: ``length`` bytes from ``offset``, at ``position`` in the bucket.

    Attributes:
        tensor: its index in the manifest.
    """

    tensor: int
    offset: int
    position: int
    length: int


@dataclass(frozen=True)
class Bucket:
    """Bytes ``start`` to ``stop`` of the concatenated tensors, and the tensors' pieces in them."""

    index: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def offsets(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Return the start of each tensor in the concatenated bytes, and the end of the last one."""
    return tuple(accumulate((spec.nbytes for spec in specs), initial=0))


@_last_result
def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Split the tensors into buckets of ``bucket_bytes``; the last one may be smaller. Empty if there are no bytes.

    Empty tensors are in no bucket.
    """
    starts = offsets(specs)
    total = starts[-1]
    buckets = []
    for index, start in enumerate(range(0, total, bucket_bytes)):
        stop = min(start + bucket_bytes, total)
        pieces = []
        # The last tensor that starts at or before the bucket. Of several with one start, all but the last are empty.
        tensor = bisect_right(starts, start) - 1
        while tensor < len(specs) and starts[tensor] < stop:
            first, last = max(starts[tensor], start), min(starts[tensor + 1], stop)
            # Empty tensors have no piece.
            if last > first:
                pieces.append(Piece(tensor, first - starts[tensor], first - start, last - first))
            tensor += 1
        buckets.append(Bucket(index, start, stop, tuple(pieces)))
    return tuple(buckets)
