"""The trainer's side of one update: pack a stream of named tensors into buckets and send them.

Buckets are double-buffered: while one is sent the next is filled, so the stream (an export with its own collectives) continues
during the transfer. That needs no thread, since :meth:`Transport.send` only starts a transfer.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from weightwire import digest
from weightwire.errors import ManifestError, TransportError, WireError
from weightwire.group import join
from weightwire.manifest import Bucket, TensorSpec, plan_buckets
from weightwire.offer import Offer, Seal
from weightwire.transports import Setup, Transport, Work, make_transport
from weightwire.transports.base import PairTransport, device_types

Medium = TypeVar("Medium", bound=Transport | PairTransport)

TRAFFIC_PARTS = ("export", "fill", "digest", "send", "receivers")
RECEIVED = "received"
"""Event that receivers acknowledge when all buckets have arrived."""


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, _dtype_name(tensor.dtype), tuple(tensor.shape))


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class Traffic:
    """Amount handed to the transport.

    Attributes:
        buckets: their number; of a sharded update that of the chunks.
        nbytes: bytes handed to the transport: once for all receivers if it broadcasts, otherwise once for each peer.
        delivered: bytes that the receivers get of them, together, from here or from another receiver.
        content: what ``delivered`` would be if differences were sent completely.
        seconds: time waited for tensors (``export``), for buckets to be filled (``fill``), for their digests (``digest``: on a
            GPU only until the kernel is queued), for buffers to be sent (``send``), and for receivers to report the last bucket
            (``receivers``). Zeros of a sharded update.
    """

    buckets: int = 0
    nbytes: int = 0
    delivered: int = 0
    content: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TRAFFIC_PARTS, 0.0))

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time within the context to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start


class Buffers:
    """The two buckets that a sender fills in turn. Kept from one update to the next, they are allocated once.

    Their memory is :attr:`nbytes`: twice the size of a bucket, or of the largest model so far if that is smaller.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())

    def take(self, side: int, nbytes: int, device: torch.device) -> Tensor:
        """Return ``nbytes`` of buffer 0 or 1 on a device."""
        buffer = self._buffers.pop(side, None)
        if buffer is None or buffer.numel() < nbytes or buffer.device != device:
            del buffer  # first, or there would be three
            # Pinned for copies from the GPU, but never as the first use of CUDA in this process.
            pin = device.type == "cpu" and torch.cuda.is_available() and torch.cuda.is_initialized()
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)
        self._buffers[side] = buffer
        return buffer[:nbytes]


