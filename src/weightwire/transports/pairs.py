"""Messages between any two members of a group, over every transport that can carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from weightwire.errors import TransportError
from weightwire.group import Group
from weightwire.transports.base import (
    TRANSPORTS,
    PairTransport,
    Setup,
    Transport,
    Work,
    make_transport,
    transport_kind,
)


def make_pairs(name: str, setup: Setup, largest: Mapping[int, int] | None = None) -> PairTransport:
    """Create a transport of messages by name.

    Args:
        largest: largest message that this member sends to each peer, in bytes; default: a bucket.
    """
    kind = transport_kind(name)
    if not kind.pairs:
        names = ", ".join(name for name, kind in TRANSPORTS.items() if kind.pairs)
        raise TransportError(f"transport {name!r} only broadcasts; sharded updates need one of {names}")
    transport: Any = (
        make_transport(name, setup) if kind.pairs == "direct" else PairedTransport(name, setup, largest or {})
    )
    return transport


class PairedTransport:
    """A transport for each (sender, receiver), created at their first message."""

    def __init__(self, name: str, setup: Setup, largest: Mapping[int, int]) -> None:
        self._name, self._setup, self._largest = name, setup, largest
        self._transports: dict[tuple[int, int], Transport] = {}

    def send_to(self, buffer: torch.Tensor, peer: int) -> Work:
        return self._transport(self._setup.group.rank, peer).send(buffer)

    def receive_from(self, buffer: torch.Tensor, peer: int) -> Work:
        return self._transport(peer, self._setup.group.rank).receive(buffer)

    def _transport(self, sender: int, receiver: int) -> Transport:
        key = sender, receiver
        if key not in self._transports:
            pair: Any = Pair(self._setup.group, sender, receiver)
            setup = replace(self._setup, group=pair, largest=self._largest.get(receiver))
            self._transports[key] = make_transport(self._name, setup)
        return self._transports[key]

    def abort(self) -> None:
        for transport in self._transports.values():
            transport.abort()

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()


class Pair:
    """Two members of a group as a group of their own: the sender has rank 0, the receiver rank 1."""

    def __init__(self, group: Group, sender: int, receiver: int) -> None:
        self._group, self._ranks = group, (sender, receiver)
        self.name, self.host, self.port = group.name, group.host, group.port
        self.rank, self.size = self._ranks.index(group.rank), 2

    def member(self, rank: int) -> str:
        return self._group.member(self._ranks[rank])

    def store(self, purpose: str, timeout_s: float) -> Any:
        sender, receiver = self._ranks
        return self._group.store(f"{purpose}/{sender}/{receiver}", timeout_s)

    def check(self) -> None:
        self._group.check()
