"""Set-up of the CUDA platform, as far as it can be tested without a GPU."""

import threading

import pytest
import torch

from megascend.runtime.platforms.cuda import CudaPlatform, first_products, shorten_dump


def test_the_wait_after_a_timeout_is_shortened_unless_it_is_set():
    environment = {}
    assert shorten_dump(environment) == ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=2000"]
    assert environment == {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000"}
    environment = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000"}
    assert shorten_dump(environment) == []
    assert environment == {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000"}


def test_device_that_fails_to_start_is_ignored_by_start_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count() -> int:
        calls.append(True)
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "device_count", count)
    threads = set(threading.enumerate())
    CudaPlatform().warm_up(0)
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    first_products(1)  # a local rank without a device
    assert calls == [True]
