"""Weights between processes on GPUs by NCCL, CUDA IPC and shared memory: all bytes arrive; lost peers raise in time.

python -m pytest tests/gpu/test_weight_transports.py        # two GPUs, or one (then without NCCL)
"""

from __future__ import annotations

import os
import signal
import time
from itertools import product
from typing import Any

import pytest
import torch
from wire_members import cross_messages, next_group, run_meeting, run_members

from megascend.testing import Lost, run_distributed
from weightwire import digest as module
from weightwire.digest import digest
from weightwire.errors import DeadlineError, PeerLostError, TransportError
from weightwire.manifest import Manifest, TensorSpec
from weightwire.transports import Setup, make_transport, nccl
from weightwire.transports.base import make_pairs

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU")
TWO = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and there are {GPUS}")
MANIFEST = Manifest(1, (TensorSpec("a", "uint8", (1000,)),))
SIZES = (1, 999, 4096, 1_000_003, 64 * 2**20)


def transport(name: str, group: Any, timeout_s: float = 30.0, same_device: bool = False) -> Any:
    device = torch.device("cuda", 0 if same_device else group.rank % GPUS)
    torch.cuda.set_device(device)
    return make_transport(name, Setup(group, MANIFEST, device, timeout_s)), device


def content(number: int) -> torch.Tensor:
    return torch.randint(0, 256, (SIZES[number],), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def all_sizes(name: str, same_device: bool, group: Any) -> list[bool]:
    medium, device = transport(name, group, same_device=same_device)
    checks = []
    for number in range(len(SIZES)):
        buffer = (
            content(number).to(device) if group.rank == 0 else torch.zeros(SIZES[number], dtype=torch.uint8).to(device)
        )
        torch.cuda.synchronize()
        (medium.send if group.rank == 0 else medium.receive)(buffer).wait(30)
        checks.append(torch.equal(buffer.cpu(), content(number)))
        checks.append(digest("multilinear64", buffer) == digest("multilinear64", content(number)))
    assert not torch.distributed.is_initialized()
    medium.close()
    return checks


def messages(name: str, same_device: bool, group: Any) -> list[bool]:
    """Send messages of all sizes from every member to every other one, in one order, twice."""
    device = torch.device("cuda", 0 if same_device else group.rank % GPUS)
    torch.cuda.set_device(device)
    manifest = Manifest(1, (TensorSpec("a", "uint8", (max(SIZES),)),))
    largest = dict.fromkeys(range(group.size), max(SIZES))
    medium, checks = make_pairs(name, Setup(group, manifest, device, 30.0), largest), []
    for sender, receiver, number in product(range(group.size), range(group.size), [*range(len(SIZES))] * 2):
        if sender != receiver and group.rank == sender:
            buffer = content(number).to(device)
            torch.cuda.synchronize()
            medium.send_to(buffer, receiver).wait(30)
        elif sender != receiver and group.rank == receiver:
            buffer = torch.zeros(SIZES[number], dtype=torch.uint8, device=device)
            medium.receive_from(buffer, sender).wait(30)
            checks.append(torch.equal(buffer.cpu(), content(number)))
    group.acknowledge("done")
    group.await_receivers("done", 30.0, range(group.size))  # the last message may be in this process's memory
    medium.close()
    return checks


@pytest.mark.parametrize(
    ("name", "same_device", "count"),
    [
        pytest.param("nccl", False, min(GPUS, 4), marks=TWO),
        pytest.param("cuda_ipc", False, min(GPUS, 4), marks=TWO),
        ("cuda_ipc", True, 3),
        pytest.param("shared_memory", False, min(GPUS, 4), marks=TWO),
        ("shared_memory", True, 3),
    ],
)
def test_messages_between_any_two_members(name, same_device, count):
    results = run_members(lambda group: messages(name, same_device, group), count)
    assert results == [[True] * (2 * len(SIZES) * (count - 1))] * count


@pytest.mark.parametrize(
    ("name", "same_device"),
    [
        pytest.param(
            "nccl", False, marks=pytest.mark.skipif(GPUS < 4, reason=f"needs four GPUs, and there are {GPUS}")
        ),
        pytest.param("cuda_ipc", False, marks=TWO),
        ("cuda_ipc", True),
    ],
)
def test_receivers_start_messages_of_several_senders_without_waiting(name, same_device):
    def on_member(group: Any) -> list[list[int]]:
        device = torch.device("cuda", 0 if same_device else group.rank % GPUS)
        torch.cuda.set_device(device)
        medium = make_pairs(name, Setup(group, MANIFEST, device, 30.0))
        try:
            return cross_messages(medium, group, device)
        finally:
            medium.close()

    _, _, third, fourth = run_members(on_member, 4)
    assert (third, fourth) == ([[0], [1], [2], [3], [14]], [[10], [11], [12], [13], [4]])


@pytest.mark.parametrize(
    ("name", "same_device"),
    [pytest.param("nccl", False, marks=TWO), pytest.param("cuda_ipc", False, marks=TWO), ("cuda_ipc", True)],
)
def test_every_byte_arrives(name: str, same_device: bool) -> None:
    """Compare contents and digests with the CPU's."""
    assert run_members(lambda group: all_sizes(name, same_device, group), 2) == [[True] * 2 * len(SIZES)] * 2


@TWO
@pytest.mark.parametrize("name", ["nccl", "cuda_ipc"])
def test_two_buckets_in_flight_arrive_in_order(name: str) -> None:
    def on_member(group: Any) -> list[int]:
        medium, device = transport(name, group)
        buffers = [torch.full((2**20,), 7, dtype=torch.uint8, device=device) for _ in range(2)]
        works, observed = [], []
        for number in range(8):
            if len(works) == 2:
                works.pop(0).wait(30)
                observed.append(int(buffers[number % 2].max()))
            if group.rank == 0:
                buffers[number % 2].fill_(number)
                torch.cuda.synchronize()
            works.append((medium.send if group.rank == 0 else medium.receive)(buffers[number % 2]))
        for number, work in zip((6, 7), works, strict=True):
            work.wait(30)
            observed.append(int(buffers[number % 2].max()))
        medium.close()
        return observed

    assert run_members(on_member, 2) == [list(range(8))] * 2


@TWO
@pytest.mark.parametrize("name", ["nccl", "cuda_ipc"])
@pytest.mark.parametrize("failure", ["dies", "is silent"])
def test_lost_peer_raises_and_the_device_still_works(name: str, failure: str) -> None:
    """Raise on the receiver in time if the sender exits or stops sending; the device still works."""

    def on_member(group: Any) -> list[str]:
        medium, device = transport(name, group, 20.0)
        if group.rank == 0:
            group.await_receivers("connected", 20.0)
            if failure == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(8)
            medium.close()
            return []
        group.acknowledge("connected")
        buffer = torch.zeros(2**20, dtype=torch.uint8, device=device)
        work = medium.receive(buffer)
        try:
            work.wait(3.0)
        except TransportError as error:
            report = [type(group.explain(error, "receiving")).__name__]
        medium.abort()
        medium.close()
        torch.cuda.synchronize()
        report.append(str(int(torch.arange(10, device=device).sum())))
        return report

    options = {"expect_lost": {0}} if failure == "dies" else {}
    # torch's watchdog would sleep for a minute after a lost peer, unless the transport shortens it.
    sender, receiver = run_members(on_member, 2, timeout_s=50, **options)
    assert receiver == [(PeerLostError if failure == "dies" else DeadlineError).__name__, "45"]
    assert sender == (Lost(-9) if failure == "dies" else [])


@TWO
def test_new_group_works_after_a_lost_one() -> None:
    """Run a broadcast that times out, then a new group, in the same processes."""

    def on_member(meet_twice: Any) -> list[bool]:
        group = meet_twice()
        medium, device = transport("nccl", group)
        if group.rank == 1:
            with pytest.raises(DeadlineError):
                medium.receive(torch.zeros(1000, dtype=torch.uint8, device=device)).wait(2.0)
            medium.abort()
        else:
            time.sleep(4)
        medium.close()
        return all_sizes("nccl", False, next_group(group))

    assert run_meeting(on_member, 2) == [[True] * 2 * len(SIZES)] * 2


@TWO
def test_next_update_reuses_the_communicator() -> None:
    def on_member(meet: Any) -> list[Any]:
        first = meet()
        checks = all_sizes("nccl", False, first) + all_sizes("nccl", False, next_group(first))
        (communicator,) = nccl.COMMUNICATORS._cached.values()
        return [all(checks), communicator.made_in == first.name]

    assert run_meeting(on_member, 2) == [[True, True]] * 2


def test_digest_equals_the_cpus() -> None:
    """Compare digests of odd lengths and offsets and several levels, with and without Triton."""
    data = torch.randint(0, 256, (40_000_011,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    parts = [(0, 0), (0, 1), (0, 32768), (1, 32769), (3, 70_000), (0, len(data)), (7, len(data) - 5)]

    def on_device() -> list[str]:
        on_gpu = data.cuda()
        digests = [digest("multilinear64", on_gpu[first:last]) for first, last in parts]
        module.has_triton = lambda: False
        return digests + [digest("multilinear64", on_gpu[first:last]) for first, last in parts]

    on_cpu = [digest("multilinear64", data[first:last]) for first, last in parts]
    assert run_distributed(on_device, 1, init=False) == [on_cpu * 2]
