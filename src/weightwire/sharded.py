"""The trainer ranks' side of a sharded update: each sends the slices that it holds, by a plan.

Differs from :mod:`weightwire.sender` in who sends: all trainer ranks are members of the group, rank 0 of which coordinates, and
every message goes from one member to another. The content of a message is a :class:`weightwire.plan.Chunk`, whose digest the rank
that holds it computes. The workers' side is :class:`weightwire.staging.ShardLayout`.

With a *base* version, a message is the difference from that version (:mod:`weightwire.delta`): the worker has kept what it
received last, applies the difference to it, and compares the digest of the result, which is that of a full message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightwire import delta, digest
from weightwire.errors import PlanError
from weightwire.manifest import TensorSpec
from weightwire.offer import Offer
from weightwire.plan import Chunk, Region, Share
from weightwire.sender import RECEIVED, Buffers, MemberSender, synchronise_stream
from weightwire.slices import index_of, minus
from weightwire.transports.base import PairTransport, Setup, Work, make_pairs

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


def views(chunk: Chunk, tensors: Sequence[TensorSpec], buffer: Tensor) -> Iterator[tuple[Region, Tensor]]:
    """Yield the pieces of a chunk as views of its bytes."""
    position = 0
    for piece in chunk.pieces:
        nbytes = piece.nbytes(tensors)
        dtype = getattr(torch, tensors[piece.tensor].dtype)
        yield piece, buffer[position : position + nbytes].view(dtype).view(piece.sizes)
        position += nbytes


def largest_messages(share: Share) -> dict[int, int]:
    """Return the bytes of the largest message that a member sends to each of its peers: differences are smaller than chunks."""
    sizes: dict[int, int] = {}
    for step in share.operations:
        if step.sends:
            sizes[step.peer] = max(sizes.get(step.peer, HEAD_BYTES), share.chunks[step.chunk].nbytes)
    return sizes


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


class ShardSender(MemberSender[PairTransport]):
    """One trainer rank's side of a sharded update, with two buffers as large as the largest chunk.

    Args:
        rank: the trainer's rank, which is that of the member.
        share: this rank's part of the plan.
        history: filled with what is sent, if differences from it may follow.
        device, buffers: as for :class:`weightwire.sender.MemberSender`.
    """

    def __init__(
        self,
        offer: Offer,
        rank: int,
        share: Share,
        *,
        history: History | None = None,
        device: torch.device | str | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        assert offer.sharded is not None
        self.share, self._base = share, offer.sharded.base
        self._history = history if offer.sharded.keep else None
        super().__init__(offer, rank, f"trainer rank {rank}", len(share.chunks), device, buffers)

    def _connect(self, transport: str, setup: Setup) -> PairTransport:
        return make_pairs(transport, setup, largest_messages(self.share))

    def send(self, slices: Iterable[HeldSlice]) -> list[str]:
        """Send this rank's chunks; on rank 0, return only when every worker has received everything.

        Args:
            slices: those that were listed for the plan, ready on their device's current stream. If it raises, the receivers
                are notified and drop the update.

        Returns:
            Digest of each chunk of the share.

        Raises:
            PlanError: a slice of the plan is not within one of ``slices``.
            PeerLostError, DeadlineError, TransportError: a member is lost, or too slow; the message names it.
        """
        with self._reporting():
            digests = self._send([*slices])
            if self._group.rank == 0:
                self._group.await_receivers(RECEIVED, self._timeout_s)
            else:
                self._group.acknowledge(RECEIVED)
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
        size = max((chunk.nbytes for chunk in self.share.chunks), default=0)
        for index, chunk in enumerate(self.share.chunks):
            content = self._free_buffer(index, size, chunk.nbytes)
            self._pack(chunk, sources[index], content)
            pending.append(digest.begin(self.manifest.digest, content))
            message, head = self._message(index, content)
            self._works.append(
                [work for peer in receivers[index] for work in self._hand_over(index, message, head, peer)]
            )
            nbytes = message.numel() + (0 if head is None else head.numel())
            self.traffic.delivered += nbytes * len(chunk.receivers)
            self.traffic.content += chunk.nbytes * len(chunk.receivers)
            self.traffic.buckets += 1
            self._group.progress(self.traffic.buckets)
        self._wait_until_in_flight(0)
        return [value() for value in pending]

    def _pack(self, chunk: Chunk, sources: Sequence[Tensor], buffer: Tensor) -> None:
        """Copy a chunk's pieces into a buffer."""
        targets = [view for _, view in views(chunk, self.manifest.tensors, buffer)]
        # One call for all pieces: a chunk may have thousands of them.
        torch._foreach_copy_(targets, list(sources), non_blocking=True)
        for device in {buffer.device, *(source.device for source in sources)}:
            synchronise_stream(device)

    def _message(self, index: int, content: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the bytes to send and, in an update with a base, the message before them."""
        if self._history is None:
            return content, None
        if self._base is None:
            # A copy: it is the base of later differences, while the content's memory is used for other messages.
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
        self.traffic.nbytes += message.numel() + (0 if head is None else head.numel())
        return works


def match(share: Share, slices: Sequence[HeldSlice], tensors: Sequence[TensorSpec]) -> list[list[Tensor]]:
    """Return, for each chunk, views of the held slices that are its pieces."""
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
