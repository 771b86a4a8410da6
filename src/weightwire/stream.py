"""Streams: updates without a manifest, whose buckets each begin with a header that lists their tensors.

For interfaces that yield and take weights one by one, as a generator (verl's checkpoint engines). The tensors' bytes are
concatenated; a bucket is the next ``bucket_bytes`` of them, so a tensor may begin in one bucket and end in another. A bucket is
sent as 8 bytes (the length of its header), the header (JSON) and the bytes. The receiver compares a bucket's digest before it
yields anything of it; completeness is known only with the last bucket. If the tensors are known in advance, use
:mod:`weightwire.sender`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weightwire.digest import digest
from weightwire.errors import DigestError, ManifestError, TransportError, VersionError, WireError
from weightwire.group import Group
from weightwire.manifest import MAX_DIMENSIONS, TensorSpec, exactly
from weightwire.sender import spec_of, synchronise_stream
from weightwire.transports.base import Transport, Work

MAX_HEADER_BYTES = 2**26
LENGTH_BYTES = 8
DIGEST = "multilinear64"


@dataclass(frozen=True)
class Part:
    """Slice of a tensor: ``length`` bytes from ``offset``; a bucket is the concatenation of its parts."""

    tensor: TensorSpec
    offset: int
    length: int


@dataclass(frozen=True)
class Header:
    """Description of a bucket's content.

    Attributes:
        version: version of the update.
        index: index of the bucket, from 0.
        last: no bucket follows.
        digest: digest of the bucket's bytes, as a hexadecimal number.
    """

    version: int
    index: int
    last: bool
    digest: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.length for part in self.parts)

    def to_bytes(self) -> bytes:
        parts = [
            [part.tensor.name, part.tensor.dtype, list(part.tensor.shape), part.offset, part.length]
            for part in self.parts
        ]
        fields = {"version": self.version, "index": self.index, "last": self.last, "digest": self.digest}
        return json.dumps({**fields, "parts": parts}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Header:
        """Parse the output of :meth:`to_bytes`."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ManifestError(f"header: not valid JSON: {error}") from None
        fields = exactly(data, ("version", "index", "last", "digest", "parts"), "header")
        kinds = {"version": int, "index": int, "last": bool, "digest": str, "parts": list}
        if wrong := [name for name, kind in kinds.items() if type(fields[name]) is not kind]:
            raise ManifestError(f"header: {', '.join(wrong)} of another type")
        fields["parts"] = tuple(map(_part, fields["parts"]))
        return cls(**fields)


