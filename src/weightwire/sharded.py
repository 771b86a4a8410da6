"""Execution of a plan: trainer ranks send the slices that they hold, workers receive theirs, and forward some.

Differs from :mod:`weightwire.sender` in who sends: all trainer ranks are members of the group, rank 0 of which coordinates, and
every message goes from one member to another. The content of a message is a :class:`weightwire.plan.Chunk`, whose digest the rank
that holds it computes.

With a *base* version, a message is the difference from that version (:mod:`weightwire.delta`): the worker has kept what it
received last, applies the difference to it, and compares the digest of the result, which is that of a full message.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from weightwire import delta, digest
from weightwire.errors import PlanError, TransportError, WireError
from weightwire.group import Group, join
from weightwire.manifest import Manifest, TensorSpec
from weightwire.plan import Chunk, Region, Share
from weightwire.sender import RECEIVED, synchronise_stream
from weightwire.slices import index_of, minus
from weightwire.transports.base import PairTransport, Setup, Work
from weightwire.transports.pairs import make_pairs

ALIGNMENT = 16
"""Chunks begin at multiples of this in a worker's staging memory, in bytes."""
HEAD_BYTES = 16
"""Message before each chunk of an update with a base: (1 for a difference, its bytes) as int64."""


@dataclass(frozen=True)
class HeldSlice:
    """Values of a slice of a weight in this process.

    Attributes:
        piece: the slice.
        values: with the slice's sizes, of the weight's dtype or another one, which is converted.
    """

    piece: Region
    values: Tensor


def _views(chunk: Chunk, tensors: Sequence[TensorSpec], buffer: Tensor) -> Iterator[tuple[Region, Tensor]]:
    """Yield the pieces of a chunk as views of its bytes."""
    position = 0
    for piece in chunk.pieces:
        nbytes = piece.nbytes(tensors)
        dtype = getattr(torch, tensors[piece.tensor].dtype)
        yield piece, buffer[position : position + nbytes].view(dtype).view(piece.sizes)
        position += nbytes


# --- the trainer's ranks ---


@dataclass
class History:
    """Messages of a trainer rank's last update, to which the next ones are compared. It takes the memory of all of them.

    Attributes:
        plan: identity of its plan; empty if nothing is known.
        version: version that all workers have.
        contents: bytes of each chunk of the rank's share.
    """

    plan: str = ""
    version: int | None = None
    contents: dict[int, Tensor] = field(default_factory=dict)

    def base(self, plan: str) -> int | None:
        """Return the version from which differences can be sent under a plan; None if there is none."""
        return self.version if self.plan == plan else None

    def note(self, plan: str, version: int) -> None:
        """Note that all workers have activated what was sent: the next update may send differences from it."""
        self.plan, self.version = plan, version

    def forget(self) -> None:
        """Forget everything: the workers may have something else."""
        self.plan, self.version, self.contents = "", None, {}


@dataclass
class ShardTraffic:
    """Amount of a rank's messages.

    Attributes:
        messages: their number, differences and complete ones.
        nbytes: bytes handed to the transport.
        content: bytes of the chunks, once for each receiver: what complete messages would have been.
    """

    messages: int = 0
    nbytes: int = 0
    content: int = 0