class MemberSender(Generic[Medium]):
    """A rank of the trainer that sends an update. A context manager; an error within it is reported to the other members.

    The constructor returns when all members have joined the group and the transport is connected.

    Args:
        offer: the offer to any of the engines.
        rank: rank in the update's group: the trainer's.
        label: of this member, for messages.
        count: number of buckets that it sends.
        device: device of the two buffers; default: the transport's preferred type of device.
        buffers: those of earlier updates, to be used again; default: new ones.

    Raises:
        DeadlineError: members did not join within the offer's deadline; the message names them.
        PeerLostError: a member ended or failed before the group was complete.
        GroupError, TransportError: the name was used before; the transport cannot work here.
    """

    def __init__(
        self,
        offer: Offer,
        rank: int,
        label: str,
        count: int,
        device: torch.device | str | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self.manifest, self.traffic = offer.manifest, Traffic()
        self._label, self._count, self._timeout_s = label, count, offer.timeout_s
        # NCCL reads the device's memory, Gloo the host's.
        self._device = with_index(torch.device(device_types(offer.transport)[0] if device is None else device))
        self._buffers = buffers or Buffers()
        self._works: deque[Sequence[Work]] = deque()
        self._group = join(offer.host, offer.port, offer.update, rank, offer.timeout_s)
        setup = Setup(self._group, offer.manifest, self._device, offer.timeout_s, offer.options)
        try:
            self._transport = self._connect(offer.transport, setup)
        except BaseException as error:
            explanation = self._group.explain(error, "connecting") if isinstance(error, TransportError) else error
            self._group.fail(str(error))
            self._group.close()
            raise explanation from error

    def _connect(self, transport: str, setup: Setup) -> Medium:
        """Create the transport."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._group.fail(f"{self._label} left with {kind.__name__}")  # ignored if a failure was reported before
        self.close()

    def close(self) -> None:
        """Leave the group and release the buffers. Rank 0 leaves last: the group ends with it."""
        self._transport.close()
        self._group.close()
        self._buffers = Buffers()
        # Works hold references to buffers.
        self._works.clear()

    def _free_buffer(self, index: int, size: int, nbytes: int, in_flight: int = 1) -> Tensor:
        """Return the buffer for a bucket, of two of ``size`` bytes, when at most so many buckets before it are in flight."""
        self._wait_until_in_flight(in_flight)
        return self._buffers.take(index % 2, size, self._device)[:nbytes]

    def _wait_until_in_flight(self, count: int) -> None:
        """Wait for the oldest messages, in order, until ``count`` are in flight."""
        while len(self._works) > count:
            for work in self._works.popleft():
                work.wait(self._timeout_s)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report an error within the context to the other members, and cancel transfers in flight."""
        try:
            yield
        except TransportError as error:
            activity = f"sending bucket {min(self.traffic.buckets + 1, self._count)} of {self._count}"
            explanation = self._group.explain(error, activity)
            # The broken connection is a consequence. The others shall look for its cause instead of naming this member.
            self._group.fail(str(error), at_fault=False)
            self._transport.abort()
            raise explanation from error
        except BaseException as error:
            # What was to be sent has failed: here this member is at fault.
            self._group.fail(str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}")
            self._transport.abort()
            raise


class Sender(MemberSender[Transport]):
    """Sender of whole tensors, as rank 0 of the update's group, to all workers of all engines.

    Tensors are read on the current stream of their device, on which their values must be ready, as anything computed with plain
    torch is; that stream is synchronised before a bucket is handed to the transport.

    Args:
        overlap: fill one bucket while the other is sent; otherwise wait for every bucket before the next one is filled.
        device, buffers: as for :class:`MemberSender`.
    """

    def __init__(
        self,
        offer: Offer,
        *,
        device: torch.device | str | None = None,
        buffers: Buffers | None = None,
        overlap: bool = True,
    ) -> None:
        self._buckets = plan_buckets(offer.manifest.tensors, offer.manifest.bucket_bytes)
        super().__init__(offer, 0, "the sender", len(self._buckets), device, buffers)
        self._overlap = overlap
        self._digests: list[digest.Pending] = []

    def _connect(self, transport: str, setup: Setup) -> Transport:
        return make_transport(transport, setup)

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> Seal:
        """Send the tensors, in the manifest's order, and return when every receiver has them all.

        If anything raises, including ``weights``, the receivers are notified and drop the update.

        Raises:
            ManifestError: the tensors are not those of the manifest.
            PeerLostError, DeadlineError, TransportError: a receiver is lost, or too slow; the message names it.
        """
        with self._reporting():
            self._send(weights)
            # A send that completed locally may still be in a buffer of the network: only receivers know what has arrived.
            with self.traffic.timed("receivers"):
                self._group.await_receivers(RECEIVED, self._timeout_s)
        return Seal(
            self._group.name,
            self.manifest.version,
            self.manifest.identity,
            tuple(pending() for pending in self._digests),
        )

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        tensors = self._checked(weights)
        index, content = -1, torch.empty(0, dtype=torch.uint8)
        size = min(self.manifest.bucket_bytes, self.manifest.nbytes)
        for bucket in self._buckets:
            with self.traffic.timed("send"):
                buffer = self._free_buffer(bucket.index, size, bucket.nbytes, in_flight=1 if self._overlap else 0)
            start, exported = time.perf_counter(), self.traffic.seconds["export"]
            for piece in bucket.pieces:
                # A loop, not one step: empty tensors are in no bucket, but are part of the stream.
                while index < piece.tensor:
                    del content  # the stream may reuse its memory for the next tensor
                    before = time.perf_counter()
                    index, content = next(tensors)
                    self.traffic.seconds["export"] += time.perf_counter() - before
                source = content[piece.offset : piece.offset + piece.length]
                # Asynchronous: a bucket's copies from the device are waited for once, before it is sent.
                buffer[piece.position : piece.position + piece.length].copy_(source, non_blocking=True)
            exported = self.traffic.seconds["export"] - exported
            self.traffic.seconds["fill"] += time.perf_counter() - start - exported
            source_device = content.device
            if bucket.index == len(self._buckets) - 1:
                # Exhaust the stream first: if it raises at its end, no receiver must have everything.
                del content
                for _ in tensors:
                    pass
            self._hand_over(bucket, buffer, source_device)
        if not self._buckets:  # only empty tensors
            for _ in tensors:
                pass
        with self.traffic.timed("send"):
            self._wait_until_in_flight(0)

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Yield (index in the manifest, flat bytes) of each tensor, after comparing it with the manifest."""
        specs = self.manifest.tensors
        index = 0
        for name, tensor in weights:
            if index == len(specs):
                raise ManifestError(f"sending: {name} comes after the last tensor of the manifest, {specs[-1].name}")
            expected = specs[index]
            # Field by field: a mixture of experts has tens of thousands of tensors.
            if (name, tensor.shape, _dtype_name(tensor.dtype)) != (expected.name, expected.shape, expected.dtype):
                spec = spec_of(name, tensor)
                raise ManifestError(
                    f"sending: tensor {index + 1} of {len(specs)} is {spec.name}, {spec.dtype} {list(spec.shape)}; the "
                    f"manifest has {expected.name}, {expected.dtype} {list(expected.shape)}"
                )
            yield index, tensor.detach().contiguous().view(-1).view(torch.uint8)
            index += 1
        if index < len(specs):
            raise ManifestError(
                f"sending: after {index} of {len(specs)} tensors there are no more; {specs[index].name} is missing"
            )

    def _hand_over(self, bucket: Bucket, buffer: Tensor, source: torch.device) -> None:
        # Tests of faults replace this method, and select the bucket.
        # The transport uses streams of its own, and must not read before the copies have been made. With a GPU source
        # and a CPU buffer the copy runs on the GPU's stream.
        with self.traffic.timed("fill"):
            for device in {buffer.device, source}:
                synchronise_stream(device)
        self._works.append([self._transport.send(buffer)])
        with self.traffic.timed("digest"):  # started; overlaps with the transfer
            self._digests.append(digest.begin(self.manifest.digest, buffer))
        self.traffic.buckets += 1
        self.traffic.nbytes += buffer.numel()
        self.traffic.delivered = self.traffic.content = self.traffic.nbytes * (self._group.size - 1)
        self._group.progress(self.traffic.buckets)


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index: the current one of this thread, if it has none. Others start on device 0."""
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def synchronise_stream(device: torch.device) -> None:
    """Wait for the work queued on the current stream of a device, not for other streams."""
    if device.type not in ("cpu", "meta"):
        module: Any = torch.get_device_module(device)
        module.current_stream(device).synchronize()
