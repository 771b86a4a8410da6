"""What a transport is, and the registry of those there are.

A transport moves buckets from the sender to all receivers of one group, in order. It is made when all members have met, and
serves one update. A new one is a file with a class and a row in :data:`BUILT_IN`, or, from a package of one's own, a call of
:func:`register_transport`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from weightwire.errors import TransportError

if TYPE_CHECKING:
    import torch

    from weightwire.group import Group
    from weightwire.manifest import Manifest


class Work(Protocol):
    """A bucket on its way."""

    def wait(self, timeout_s: float) -> None:
        """Return when the buffer may be used again: on the sender overwritten, on a receiver read by whatever stream.

        An implementation looks at least every :data:`POLL_S` whether ``group.check()`` raises, so that the loss of a member
        ends the wait.

        Raises:
            DeadlineError: not done within ``timeout_s`` seconds.
            PeerLostError: a member is known to be lost.
            TransportError: it failed otherwise; ``Group.explain`` then finds out whose fault it was.
        """
        ...


class Transport(Protocol):
    """Buckets to all receivers of a group. Made on every member, with the same name and options.

    ``send`` and ``receive`` begin and do not wait; what they begin is done, in order, at the latest while its
    :meth:`Work.wait` runs. At most two are under way. The sender only sends, receivers only receive, both from one thread.
    """

    def send(self, buffer: torch.Tensor) -> Work:
        """Begin to send ``buffer`` (uint8, contiguous, on the device of the setup), which is left alone until the work is done.

        Whatever fills the buffer has been waited for: an implementation need not look at other streams.
        """
        ...

    def receive(self, buffer: torch.Tensor) -> Work:
        """Begin to fill ``buffer`` (uint8, contiguous, on the device of the setup) with the next bucket, which is of its size."""
        ...

    def abort(self) -> None:
        """The update is lost: give up what is under way, as far as the medium can. Called before :meth:`close`, if at all."""
        ...

    def close(self) -> None:
        """Let go of everything, without waiting for other members. May be called twice."""
        ...


@dataclass(frozen=True)
class Setup:
    """What a transport is made from.

    Attributes:
        group: the members, which are all there; rank 0 sends. ``group.store("transport")`` is for the transport's own use.
        manifest: what is going to travel.
        device: where the buffers are.
        timeout_s: deadline, in seconds, of what the constructor waits for.
        options: the transport's own settings, JSON, the same on all members: they come from the sender.
    """

    group: Group
    manifest: Manifest
    device: torch.device
    timeout_s: float
    options: Mapping[str, Any] = field(default_factory=dict)


Factory = Callable[[Setup], Transport]

POLL_S = 0.2
"""The longest that a wait goes without a look at the other members, in seconds."""

BUILT_IN: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "cuda_ipc": ("weightwire.transports.cuda_ipc", "CudaIpcTransport", ("cuda",)),
    "files": ("weightwire.transports.files", "FilesTransport", ("cpu", "cuda", "npu")),
    "gloo": ("weightwire.transports.gloo", "GlooTransport", ("cpu",)),
    "hccl": ("weightwire.transports.hccl", "HcclTransport", ("npu",)),
    "nccl": ("weightwire.transports.nccl", "NcclTransport", ("cuda",)),
    "shared_memory": ("weightwire.transports.shared_memory", "SharedMemoryTransport", ("cpu", "cuda", "npu")),
    "vllm_hccl": ("weightwire.vllm.hccl_transport", "VllmHcclTransport", ("npu",)),
}
"""Name: (module, class, types of devices that the buffers may be on)."""

_registered: dict[str, tuple[Factory, tuple[str, ...]]] = {}


def register_transport(name: str, factory: Factory, device_types: Collection[str]) -> None:
    """Make a transport known, in this process, under ``name``. Both sides do.

    Args:
        factory: called with a :class:`Setup` on every member, when all have met.
        device_types: types of torch devices that its buffers may be on, the preferred one first: ``("cuda",)``.

    Raises:
        TransportError: the name is taken.
    """
    if name in BUILT_IN or name in _registered or name == "auto":  # which chooses one
        raise TransportError(f"a transport {name!r} is there already; known: {', '.join(transport_names())}")
    _registered[name] = factory, tuple(device_types)


def transport_names() -> list[str]:
    """All names, sorted."""
    return sorted([*BUILT_IN, *_registered])


def device_types(name: str) -> tuple[str, ...]:
    """Types of devices that buffers of this transport may be on, the preferred one first.

    Raises:
        TransportError: there is no such transport.
    """
    if name in _registered:
        return _registered[name][1]
    if name in BUILT_IN:
        return BUILT_IN[name][2]
    raise TransportError(f"there is no transport {name!r}; known: {', '.join(transport_names())}")


def transports_for(device_type: str) -> list[str]:
    """Return the names of those whose buffers may be on devices of this type, sorted."""
    return [name for name in transport_names() if device_type in device_types(name)]


def make_transport(name: str, setup: Setup) -> Transport:
    """The transport of that name, ready to send or receive.

    Raises:
        TransportError: there is none of that name, it does not work with the device, or it cannot be set up.
    """
    possible = device_types(name)
    if setup.device.type not in possible:
        others = transports_for(setup.device.type)
        raise TransportError(
            f"transport {name!r} moves memory of {', '.join(possible)}, not of {setup.device.type}; for "
            f"{setup.device.type} there are: {', '.join(others) or 'none'}"
        )
    if name in _registered:
        return _registered[name][0](setup)
    module, attribute, _ = BUILT_IN[name]
    return getattr(import_module(module), attribute)(setup)
