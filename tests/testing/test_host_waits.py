"""Detection, on a CPU, of operations in which the host would wait for a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megascend.training.kernels import host_copy
from support.host_waits import HostWaits

CPU = torch.device("cpu")


def waits_of(work: Callable[[torch.Tensor, torch.Tensor], object]) -> list[str]:
    """Return the waits of ``work``, which is called with equal tensors on the device and on the host."""
    host = torch.arange(4.0)
    with HostWaits() as waits:
        device_copy = host_copy.to_device(host, CPU)
        work(device_copy, host)
    assert all(f"{__file__.split('/')[-1]}:" in location for location in waits.found), (
        "every wait names its line in this file"
    )
    return [location.partition(" at ")[0] for location in waits.found.elements()]


WAITING = {
    "item": (lambda there, host: (there + 1).sum().item(), "_local_scalar_dense"),
    "float": (lambda there, host: float(there[0]), "_local_scalar_dense"),
    "bool": (lambda there, host: bool((there > 1).any()), "_local_scalar_dense"),
    "tolist": (lambda there, host: (2 * there).tolist(), "tolist"),
    "nonzero": (lambda there, host: there.nonzero(), "nonzero"),
    "mask": (lambda there, host: there[there > 1], "index by a mask"),
    "index of the host": (lambda there, host: there[host.long()], "index by indices of the host"),
    "cpu": (lambda there, host: there.cpu(), "cpu"),
    "pageable": (lambda there, host: host.to(CPU), "to(device)"),
    "made of a list": (lambda there, host: torch.tensor([1, 2], device=CPU), "tensor(device=)"),
    "an own copy": (lambda there, host: host_copy.HostCopy(there).read(), "HostCopy.read"),
    "nested": (
        lambda there, host: torch.nested.as_nested_tensor([there, there[:2]], layout=torch.jagged),
        "tensor(device=)",
    ),
}


@pytest.mark.parametrize("case", WAITING)
def test_reads_and_pageable_copies_are_waits(case: str) -> None:
    work, expected = WAITING[case]
    assert waits_of(work) == [expected]


NOT_WAITING = {
    "of the host": lambda there, host: (host.sum().item(), host.tolist(), host[host > 1], host.nonzero()),
    "brought back": lambda there, host: torch.where(there > 1, there, 0.0).sum(),
    "indices of the device": lambda there, host: there[there.long()],
    "nested of the host": lambda there, host: torch.nested.as_nested_tensor([host, host[:2]], layout=torch.jagged),
}


@pytest.mark.parametrize("case", NOT_WAITING)
def test_host_work_and_queued_work_are_no_waits(case: str) -> None:
    assert waits_of(NOT_WAITING[case]) == []


def test_a_copy_that_is_read_after_a_wait_has_arrived() -> None:
    def work(device_copy: torch.Tensor, host: torch.Tensor) -> list[float]:
        copy = host_copy.HostCopy(device_copy)
        device_copy.sum().item()
        assert copy.read().tolist() == host.tolist()

    assert waits_of(work) == ["_local_scalar_dense"]


def test_copy_of_the_host_is_no_wait_at_the_address_of_a_freed_one() -> None:
    def work(device_copy: torch.Tensor, host: torch.Tensor) -> None:
        for _ in range(8):
            host_copy.HostCopy(device_copy)  # never read
            host_copy.HostCopy(host).read()

    assert waits_of(work) == []


def test_patches_are_undone_afterwards() -> None:
    def patched() -> list[object]:
        return [vars(torch.Tensor).get("to"), torch.tensor, host_copy.to_device, host_copy.HostCopy.read]

    before = patched()
    waits_of(lambda there, host: None)
    assert patched() == before
