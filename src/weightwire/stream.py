"""Streams: updates whose tensors are not known in advance, in batches with a manifest each.

For interfaces that yield and take weights one by one, as a generator (verl's checkpoint engines). A batch has as many tensors as
fit into a bucket, or a larger one in several buckets. It is sent as 8 bytes (the length of its head), the head (JSON) and the
buckets. The receiver compares a batch's digests before it yields anything of it; completeness is known only with the last batch.
If the tensors are known in advance, use :mod:`weightwire.sender`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from weightwire.digest import digest
from weightwire.errors import DigestError, ManifestError, TransportError, VersionError, WireError
from weightwire.group import Group
from weightwire.manifest import Manifest, TensorSpec, exactly
from weightwire.sender import spec_of, synchronise_stream
from weightwire.staging import BucketLayout
from weightwire.transports.base import Transport, Work

MAX_HEAD_BYTES = 2**26
LENGTH_BYTES = 8
DIGEST = "multilinear64"


@dataclass(frozen=True)
class Head:
    """Head of a batch.

    Attributes:
        version: version of the update.
        index: index of the batch, from 0.
        last: no batch follows.
        digests: of the batch's buckets.
        manifest: the batch's tensors, with a version of its own; None if it has none.
    """

    version: int
    index: int
    last: bool
    digests: tuple[str, ...]
    manifest: Manifest | None

    def to_bytes(self) -> bytes:
        manifest = None if self.manifest is None else self.manifest.to_json()
        return json.dumps({**vars(self), "digests": list(self.digests), "manifest": manifest}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Head:
        """Parse the output of :meth:`to_bytes`."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ManifestError(f"head: not valid JSON: {error}") from None
        fields = dict(exactly(data, tuple(cls.__dataclass_fields__), "head"))
        kinds = {"version": int, "index": int, "last": bool, "digests": list}
        if wrong := [name for name, kind in kinds.items() if type(fields[name]) is not kind]:
            raise ManifestError(f"head: {', '.join(wrong)} of another type")
        if not all(isinstance(value, str) for value in fields["digests"]):
            raise ManifestError("head: a digest is not a text")
        fields["digests"] = tuple(fields["digests"])
        if fields["manifest"] is not None:
            fields["manifest"] = Manifest.from_json(fields["manifest"])
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
        self._bucket_bytes, self._version, self._timeout_s = bucket_bytes, version, timeout_s
        # Two: one is in flight while the other is filled.
        self._buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._work: Work | None = None
        self._specs: list[TensorSpec] = []
        self._filled = self._index = self._buckets = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Send a tensor on any device; the caller may modify it after the return.

        Raises:
            ManifestError: the name or the dtype is not supported.
            TransportError: a bucket could not be sent.
        """
        spec = spec_of(name, tensor)
        spec.check()
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if self._specs and self._filled + spec.nbytes > self._bucket_bytes:
            self._send_filled(last=False)
        if spec.nbytes > self._bucket_bytes:
            self._send([spec], data, last=False)
        else:
            self._buffer()[self._filled : self._filled + spec.nbytes].copy_(data)
            self._specs.append(spec)
            self._filled += spec.nbytes
        # The caller may overwrite its tensor as soon as this returns.
        synchronise_stream(data.device)

    def finish(self) -> None:
        """Send the last batch, and wait until all buffers may be reused."""
        self._send_filled(last=True)
        self._wait()

    def _send_filled(self, last: bool) -> None:
        self._send(self._specs, self._buffer()[: self._filled], last)
        self._specs, self._filled = [], 0

    def _send(self, specs: Sequence[TensorSpec], data: torch.Tensor, last: bool) -> None:
        manifest = Manifest(0, tuple(specs), self._bucket_bytes, DIGEST) if specs else None
        parts = data.split(self._bucket_bytes) if data.numel() else ()
        # Before the wait for the previous bucket, so that it overlaps with its transfer. It waits for the device.
        digests = tuple(digest(DIGEST, part) for part in parts)
        text = Head(self._version, self._index, last, digests, manifest).to_bytes()
        self._group.progress(self._index)
        # Length and head are buckets of their own: a receiver must know the size of what it receives. Each is waited for, since
        # transports have two transfers in flight at most.
        for small in (len(text).to_bytes(LENGTH_BYTES, "little"), text):
            self._hand_over(torch.frombuffer(bytearray(small), dtype=torch.uint8).to(self._device))
            self._wait()
        for part in parts:
            buffer = self._buffer()[: part.numel()]
            if part.data_ptr() != buffer.data_ptr():
                buffer.copy_(part)
                for device in {buffer.device, part.device}:
                    synchronise_stream(device)
            self._hand_over(buffer)
            self._buckets += 1
        self._index += 1

    def _buffer(self) -> torch.Tensor:
        """Return the buffer that is not in flight."""
        return self._buffers[self._buckets % 2]

    def _hand_over(self, buffer: torch.Tensor) -> None:
        self._wait()
        self._work = self._transport.send(buffer)

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait(self._timeout_s)
        except WireError as error:
            raise self._group.explain(error, f"sending batch {self._index} of version {self._version}") from error


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
        self._bucket_bytes, self._version, self._timeout_s = bucket_bytes, version, timeout_s
        self._names: set[str] = set()
        self._index = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive the stream, and yield each tensor when its batch has arrived and is verified.

        Raises:
            DigestError: received bytes differ from those sent.
            VersionError: the stream is of another version.
            ManifestError: a head is malformed, or batches do not fit together.
            TransportError: a bucket did not arrive.
        """
        last = False
        while not last:
            head = self._next_head()
            if head.manifest is not None:
                yield from self._batch(head.manifest, head.digests)
            self._index += 1
            self._group.progress(self._index)
            # The sender says which batch is the last: the tensors are not known in advance.
            last = head.last

    def _next_head(self) -> Head:
        length = int.from_bytes(self._receive_bytes(LENGTH_BYTES), "little")
        # Untrusted until verified: a damaged length must not allocate memory without bound.
        if not 0 < length <= MAX_HEAD_BYTES:
            raise ManifestError(f"{self._label()}: a head of {length} bytes; 1 to {MAX_HEAD_BYTES} are possible")
        head = Head.from_bytes(self._receive_bytes(length))
        if self._version is not None and head.version != self._version:
            raise VersionError(f"{self._label()}: version {self._version} was expected, and {head.version} arrived")
        bucket_bytes = self._bucket_bytes if head.manifest is None else head.manifest.bucket_bytes
        # A lost or repeated batch would shift all bytes after it.
        if head.index != self._index or bucket_bytes > self._bucket_bytes:
            raise ManifestError(
                f"{self._label()}: batch {head.index} in buckets of {bucket_bytes} bytes arrived; buckets here have "
                f"{self._bucket_bytes} bytes"
            )
        return head

    def _batch(self, manifest: Manifest, expected: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        layout, digests = BucketLayout(manifest), list[str]()
        if len(expected) != layout.count:
            raise ManifestError(f"{self._label()}: {len(expected)} digests of {layout.count} buckets")
        content = torch.empty(manifest.nbytes, dtype=torch.uint8, device=self._device)
        try:
            layout.receive(
                content, self._transport, self._timeout_s, lambda _, part: digests.append(digest(DIGEST, part))
            )
        except TransportError as error:
            raise self._group.explain(error, f"receiving batch {self._index}") from error
        # Compared before anything of the batch is yielded: a consumer loads tensors at once.
        for value, sent in zip(digests, expected, strict=True):
            if value != sent:
                names = ", ".join(spec.name for spec in manifest.tensors[:4])
                raise DigestError(f"{self._label()}: a digest is {value}, and {sent} was sent (in it: {names})")
        for name, tensor in layout.tensors(content):
            # A consumer could not tell which of two values is meant.
            if name in self._names:
                raise ManifestError(f"{self._label()}: {name} comes twice")
            self._names.add(name)
            # A view would keep the memory of the whole batch.
            yield name, tensor if len(manifest.tensors) == 1 else tensor.clone()

    def _receive_bytes(self, length: int) -> bytes:
        buffer = torch.empty(length, dtype=torch.uint8, device=self._device)
        try:
            self._transport.receive(buffer).wait(self._timeout_s)
        except TransportError as error:
            raise self._group.explain(error, f"receiving batch {self._index}") from error
        return bytes(buffer.cpu().numpy())

    def _label(self) -> str:
        return f"{self._group.member(self._group.rank)}, batch {self._index}"
