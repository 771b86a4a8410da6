"""Staging memory of a receiver: how it is reused, where an update's bytes are in it, and how they arrive there."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from weightwire import delta
from weightwire.errors import TransportError
from weightwire.manifest import Bucket, Manifest, TensorSpec, offsets, plan_buckets
from weightwire.offer import Seal
from weightwire.plan import Region, Share, complete
from weightwire.sender import synchronise_stream
from weightwire.sharded import HEAD_BYTES, largest_messages, views
from weightwire.slices import index_of
from weightwire.transports import Setup, Transport, Work, make_transport
from weightwire.transports.base import RECEIVES_IN_FLIGHT, PairTransport, make_pairs

ALIGNMENT = 16
"""Chunks begin at multiples of this in a worker's staging memory, in bytes."""
ROW_BYTES = 2**16
"""Most bytes that a kernel exchanges as one row, between staging memory and a model's parameters."""

Arrived = Callable[[int, Tensor], object]
"""Called with the index and the bytes of each bucket or chunk, in order, when it is complete."""


class StagingMemory:
    """Memory of a receiver's updates, kept from one to the next: new memory costs as much as the transfer.

    The factors of an adapter have memory of their own while the other is a base.

    Attributes:
        base: plan and version of the sharded update whose content the kept memory holds; None if it holds anything else.
        spare: memory for the next update, uint8 [bytes].
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.base: tuple[str, int] | None = None
        self.spare: Tensor | None = None

    def take(self, nbytes: int, *, adapter: bool) -> Tensor:
        """Return memory for an update: that of the last one, which it overwrites, so that it is no base any more."""
        if adapter and self.base is not None:
            return self._allocate(nbytes)
        self.base = None
        memory, self.spare = self.spare, None
        if memory is None or memory.numel() < nbytes:
            del memory  # first, or there would be two
            memory = self._allocate(nbytes)
        return memory[:nbytes]

    def keep(self, content: Tensor | None, *, adapter: bool) -> None:
        """Keep the memory of a complete update, if it still has any."""
        if content is not None and (not adapter or self.base is None):
            nbytes = content.untyped_storage().nbytes()
            self.spare = content.as_strided((nbytes,), (1,), 0)

    def release(self) -> None:
        self.spare = self.base = None

    def _allocate(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # It may have been another tensor's, whose last kernels are still to run; transports use streams of their own.
        synchronise_stream(self._device)
        return memory


class BucketLayout:
    """Place of an update in staging memory: all tensors' bytes without gaps, in the manifest's order, in buckets from rank 0.

    Attributes:
        nbytes: size of the memory.
        count: number of buckets.
        readers: members to which this one forwards what it receives.
        share: the worker's part of the plan, if the update is sharded.
    """

    share: Share | None = None

    def __init__(self, manifest: Manifest) -> None:
        self._manifest, self.nbytes = manifest, manifest.nbytes
        self.count = -(-manifest.nbytes // manifest.bucket_bytes)
        self.readers: set[int] = set()

    def names(self, index: int) -> list[str]:
        """Return the names of the tensors in a bucket."""
        return [self._manifest.tensors[piece.tensor].name for piece in self._buckets()[index].pieces]

    def pieces(self) -> Iterator[tuple[Region, int]]:
        """Yield the slices of tensors that the memory holds without gaps, and the first byte of each."""
        starts = offsets(self._manifest.tensors)
        for piece in complete(self._manifest.tensors):
            yield piece, starts[piece.tensor]

    def tensors(self, staging: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor), as views where possible."""
        specs = self._manifest.tensors
        starts = offsets(specs)
        for index, spec in enumerate(specs):
            content = staging[starts[index] : starts[index + 1]]
            dtype = getattr(torch, spec.dtype)
            if starts[index] % dtype.itemsize:
                content = content.clone()  # a view of another dtype must begin at a multiple of its size
            yield spec.name, content.view(dtype).view(spec.shape)

    def digests(self, seal: Seal, rank: int) -> Sequence[str]:
        """Return the digests of the buckets that were sent to the member ``rank``."""
        return seal.digests

    def connect(self, transport: str, setup: Setup) -> Transport:
        """Create the transport on which :meth:`receive` receives."""
        return make_transport(transport, setup)

    def receive(
        self, staging: Tensor, transport: Transport, timeout_s: float, arrived: Arrived, *, differences: bool = False
    ) -> None:
        """Fill the staging memory. Several buckets are in flight, so that one is digested while others arrive."""
        works: list[tuple[Bucket, Work]] = []

        def finish(bucket: Bucket, work: Work) -> None:
            work.wait(timeout_s)
            arrived(bucket.index, staging[bucket.start : bucket.stop])

        in_flight = getattr(transport, "receives_in_flight", RECEIVES_IN_FLIGHT)
        for bucket in self._buckets():
            works.append((bucket, transport.receive(staging[bucket.start : bucket.stop])))
            if len(works) == in_flight:
                finish(*works.pop(0))
        for bucket, work in works:
            finish(bucket, work)

    def _buckets(self) -> tuple[Bucket, ...]:
        return plan_buckets(self._manifest.tensors, self._manifest.bucket_bytes)


