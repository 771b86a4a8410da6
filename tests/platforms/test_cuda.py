"""What the CUDA platform sets up, as far as it shows without a GPU."""

import threading

import pytest
import torch

from megascend.platforms.cuda import CudaPlatform, first_products, shorten_dump


def test_the_wait_after_a_timeout_is_shortened_unless_it_is_set():
    environment = {}
    assert shorten_dump(environment) == ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=2000"]
    assert environment == {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000"}
    environment = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000"}
    assert shorten_dump(environment) == []
    assert environment == {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000"}


def test_a_device_that_does_not_start_is_told_of_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def count() -> int:
        asked.append(True)
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "device_count", count)
    threads = set(threading.enumerate())
    CudaPlatform().start_ahead(0)
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    first_products(1)  # a local rank without a device
    assert asked == [True]
