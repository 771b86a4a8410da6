"""Choice of a platform by name, or of the first that works; errors name the reason and the remedy."""

from __future__ import annotations

import pytest
import torch

from megascend.errors import MegascendError, PlatformError
from megascend.runtime.platforms import PLATFORMS, choose
from megascend.runtime.platforms.cuda import CudaPlatform

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@pytest.fixture
def pretend_cuda(monkeypatch):
    """Simulate a machine with CUDA: ``is_available`` returns True."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(PlatformError) as raised:
        choose("tpu")
    assert "unknown platform 'tpu'; known: auto" in str(raised.value)
    assert all(name in str(raised.value) for name in PLATFORMS)
    assert isinstance(raised.value, MegascendError)


def test_the_cpu_is_always_there():
    platform = choose("cpu")
    assert (platform.name, platform.device_type, platform.backend) == ("cpu", "cpu", "gloo")
    assert not platform.bind_device
    assert platform.device(3) == torch.device("cpu")
    memory = platform.memory()
    assert 0 < memory.allocated <= memory.total
    assert memory.peak >= memory.allocated // 2
    assert platform.peak_flops() is None


@without_cuda
def test_cuda_is_refused_here_with_the_reason():
    with pytest.raises(
        PlatformError, match=r"platform 'cuda' cannot be used here: torch\.cuda\.is_available\(\) is False"
    ):
        choose("cuda")


def test_auto_prefers_an_accelerator(pretend_cuda):
    assert choose("auto").name == "cuda"
    assert choose("cpu").name == "cpu"


def test_a_local_rank_without_a_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PlatformError, match="local rank 2 has no GPU of its own: this host has 2"):
        CudaPlatform().device(2)
