"""A sender and its receivers in one process; the receivers have their own threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weightwire.group import Listener
from weightwire.manifest import AdapterInfo, Manifest
from weightwire.offer import Offer, Seal
from weightwire.receiver import Receiver
from weightwire.sender import Sender, spec_of

TIMEOUT_S = 30.0
LISTENERS: deque[Listener] = deque(maxlen=8)
"""Recent listeners: a listener must outlive its groups, whose threads have ended eight listeners later."""


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Build tensors of several dtypes and odd sizes, an empty and a scalar one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "embed.weight": normal(33, 7),
        "layers.0.norm.weight": normal(7, dtype=torch.bfloat16),
        "layers.0.mask": torch.randint(0, 2, (5,), generator=generator).bool(),
        "layers.0.linear.weight": normal(19, 7, dtype=torch.float16),
        "empty": normal(0, 4),
        "step": torch.randint(0, 9, (), generator=generator),
        "head.weight": normal(3, 11, dtype=torch.bfloat16).t(),  # not contiguous
    }


def manifest_of(weights: dict[str, torch.Tensor], version: int, bucket_bytes: int = 256, **fields: Any) -> Manifest:
    return Manifest(version, tuple(spec_of(*item) for item in weights.items()), bucket_bytes, **fields)


class Trainer:
    """The sender's side."""

    def __init__(
        self, receivers: Sequence[Receiver], transport: str = "gloo", owner: str = "trainer-1", **options: Any
    ):
        self.listener, self.receivers = Listener(), receivers
        LISTENERS.append(self.listener)
        self.transport, self.owner, self.options = transport, owner, options
        self.lease_s, self.timeout_s = 30.0, TIMEOUT_S

    def offers(self, manifest: Manifest) -> list[Offer]:
        name = self.listener.new_group([self.owner, *(receiver.name for receiver in self.receivers)])
        return [
            Offer(
                name,
                self.owner,
                self.listener.host,
                self.listener.port,
                rank,
                1,
                self.transport,
                self.timeout_s,
                self.lease_s,
                manifest,
                self.options,
            )
            for rank in range(1, len(self.receivers) + 1)
        ]

    def send(self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]], **settings: Any) -> Seal:
        """Offer, send, and return the seal."""
        offers = self.offers(manifest)
        for offer, receiver in zip(offers, self.receivers, strict=True):
            receiver.open(Offer.from_json(offer.to_json()))
        with Sender(offers[0], **settings) as sender:
            self.sender = sender
            return sender.send(weights)

    def push(self, version: int, weights: dict[str, torch.Tensor], bucket_bytes: int = 256, **fields: Any) -> Seal:
        """Run an update up to its verification by all receivers."""
        seal = self.send(manifest_of(weights, version, bucket_bytes, **fields), weights.items())
        for receiver in self.receivers:
            receiver.verify(Seal.from_json(seal.to_json()), TIMEOUT_S)
        return seal


class Engine:
    """Engine double: a mapping of tensors."""

    def __init__(self, weights: dict[str, torch.Tensor] | None = None) -> None:
        self.weights = weights or {}
        self.backup: dict[str, torch.Tensor] = {}

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.backup = dict(self.weights)
        for name, tensor in tensors:
            self.weights[name] = tensor.clone()

    def restore(self) -> None:
        self.weights = dict(self.backup)


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Compare names in order, dtypes, shapes and every bit."""
    return list(actual) == list(expected) and all(
        actual[name].dtype == tensor.dtype
        and actual[name].shape == tensor.shape
        and actual[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
        for name, tensor in expected.items()
    )


ADAPTER = AdapterInfo("alice", {"r": 4, "lora_alpha": 8})
