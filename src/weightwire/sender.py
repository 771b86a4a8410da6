"""The trainer's side of one update: a stream of named tensors becomes buckets, and these travel.

Two buckets are in use: while one travels the next is filled, so the stream (an export with collectives of its own) goes on during
the transfer. No thread is needed for that, since a transport only begins to send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from weightwire import digest
from weightwire.errors import ManifestError, TransportError, WireError
from weightwire.group import Group, Listener, join
from weightwire.manifest import Manifest, TensorSpec
from weightwire.offer import Seal
from weightwire.plan import Bucket, plan_buckets
from weightwire.transports import Setup, Transport, Work, make_transport
from weightwire.transports.base import device_types

RECEIVED = "received"
"""What receivers acknowledge when all buckets have arrived."""


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """What a manifest says of a tensor."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@dataclass
class Traffic:
    """What has been handed to the transport.

    Attributes:
        buckets: how many.
        nbytes: their bytes, which travel to every receiver.
    """

    buckets: int = 0
    nbytes: int = 0


class Sender:
    """Sends the tensors of one manifest over one transport, once.

    Tensors are read on the current stream of their device, which must be the one that their values are ready on, as anything
    computed with plain torch is; before a bucket is handed over that stream is waited for.

    It is made when all receivers have come (:meth:`connect`), and closed by ``with``.

    Args:
        manifest: what is going to be sent.
        group: which has met; this process is its rank 0.
        transport: made with this group.
        device: where the buckets are: the transport's.
        timeout_s: deadline of each bucket, from when the buffer is needed again, in seconds.
        overlap: fill one bucket while the other travels. Without it every bucket is waited for before the next one is filled.
    """

    def __init__(
        self,
        manifest: Manifest,
        group: Group,
        transport: Transport,
        *,
        device: torch.device,
        timeout_s: float,
        overlap: bool = True,
    ) -> None:
        self.manifest, self.traffic = manifest, Traffic()
        self._group, self._transport = group, transport
        self._device, self._timeout_s, self._overlap = device, timeout_s, overlap
        self._buckets = plan_buckets(manifest.tensors, manifest.bucket_bytes)
        self._buffers: list[Tensor] = []
        self._works: deque[Work] = deque()
        self._digests: list[digest.Pending] = []

    @classmethod
    def connect(
        cls,
        listener: Listener,
        name: str,
        manifest: Manifest,
        *,
        transport: str,
        device: torch.device | str | None = None,
        timeout_s: float,
        options: Mapping[str, Any] | None = None,
        overlap: bool = True,
    ) -> Sender:
        """Wait for the receivers of the group ``name``, and connect to them.

        Args:
            device: where the buckets are; default: the first type of device that the transport takes.

        Raises:
            DeadlineError: receivers have not come within ``timeout_s`` seconds; the message names them.
            PeerLostError: one came and is gone, or told that it has failed.
            GroupError, TransportError: the name was used before; the transport cannot work here.
        """
        where = torch.device(device_types(transport)[0] if device is None else device)
        group = join(listener.host, listener.port, name, 0, timeout_s)
        try:
            medium = make_transport(transport, Setup(group, manifest, where, timeout_s, options or {}))
        except BaseException as error:
            explained = group.explain(error, "connecting") if isinstance(error, TransportError) else error
            group.fail(str(error))
            group.close()
            raise explained from error
        return cls(manifest, group, medium, device=where, timeout_s=timeout_s, overlap=overlap)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._group.fail(f"the sender left with {kind.__name__}")  # believed if nothing was told before
        self.close()

    def close(self) -> None:
        """Leave the group and let go of buffers."""
        self._transport.close()
        self._group.close()
        self._buffers = []
        self._works.clear()

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> Seal:
        """Send the tensors, which come in the manifest's order, and return when every receiver has them all.

        If anything raises, what ``weights`` raises included, the receivers are told and drop the update.

        Raises:
            ManifestError: the tensors are not those of the manifest.
            PeerLostError, DeadlineError, TransportError: a receiver is lost, or too slow; the message names it.
        """
        try:
            self._send(weights)
            where = "waiting for the receivers"
            self._group.await_receivers(RECEIVED, self._timeout_s)
        except TransportError as error:
            where = f"sending bucket {min(self.traffic.buckets + 1, len(self._buckets))} of {len(self._buckets)}"
            explained = self._group.explain(error, where)
            self._group.fail(str(error), at_fault=False)
            self._transport.abort()
            raise explained from error
        except BaseException as error:
            text = str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
            self._group.fail(text)
            self._transport.abort()
            raise
        return Seal(
            self._group.name,
            self.manifest.version,
            self.manifest.identity,
            tuple(pending() for pending in self._digests),
        )

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        tensors = self._checked(weights)
        place, content = -1, torch.empty(0, dtype=torch.uint8)
        for bucket in self._buckets:
            buffer = self._free_buffer(bucket)
            for piece in bucket.pieces:
                while place < piece.tensor:
                    del content  # the stream's memory, which it may use again
                    place, content = next(tensors)
                source = content[piece.offset : piece.offset + piece.length]
                buffer[piece.position : piece.position + piece.length].copy_(source, non_blocking=True)
            where = content.device
            if (
                bucket.index == len(self._buckets) - 1
            ):  # no receiver has everything before the stream has ended as it should
                del content
                for _ in tensors:
                    pass
            self._hand_over(bucket, buffer, where)
        if not self._buckets:  # empty tensors alone
            for _ in tensors:
                pass
        self._wait_until_under_way(0)

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """(place in the manifest, the tensor's bytes, flat) of each tensor, held against the manifest."""
        specs = self.manifest.tensors
        place = 0
        for name, tensor in weights:
            if place == len(specs):
                raise ManifestError(f"sending: {name} comes after the last tensor of the manifest, {specs[-1].name}")
            found, want = spec_of(name, tensor), specs[place]
            if found != want:
                raise ManifestError(
                    f"sending: tensor {place + 1} of {len(specs)} is {found.name}, {found.dtype} {list(found.shape)}; the "
                    f"manifest has {want.name}, {want.dtype} {list(want.shape)}"
                )
            yield place, tensor.detach().contiguous().view(-1).view(torch.uint8)
            place += 1
        if place < len(specs):
            raise ManifestError(
                f"sending: after {place} of {len(specs)} tensors there are no more; {specs[place].name} is missing"
            )

    def _free_buffer(self, bucket: Bucket) -> Tensor:
        """The buffer for this bucket, once what was in it has travelled."""
        side = bucket.index % 2
        if len(self._buffers) <= side:
            self._buffers.append(self._new_buffer())
        self._wait_until_under_way(1 if self._overlap else 0)
        return self._buffers[side][: bucket.nbytes]

    def _wait_until_under_way(self, count: int) -> None:
        """Wait for the oldest buckets, in order, until so many are left."""
        while len(self._works) > count:
            self._works.popleft().wait(self._timeout_s)

    def _new_buffer(self) -> Tensor:
        size = min(self.manifest.bucket_bytes, self.manifest.nbytes)
        page_locked = self._device.type == "cpu" and torch.cuda.is_available() and torch.cuda.is_initialized()
        return torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=page_locked)

    def _hand_over(self, bucket: Bucket, buffer: Tensor, source: torch.device) -> None:
        for device in {buffer.device, source}:
            synchronise_stream(device)
        self._works.append(self._transport.send(buffer))
        self._digests.append(digest.begin(self.manifest.digest, buffer))  # while it travels
        self.traffic.buckets += 1
        self.traffic.nbytes += buffer.numel()
        self._group.progress(self.traffic.buckets)


def synchronise_stream(device: torch.device) -> None:
    """Wait until what is queued on the current stream of a device is done. Other streams go on."""
    if device.type not in ("cpu", "meta"):
        module: Any = torch.get_device_module(device)
        module.current_stream(device).synchronize()