class StreamSender:
    """Sender of a stream: :meth:`add` each tensor, then :meth:`finish`. One bucket is sent while the next one is filled.

    Args:
        transport, group: transport and group of the update; this member is rank 0.
        device: device of the buckets; two of ``bucket_bytes`` are allocated there.
        version: version of the weights.
        timeout_s: deadline, in seconds, of each wait for a bucket.
    """

    def __init__(
        self,
        transport: Transport,
        group: Group,
        device: torch.device,
        bucket_bytes: int,
        version: int,
        timeout_s: float,
    ) -> None:
        self._transport, self._group, self._device = transport, group, device
        self._version, self._timeout_s = version, timeout_s
        # Two: one is in flight while the other is filled.
        self._buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._work: Work | None = None
        self._parts: list[Part] = []
        self._filled = self._index = self._sending = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Send a tensor on any device; the caller may modify it after the return.

        Raises:
            ManifestError: the name or the dtype is not supported.
            TransportError: a bucket could not be sent.
        """
        spec = spec_of(name, tensor)
        spec.check()
        data, offset = tensor.detach().contiguous().view(-1).view(torch.uint8), 0
        # An empty tensor is in no bucket's bytes, and still has to be announced by a header.
        if not spec.nbytes:
            self._parts.append(Part(spec, 0, 0))
        while offset < spec.nbytes:
            buffer = self._buffers[self._index % 2]
            length = min(spec.nbytes - offset, buffer.numel() - self._filled)
            buffer[self._filled : self._filled + length].copy_(data[offset : offset + length])
            self._parts.append(Part(spec, offset, length))
            offset, self._filled = offset + length, self._filled + length
            if self._filled == buffer.numel():
                self._send(last=False)
        # The caller may overwrite its tensor as soon as this returns.
        synchronise_stream(data.device)

    def finish(self) -> None:
        """Send the last bucket, and wait until all buffers may be reused."""
        self._send(last=True)
        self._wait()

    def _send(self, last: bool) -> None:
        data = self._buffers[self._index % 2][: self._filled]
        # Before the wait for the previous bucket, so that it overlaps with its transfer.
        value = digest(DIGEST, data)  # waits for the device: the bucket is filled
        text = Header(self._version, self._index, last, value, tuple(self._parts)).to_bytes()
        self._wait()
        self._group.progress(self._index)
        self._sending = self._index
        # Length and header are buckets of their own: a receiver must know the size of what it receives. Each is
        # waited for, since transports have two transfers in flight at most.
        for small in (len(text).to_bytes(LENGTH_BYTES, "little"), text):
            self._work = self._transport.send(torch.frombuffer(bytearray(small), dtype=torch.uint8).to(self._device))
            self._wait()
        if self._filled:
            self._work = self._transport.send(data)
        self._parts, self._filled, self._index = [], 0, self._index + 1

    def _wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait(self._timeout_s)
        except WireError as error:
            raise self._group.explain(error, f"sending bucket {self._sending} of version {self._version}") from error
        self._work = None


class StreamReceiver:
    """Receiver of a stream: an iterator of ``(name, tensor)``, each tensor newly allocated on ``device``.

    Args:
        transport, group: transport and group of the update.
        device: device of the tensors and of one bucket of ``bucket_bytes``.
        version: expected; None for any.
        timeout_s: deadline, in seconds, of the wait for a bucket: the sender may need that long to fill it.
    """

    def __init__(
        self,
        transport: Transport,
        group: Group,
        device: torch.device,
        bucket_bytes: int,
        version: int | None,
        timeout_s: float,
    ) -> None:
        self._transport, self._group, self._device = transport, group, device
        self._version, self._timeout_s = version, timeout_s
        self._buffer = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
        self._names: set[str] = set()
        self._open: tuple[TensorSpec, torch.Tensor, int] | None = None  # an incomplete tensor and its bytes so far
        self._index = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive the stream, and yield each tensor when its last byte has arrived and its bucket is verified.

        Raises:
            DigestError: received bytes differ from those sent.
            VersionError: the stream is of another version.
            ManifestError: a header is malformed, or parts do not fit together.
            TransportError: a bucket did not arrive.
        """
        while True:
            header = self._next_header()
            data = self._buffer[: header.nbytes]
            if header.nbytes:
                self._receive(data)
            value = digest(DIGEST, data)
            # Compared before anything of the bucket is yielded: a consumer loads tensors at once.
            if value != header.digest:
                names = ", ".join(part.tensor.name for part in header.parts[:4])
                raise DigestError(
                    f"{self._label()}: the digest is {value}, and {header.digest} was sent (in it: {names})"
                )
            position = 0
            for part in header.parts:
                if (complete := self._copy_part(part, data[position : position + part.length])) is not None:
                    yield complete
                position += part.length
            self._index += 1
            self._group.progress(self._index)
            # The sender says which bucket is the last: there is no manifest to count by.
            if header.last:
                break
        if self._open is not None:
            raise ManifestError(f"{self._label()}: the update ends within {self._open[0].name}")

    def _next_header(self) -> Header:
        length = int.from_bytes(self._receive_bytes(LENGTH_BYTES), "little")
        # Untrusted until verified: a damaged length must not allocate memory without bound.
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ManifestError(f"{self._label()}: a header of {length} bytes; 1 to {MAX_HEADER_BYTES} are possible")
        header = Header.from_bytes(self._receive_bytes(length))
        if self._version is not None and header.version != self._version:
            raise VersionError(f"{self._label()}: version {self._version} was expected, and {header.version} arrived")
        # A lost or repeated bucket would shift all bytes after it.
        if header.index != self._index or header.nbytes > self._buffer.numel():
            raise ManifestError(
                f"{self._label()}: bucket {header.index} of {header.nbytes} bytes arrived; buckets here have "
                f"{self._buffer.numel()} bytes"
            )
        return header

    def _copy_part(self, part: Part, data: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Copy a part into its tensor; return the tensor if it is complete."""
        spec = part.tensor
        if self._open is None:
            # A consumer could not tell which of two values is meant.
            if spec.name in self._names:
                raise ManifestError(f"{self._label()}: {spec.name} comes twice")
            self._names.add(spec.name)
            self._open = spec, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device), 0
        current, tensor, have = self._open
        if current != spec or part.offset != have or have + part.length > spec.nbytes:
            raise ManifestError(
                f"{self._label()}: bytes {part.offset} to {part.offset + part.length} of {spec.name} arrived after {have} "
                f"bytes of {current.name}"
            )
        if part.length:
            tensor.view(-1).view(torch.uint8)[have : have + part.length].copy_(data)
        if have + part.length < spec.nbytes:
            self._open = current, tensor, have + part.length
            return None
        self._open = None
        return spec.name, tensor

    def _receive_bytes(self, length: int) -> bytes:
        buffer = torch.empty(length, dtype=torch.uint8, device=self._device)
        self._receive(buffer)
        # Through torch: the buffer may be on a device.
        content = bytearray(length)
        torch.frombuffer(content, dtype=torch.uint8).copy_(buffer)
        return bytes(content)

    def _receive(self, buffer: torch.Tensor) -> None:
        try:
            self._transport.receive(buffer).wait(self._timeout_s)
        except TransportError as error:
            raise self._group.explain(error, f"receiving bucket {self._index}") from error

    def _label(self) -> str:
        return f"{self._group.member(self._group.rank)}, bucket {self._index}"


def _part(row: Any) -> Part:
    if (
        not isinstance(row, list)
        or [type(value) for value in row] != [str, str, list, int, int]
        or len(row[2]) > MAX_DIMENSIONS
    ):
        raise ManifestError(f"header: {row!r:.120} is not [name, dtype, shape, offset, length]")
    name, dtype, shape, offset, length = row
    spec = TensorSpec(name, dtype, tuple(shape))
    spec.check()
    if offset < 0 or length < 0 or offset + length > spec.nbytes:
        raise ManifestError(f"header: {name} has {spec.nbytes} bytes, and no bytes {offset} to {offset + length}")
    return Part(spec, offset, length)
