"""Choose a transport by the location of the sender's and the receivers' memory. Pure but for :meth:`Location.of`."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weightwire.errors import ManifestError, TransportError
from weightwire.liveness import memory_space
from weightwire.transports.base import TRANSPORTS, device_types, transport_kind

if TYPE_CHECKING:
    import torch

AUTO = "auto"
"""Setting that selects the best transport for all members of an update."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Location:
    """Memory that holds the buckets of one member of an update.

    Attributes:
        device: type of its torch device: ``cpu``, ``cuda``, ``npu``.
        host: name of its machine, for messages.
        space: equal for processes that can share memory; empty if unknown.
        gpu: UUID of its CUDA device; empty on other devices, or if unknown.
        visible: UUIDs of all CUDA devices visible to the process.
        lends: other processes can map its CUDA memory.
        nccl: version of the NCCL in its torch; empty on other devices, or if unknown.
    """

    device: str
    host: str = ""
    space: str = ""
    gpu: str = ""
    visible: tuple[str, ...] = ()
    lends: bool = True
    nccl: str = ""

    @classmethod
    def of(cls, device: torch.device) -> Location:
        """Describe memory of this process on ``device``."""
        gpu, visible, nccl = "", (), ""
        if device.type == "cuda":
            import torch
            from torch.cuda.nccl import version

            visible = tuple(gpu_uuid(index) for index in range(torch.cuda.device_count()))
            gpu = gpu_uuid(torch.cuda.current_device() if device.index is None else device.index)
            nccl = ".".join(map(str, version()))
        expandable = any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
        return cls(device.type, socket.gethostname(), memory_space(), gpu, visible, not expandable, nccl)

    def __str__(self) -> str:
        return f"{self.device}{f' {self.gpu[:12]}' if self.gpu else ''} on {self.host or 'an unknown host'}"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "visible": list(self.visible)}

    @classmethod
    def from_json(cls, data: Any) -> Location:
        """Parse the output of :meth:`to_json`."""
        try:
            return cls(**{**data, "visible": tuple(data["visible"])})
        except (TypeError, KeyError) as error:
            raise ManifestError(f"{data!r:.200} does not describe a receiver's memory") from error


def choose(sender: Location, receivers: Mapping[str, Location]) -> str:
    """Return the best transport for these members.

    On CUDA it is ``nccl``; where two members use one GPU, or their versions of NCCL differ, both of which NCCL refuses, it is
    ``cuda_ipc``, or ``shared_memory`` if a receiver does not see the sender's GPU. On NPUs it is ``hccl``, for receivers on the
    CPU ``gloo``, and for a mixture on one machine ``shared_memory``.
    """
    if names := fitting(sender, receivers):
        return names[0]
    raise TransportError(
        f"no transport brings bytes from the trainer ({sender}) to all receivers ({_description(receivers)}): set "
        "WEIGHTWIRE_STAGING=cpu for the engines (gloo)"
    )


def check(transport: str, sender: Location, receivers: Mapping[str, Location]) -> None:
    """Raise TransportError if ``transport`` cannot serve these members; the message names those that can."""
    problem = _problem(transport, sender, receivers)
    if problem:
        alternatives = ", ".join(fitting(sender, receivers)) or "none"
        raise TransportError(
            f"transport {transport!r} {problem}; the trainer's weights are in {sender}, the receivers' in "
            f"{_description(receivers)}; what fits: {alternatives} (transport {AUTO!r} takes the first)"
        )


def choose_pairs(transport: str | None, trainers: Mapping[str, Location], receivers: Mapping[str, Location]) -> str:
    """Return the best transport between all of these members, for a sharded update.

    Args:
        transport: the only one that may be used; None: any.
    """
    if transport is not None and not transport_kind(transport).pairs:
        raise TransportError(f"transport {transport!r} only broadcasts")
    problems = []
    every = [name for name, kind in TRANSPORTS.items() if kind.pairs]
    for name in every if transport is None else (transport,):
        problem = next(
            (
                text
                for trainer, location in trainers.items()
                # The other ranks are receivers here: NCCL needs a GPU for each of them, too.
                if (text := _problem(name, location, {**receivers, **_except(trainers, trainer, name)}))
            ),
            None,
        )
        if problem is None:
            return name
        problems.append(f"{name} {problem}")
    raise TransportError(f"no transport connects all ranks with all workers: {'; '.join(problems)}")


def _except(trainers: Mapping[str, Location], name: str, transport: str) -> dict[str, Location]:
    """Return the locations of the other ranks' buffers, which are on the CPU if the transport does not move their memory."""
    possible = device_types(transport)
    return {
        other: location
        if location.device in possible or "cpu" not in possible
        else replace(location, device="cpu", gpu="", visible=())
        for other, location in trainers.items()
        if other != name
    }


def fitting(sender: Location, receivers: Mapping[str, Location]) -> list[str]:
    """Return the transports that fit and need no options, the best first."""
    return [name for name, kind in TRANSPORTS.items() if kind.automatic and not _problem(name, sender, receivers)]


def _problem(transport: str, sender: Location, receivers: Mapping[str, Location]) -> str:
    """Describe why a transport does not fit; empty if it does, or if nothing is known against it."""
    possible = device_types(transport)
    other = next((name for name, location in receivers.items() if location.device not in possible), None)
    if other is not None:
        return f"moves memory of {', '.join(possible)}, and {other} keeps weights on {receivers[other].device}"
    if sender.device not in possible and "cpu" not in possible:
        return f"moves memory of {', '.join(possible)}, not of {sender.device}"
    locations = [sender, *receivers.values()]
    if transport == "nccl":
        gpus = [location.gpu for location in locations if location.gpu]
        if len(set(gpus)) < len(gpus):
            return "needs a GPU for each member, and two are on one"
        # NCCL refuses a communicator of several versions; trainer and engines may run in separate environments.
        versions = sorted({location.nccl for location in locations if location.nccl})
        return f"needs one version of NCCL, and there are {', '.join(versions)}" if len(versions) > 1 else ""
    if transport in ("cuda_ipc", "shared_memory") and not _share(locations):
        return "needs all members on one machine, of one user and in one namespace of processes"
    if transport == "cuda_ipc":
        blind = next((name for name, location in receivers.items() if sender.gpu not in location.visible), None)
        if blind is not None:
            return f"needs receivers that see the trainer's GPU, which {blind} does not (CUDA_VISIBLE_DEVICES)"
        if not sender.lends:
            return f"cannot share memory of expandable segments ({ALLOCATOR_VARIABLES[-1]} of the trainer)"
    return ""


def _share(locations: Sequence[Location]) -> bool:
    spaces = {location.space for location in locations}
    # Empty is unknown, and two unknowns are not the same machine.
    return len(spaces) == 1 and "" not in spaces


def _description(receivers: Mapping[str, Location]) -> str:
    return ", ".join(f"{name}: {location}" for name, location in receivers.items())


def gpu_uuid(device: torch.device | int) -> str:
    """Return a CUDA device's UUID, which is the same in all processes; CUDA_VISIBLE_DEVICES numbers devices differently."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