class ShardSender:
    """One trainer rank's side of a sharded update. A context manager; :meth:`connect` creates one.

    Args:
        manifest: manifest of the update.
        share: this rank's part of the plan.
        group: complete group, in which the member's rank is the trainer's rank.
        transport: created with this group.
        device: device of the two buffers, each as large as the largest chunk.
        timeout_s: deadline of each message, in seconds.
        history: filled with what is sent; None: differences will not be needed.
        base: version from which differences are sent; None: complete messages.
    """

    def __init__(
        self,
        manifest: Manifest,
        share: Share,
        group: Group,
        transport: PairTransport,
        *,
        device: torch.device,
        timeout_s: float,
        history: History | None = None,
        base: int | None = None,
    ) -> None:
        self.manifest, self.share, self.traffic = manifest, share, ShardTraffic()
        self._group, self._transport = group, transport
        self._device, self._timeout_s = device, timeout_s
        self._history, self._base = history, base
        self._buffers: list[Tensor] = []
        self._works: deque[list[Work]] = deque()

    @classmethod
    def connect(
        cls,
        address: tuple[str, int],
        name: str,
        rank: int,
        manifest: Manifest,
        share: Share,
        *,
        transport: str,
        device: torch.device,
        timeout_s: float,
        options: Mapping[str, Any] | None = None,
        history: History | None = None,
        base: int | None = None,
    ) -> Self:
        """Join the group ``name`` at a listener's ``address`` as trainer rank ``rank``, and connect the transport.

        Raises:
            DeadlineError, PeerLostError, GroupError, TransportError: as :meth:`weightwire.sender.Sender.connect`.
        """
        group = join(*address, name, rank, timeout_s)
        try:
            medium = make_pairs(transport, Setup(group, manifest, device, timeout_s, options or {}))
        except BaseException as error:
            explanation = group.explain(error, "connecting") if isinstance(error, TransportError) else error
            group.fail(str(error))
            group.close()
            raise explanation from error
        return cls(manifest, share, group, medium, device=device, timeout_s=timeout_s, history=history, base=base)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._group.fail(f"trainer rank {self._group.rank} left with {kind.__name__}")
        self.close()

    def close(self) -> None:
        """Leave the group and release the buffers. Rank 0 leaves last: the group ends with it."""
        self._transport.close()
        self._group.close()
        self._buffers = []
        self._works.clear()

    def send(self, slices: Sequence[HeldSlice]) -> list[str]:
        """Send this rank's chunks; on rank 0, return only when every worker has received everything.

        Args:
            slices: those that were listed for the plan, ready on their device's current stream.

        Returns:
            Digest of each chunk of the share.

        Raises:
            PlanError: a slice of the plan is not within one of ``slices``.
            PeerLostError, DeadlineError, TransportError: a member is lost, or too slow; the message names it.
        """
        try:
            digests = self._send(slices)
            if self._group.rank == 0:
                self._group.await_receivers(RECEIVED, self._timeout_s)
            else:
                self._group.acknowledge(RECEIVED)
        except TransportError as error:
            activity = f"sending message {self.traffic.messages + 1} of {len(self.share.operations)}"
            explanation = self._group.explain(error, activity)
            self._group.fail(str(error), at_fault=False)
            self._transport.abort()
            raise explanation from error
        except BaseException as error:
            text = str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
            self._group.fail(text)
            self._transport.abort()
            raise
        return digests

    def _send(self, slices: Sequence[HeldSlice]) -> list[str]:
        sources = match(self.share, slices, self.manifest.tensors)
        pending: list[digest.Pending] = []
        receivers: dict[int, list[int]] = defaultdict(list)
        for step in self.share.operations:
            receivers[step.chunk].append(step.peer)
        if self._history is not None and self._base is None:
            # Until all is sent: an update that fails leaves nothing to compare with.
            self._history.forget()
        for index, chunk in enumerate(self.share.chunks):
            content = self._pack(index, chunk, sources[index])
            pending.append(digest.begin(self.manifest.digest, content))
            message, head = self._message(index, content)
            self._works.append(
                [work for peer in receivers[index] for work in self._hand_over(index, message, head, peer)]
            )
            self.traffic.content += chunk.nbytes * len(receivers[index])
            self._group.progress(index + 1)
        self._wait_until_in_flight(0)
        return [value() for value in pending]

    def _pack(self, index: int, chunk: Chunk, sources: Sequence[Tensor]) -> Tensor:
        """Copy a chunk's pieces into a buffer that is no longer in use."""
        if not self._buffers:
            size = max(chunk.nbytes for chunk in self.share.chunks)
            pin = self._device.type == "cpu" and torch.cuda.is_available() and torch.cuda.is_initialized()
            self._buffers = [
                torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=pin) for _ in range(2)
            ]
        self._wait_until_in_flight(1)
        buffer = self._buffers[index % 2][: chunk.nbytes]
        targets = [view for _, view in _views(chunk, self.manifest.tensors, buffer)]
        # One call for all pieces: a chunk may have thousands of them.
        torch._foreach_copy_(targets, list(sources), non_blocking=True)
        for device in {buffer.device, *(source.device for source in sources)}:
            synchronise_stream(device)
        return buffer

    def _message(self, index: int, content: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the bytes to send and, in an update with a base, the message before them."""
        if self._history is None:
            return content, None
        if self._base is None:
            self._history.contents[index] = content.clone()
            return content, None
        previous = self._history.contents[index]
        difference = delta.encode(content, previous)
        previous.copy_(content)
        message = content if difference is None else difference
        head = torch.tensor([int(difference is not None), message.numel()], dtype=torch.int64).view(torch.uint8)
        head = head.to(self._device)
        synchronise_stream(self._device)
        return message, head

    def _hand_over(self, index: int, message: Tensor, head: Tensor | None, peer: int) -> list[Work]:
        # Tests of faults replace this method, and select the message.
        works = [] if head is None else [self._transport.send_to(head, peer)]
        works.append(self._transport.send_to(message, peer))
        self.traffic.messages += 1
        self.traffic.nbytes += message.numel() + (0 if head is None else head.numel())
        return works

    def _wait_until_in_flight(self, count: int) -> None:
        while len(self._works) > count:
            for work in self._works.popleft():
                work.wait(self._timeout_s)

    def abandon(self, reason: str) -> None:
        """Report to the other members that this rank cannot send."""
        self._group.fail(reason)


def match(share: Share, slices: Sequence[HeldSlice], tensors: Sequence[TensorSpec]) -> list[list[Tensor]]:
    """Return, for each chunk, views of the held slices that are its pieces.

    Raises:
        PlanError: a piece is not within one of ``slices``.
    """
    by_tensor: dict[int, list[HeldSlice]] = defaultdict(list)
    for piece in slices:
        by_tensor[piece.piece.tensor].append(piece)

    def view(piece: Region) -> Tensor:
        for source in by_tensor.get(piece.tensor, ()):
            offsets, sizes = source.piece.box
            start = minus(piece.offsets, offsets)
            if all(
                low >= 0 and low + size <= length for low, size, length in zip(start, piece.sizes, sizes, strict=True)
            ):
                return source.values[index_of(start, piece.sizes)]
        raise PlanError(f"this rank does not hold the slice of {tensors[piece.tensor].name} that it is to send")

    return [[view(piece) for piece in chunk.pieces] for chunk in share.chunks]


def digests_by_worker(
    shares: Sequence[Share], senders: int, digests: Sequence[Sequence[str]]
) -> dict[int, tuple[str, ...]]:
    """Return the digests of the chunks of each worker in the order in which it receives them, by the worker's rank in the group.

    Args:
        shares: each member's part of the plan.
        digests: each trainer rank's result of :meth:`ShardSender.send`.
    """
    by_chunk = {
        id(chunk): value
        for share, values in zip(shares[:senders], digests, strict=True)
        for chunk, value in zip(share.chunks, values, strict=True)
    }
    # By identity: the shares of all members have been made from one list of chunks.
    return {
        senders + worker: tuple(by_chunk[id(chunk)] for chunk in share.chunks)
        for worker, share in enumerate(shares[senders:])
    }


# --- the engine's workers ---


class ShardLayout:
    """A worker's share in its staging memory: the chunks, in the order in which they arrive.

    Attributes:
        share: the worker's part of the plan.
        nbytes: size of the staging memory.
    """

    def __init__(self, share: Share, tensors: Sequence[TensorSpec]) -> None:
        self.share, self._tensors = share, tensors
        self._starts: list[int] = []
        self.nbytes = 0
        for chunk in share.chunks:
            self._starts.append(self.nbytes)
            self.nbytes += -(-chunk.nbytes // ALIGNMENT) * ALIGNMENT

    def content(self, staging: Tensor, index: int) -> Tensor:
        """Return the bytes of a chunk."""
        return staging[self._starts[index] : self._starts[index] + self.share.chunks[index].nbytes]

    def names(self, index: int) -> list[str]:
        """Return the names of the tensors in a chunk."""
        return list(dict.fromkeys(self._tensors[piece.tensor].name for piece in self.share.chunks[index].pieces))

    def tensors(self, staging: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every tensor of which this worker has a part, in the manifest's order.

        Tensors have their full shape. Elements that the worker does not need are NaN (-1 in integers), so that a loader that
        reads them nevertheless cannot pass unnoticed.
        """
        pieces: dict[int, list[tuple[Region, Tensor]]] = defaultdict(list)
        for index, chunk in enumerate(self.share.chunks):
            for piece, view in _views(chunk, self._tensors, self.content(staging, index)):
                pieces[piece.tensor].append((piece, view))
        for index, spec in enumerate(self._tensors):
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


def receive_share(
    layout: ShardLayout,
    staging: Tensor,
    transport: PairTransport,
    timeout_s: float,
    arrived: Callable[[int], object],
    *,
    differences: bool,
) -> None:
    """Run a worker's operations: fill the staging memory, and forward chunks.

    Operations are waited for in their order, sends too: with transports that transfer within the wait, any other order could let
    two members wait for each other.

    Args:
        staging: of ``layout.nbytes`` bytes; with ``differences``, the content of the base version, which is changed in place.
        arrived: called with the index of each chunk when it is complete.

    Raises:
        TransportError: a message did not arrive, or its head is malformed.
        DigestError: a difference is malformed.
    """
    share = layout.share
    forwarded = {step.chunk for step in share.operations if step.sends}
    messages: dict[int, list[Tensor]] = {}
    in_flight: deque[tuple[int | None, Work]] = deque()  # with the chunk that arrives, or None
    complete = 0

    def wait_until_in_flight(count: int) -> None:
        nonlocal complete
        while len(in_flight) > count:
            chunk, work = in_flight.popleft()
            work.wait(timeout_s)
            if chunk is not None:
                arrived(chunk)
                complete = chunk + 1

    for step in share.operations:
        content = layout.content(staging, step.chunk)
        if step.sends:
            while complete <= step.chunk:
                wait_until_in_flight(len(in_flight) - 1)
            parts = messages[step.chunk] if differences else [content]
            in_flight += [(None, transport.send_to(part, step.peer)) for part in parts]
        elif differences:
            wait_until_in_flight(0)
            parts = _receive_difference(content, step.chunk, step.peer, transport, timeout_s)
            arrived(step.chunk)
            complete = step.chunk + 1
            if step.chunk in forwarded:
                messages[step.chunk] = parts
        else:
            in_flight.append((step.chunk, transport.receive_from(content, step.peer)))
        # Two in flight: one is digested while the next arrives.
        wait_until_in_flight(2)
    wait_until_in_flight(0)


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