class ShardLayout:
    """Like :class:`BucketLayout`, of a sharded update: the chunks of a worker's ``share``, in the order in which they arrive."""

    def __init__(self, share: Share, specs: Sequence[TensorSpec]) -> None:
        self.share, self.specs, self.count = share, specs, len(share.chunks)
        self.readers = {step.peer for step in share.operations if step.sends}
        self._starts: list[int] = []
        self.nbytes = 0
        for chunk in share.chunks:
            self._starts.append(self.nbytes)
            self.nbytes += -(-chunk.nbytes // ALIGNMENT) * ALIGNMENT

    def names(self, index: int) -> list[str]:
        return list(dict.fromkeys(self.specs[piece.tensor].name for piece in self.share.chunks[index].pieces))

    def pieces(self) -> Iterator[tuple[Region, int]]:
        for chunk, start in zip(self.share.chunks, self._starts, strict=True):
            for piece in chunk.pieces:
                yield piece, start
                start += piece.nbytes(self.specs)

    def tensors(self, staging: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every tensor of which this worker has a part.

        Tensors have their full shape. Elements that the worker does not need are NaN (-1 in integers), so that a loader that
        reads them nevertheless cannot pass unnoticed.
        """
        pieces: dict[int, list[tuple[Region, Tensor]]] = defaultdict(list)
        for index, chunk in enumerate(self.share.chunks):
            for piece, view in views(chunk, self.specs, self._content(staging, index)):
                pieces[piece.tensor].append((piece, view))
        for index, spec in enumerate(self.specs):
            dtype = getattr(torch, spec.dtype)
            if 0 in spec.shape:
                yield spec.name, torch.empty(spec.shape, dtype=dtype, device=staging.device)
            elif parts := pieces.pop(index, None):
                if len(parts) == 1 and parts[0][0].sizes == spec.shape:
                    yield spec.name, parts[0][1]
                    continue
                tensor = torch.empty(spec.shape, dtype=dtype, device=staging.device)
                if sum(piece.volume for piece, _ in parts) < tensor.numel():
                    tensor.view(-1).view(torch.uint8).fill_(255)
                for piece, view in parts:
                    tensor[index_of(*piece.box)].copy_(view)
                yield spec.name, tensor
                del tensor, parts

    def digests(self, seal: Seal, rank: int) -> Sequence[str]:
        return (seal.by_member or {}).get(rank, ())

    def connect(self, transport: str, setup: Setup) -> PairTransport:
        return make_pairs(transport, setup, largest_messages(self.share))

    def receive(
        self, staging: Tensor, transport: PairTransport, timeout_s: float, arrived: Arrived, *, differences: bool
    ) -> None:
        """Run the worker's operations: fill the staging memory, and forward chunks.

        Operations are waited for in their order, sends too: with transports that transfer within the wait, any other order could
        let two members wait for each other.

        Args:
            staging: with ``differences``, the content of the base version, which is changed in place.
        """
        forwarded = {step.chunk for step in self.share.operations if step.sends}
        messages: dict[int, list[Tensor]] = {}
        in_flight: deque[tuple[int | None, Work]] = deque()  # with the chunk that arrives, or None
        complete = 0

        def finish(chunk: int) -> None:
            nonlocal complete
            arrived(chunk, self._content(staging, chunk))
            complete = chunk + 1

        def wait_until_in_flight(count: int) -> None:
            while len(in_flight) > count:
                chunk, work = in_flight.popleft()
                work.wait(timeout_s)
                if chunk is not None:
                    finish(chunk)

        for step in self.share.operations:
            content = self._content(staging, step.chunk)
            if step.sends:
                while complete <= step.chunk:
                    wait_until_in_flight(len(in_flight) - 1)
                parts = messages[step.chunk] if differences else [content]
                in_flight += [(None, transport.send_to(part, step.peer)) for part in parts]
            elif differences:
                wait_until_in_flight(0)
                parts = _receive_difference(content, step.chunk, step.peer, transport, timeout_s)
                finish(step.chunk)
                if step.chunk in forwarded:
                    messages[step.chunk] = parts
            else:
                in_flight.append((step.chunk, transport.receive_from(content, step.peer)))
            # Two in flight: one is digested while the next arrives.
            wait_until_in_flight(2)
        wait_until_in_flight(0)

    def _content(self, staging: Tensor, index: int) -> Tensor:
        return staging[self._starts[index] : self._starts[index] + self.share.chunks[index].nbytes]


def _receive_difference(
    content: Tensor, chunk: int, peer: int, transport: PairTransport, timeout_s: float
) -> list[Tensor]:
    """Receive a message of unknown length after its head, and bring ``content`` to the new version; return both."""
    head = torch.empty(HEAD_BYTES, dtype=torch.uint8, device=content.device)
    transport.receive_from(head, peer).wait(timeout_s)
    is_difference, length = head.cpu().view(torch.int64).tolist()
    # Untrusted until verified: a damaged length must not allocate memory without bound.
    if not 0 < length <= content.numel() or (not is_difference and length != content.numel()):
        raise TransportError(
            f"chunk {chunk + 1} has {content.numel()} bytes, and {length} are announced: the stream is damaged"
        )
    message = torch.empty(length, dtype=torch.uint8, device=content.device) if is_difference else content
    transport.receive_from(message, peer).wait(timeout_s)
    if is_difference:
        delta.apply(message, content)
    return [head, message]
