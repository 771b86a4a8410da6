"""Streamed updates: every tensor arrives complete, and inconsistent data is refused before a tensor is yielded."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_members import run_members

from weightwire.errors import DigestError, ManifestError, PeerLostError, VersionError, WireError
from weightwire.manifest import Manifest, TensorSpec
from weightwire.stream import Head, StreamReceiver, StreamSender
from weightwire.transports import Setup, make_transport

CPU, TIMEOUT_S, BUCKET = torch.device("cpu"), 20.0, 5000
SPECS = [
    ("large", (300, 70), torch.bfloat16),
    ("empty", (0, 3), torch.float32),
    ("odd", (7,), torch.int8),
    ("scalar", (), torch.float64),
    ("last", (2000,), torch.float32),
]


def weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(name, (torch.randn(shape, generator=generator) * 9).to(dtype)) for name, shape, dtype in SPECS]


def member(group: Any, version: int | None = 3, **changed: Any) -> tuple[Any, Any]:
    """Return (transport, this member's end of the stream)."""
    manifest = Manifest(0, (TensorSpec("bucket", "uint8", (BUCKET,)),), BUCKET)
    medium = make_transport("gloo", Setup(group, manifest, CPU, TIMEOUT_S))
    arguments = {"bucket_bytes": BUCKET, "version": 3 if group.rank == 0 else version, "timeout_s": TIMEOUT_S} | changed
    return medium, (StreamSender if group.rank == 0 else StreamReceiver)(medium, group, CPU, **arguments)


def send_all(sender: StreamSender) -> None:
    for name, tensor in weights():
        sender.add(name, tensor)
        tensor.zero_()  # what was added may be changed
    sender.finish()


@pytest.mark.parametrize("version", [3, None])
def test_every_receiver_gets_every_tensor(version: int | None) -> None:
    def on_member(group: Any) -> list[bool]:
        medium, end = member(group, version)
        if group.rank == 0:
            return [send_all(end) is None]
        tensors = list(end)
        medium.close()
        return [
            name == expected_name and tensor.dtype == expected.dtype and torch.equal(tensor, expected)
            for (name, tensor), (expected_name, expected) in zip(tensors, weights(), strict=True)
        ]

    assert run_members(on_member, 3) == [[True], [True] * 5, [True] * 5]


def refused(group: Any, medium: Any, end: Any, send: Any = send_all) -> list[Any]:
    """Return the member's error class and the number of tensors it yielded before."""
    handed_out = 0
    try:
        if group.rank == 0:
            send(end)
            group.await_receivers("end", 5.0)
        for _ in end:
            handed_out += 1
    except WireError as error:
        group.fail(str(error))
        medium.close()
        return [type(error), handed_out]
    return []


def test_flipped_bit_is_detected_before_the_tensor_is_yielded() -> None:
    last = weights()[-1][1].nbytes % BUCKET

    class Flipping:
        """Transport that flips a bit of the last bucket, which is one of two of a tensor."""

        def __init__(self, medium: Any) -> None:
            self.medium = medium

        def receive(self, buffer: torch.Tensor) -> Any:
            self.medium.receive(buffer).wait(TIMEOUT_S)
            if buffer.numel() == last:
                buffer[17] ^= 4
            return type("Done", (), {"wait": lambda self, timeout_s: None})()

    def on_member(group: Any) -> list[Any]:
        medium, end = member(group)
        if group.rank == 1:
            end._transport = Flipping(medium)
        return refused(group, medium, end)

    sender, receiver = run_members(on_member, 2)
    assert receiver == [DigestError, 4]  # every tensor except the one that ends in the last bucket: its batch
    assert sender in ([PeerLostError, 0], [])


def test_another_version_is_refused() -> None:
    def on_member(group: Any) -> list[Any]:
        medium, end = member(group, version=4)
        return refused(group, medium, end)

    assert run_members(on_member, 2)[1] == [VersionError, 0]


@pytest.mark.parametrize("fault", ["twice", "a batch is missing", "larger bucket"])
def test_inconsistent_streams_raise_manifest_error(fault: str) -> None:
    def on_member(group: Any) -> list[Any]:
        medium, end = member(
            group, **({"bucket_bytes": BUCKET // 2} if fault == "larger bucket" and group.rank else {})
        )

        def send(sender: StreamSender) -> None:
            name, tensor = weights()[0]
            sender.add(name, tensor)
            if fault == "twice":
                sender.add(name, tensor)
            if fault == "a batch is missing":
                sender._index += 1
            sender.finish()

        return refused(group, medium, end, send)

    kind, handed_out = run_members(on_member, 2)[1]
    assert kind is ManifestError
    assert handed_out == (0 if fault == "larger bucket" else 1)


MANIFEST = Manifest(0, (TensorSpec("a", "float32", (4,)),), BUCKET)
HEAD = Head(3, 2, False, ("0123",), MANIFEST)


@settings(max_examples=300, deadline=None)
@given(
    where=st.sampled_from(["version", "index", "last", "digests", "manifest", "tensor", "missing", "extra"]),
    value=st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.floats(), st.lists(st.integers(), max_size=6)),
    index=st.integers(0, 4),
)
def test_a_malformed_head_is_refused(where: str, value: Any, index: int) -> None:
    fields = json.loads(HEAD.to_bytes())
    if where == "tensor":
        fields["manifest"]["tensors"][0][index % 3] = value
    elif where == "missing":
        del fields[sorted(fields)[index]]
    else:
        fields[where] = value
    text = json.dumps(fields).encode()
    try:
        head = Head.from_bytes(text)
    except ManifestError:
        return
    assert json.loads(head.to_bytes()) == fields  # the value happened to be one that fits
    assert all(type(value) is str for value in head.digests)
