"""Choosing a platform: by name, or the first that works; what does not work says why, and what to do."""

from __future__ import annotations

import pytest
import torch

from megascend import platforms
from megascend.bootstrap.versions import STACKS
from megascend.config import Parallel
from megascend.errors import MegascendError, PlatformError
from megascend.platforms import PLATFORMS, choose, cuda
from megascend.platforms.cuda import CudaPlatform

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@pytest.fixture
def pretend_cuda(monkeypatch):
    """A machine with CUDA, as far as anyone asks ``is_available``."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("MEGASCEND_REFERENCE_TE", raising=False)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(PlatformError) as raised:
        choose("tpu")
    assert "unknown platform 'tpu'; known: auto" in str(raised.value)
    assert all(name in str(raised.value) for name in PLATFORMS)
    assert isinstance(raised.value, MegascendError)


def test_the_cpu_is_always_there():
    platform = choose("cpu")
    assert (platform.name, platform.device_type, platform.backend) == ("cpu", "cpu", "gloo")
    assert platform.must_patch_first
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


@without_cuda
def test_auto_takes_the_cpu_where_nothing_else_works():
    assert choose("auto").name == choose().name == "cpu"


def test_auto_prefers_an_accelerator(pretend_cuda):
    assert choose("auto").name == "cuda"
    assert choose("cpu").name == "cpu"


def test_auto_asks_in_the_tables_order(monkeypatch):
    asked = []

    def load(name):
        asked.append(name)
        return choose.__globals__["import_module"]("megascend.platforms.cpu").CpuPlatform()

    monkeypatch.setattr(platforms, "_load", load)
    choose("auto")
    assert asked == [next(iter(PLATFORMS))]


def test_cuda_without_transformer_engine_says_how_to_get_it_or_do_without(pretend_cuda, monkeypatch):
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    with pytest.raises(PlatformError) as raised:
        choose("cuda").prepare(STACKS[0], Parallel())
    message = str(raised.value)
    assert "platform 'cuda' needs Transformer Engine: pip install" in message
    assert "transformer-engine[pytorch]" in message
    assert "MEGASCEND_REFERENCE_TE=1" in message


def test_cuda_takes_the_reference_only_when_it_is_asked_for_by_name(pretend_cuda, monkeypatch):
    forced = []
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    monkeypatch.setattr("megascend.reference_te.install", lambda force: forced.append(force) or ["reference"])
    monkeypatch.setenv("MEGASCEND_REFERENCE_TE", "1")
    platform = CudaPlatform()
    assert platform.prepare(STACKS[0], Parallel()) == ["reference"]
    assert forced == [True]
    assert not platform.fuses_rope if hasattr(platform, "fuses_rope") else not platform.has_transformer_engine_kernels


def test_cuda_reports_the_variable_that_it_sets_and_respects_the_users(pretend_cuda, monkeypatch):
    monkeypatch.setattr(cuda, "find_spec", lambda name: object())
    assert CudaPlatform().prepare(STACKS[0], Parallel()) == []
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert CudaPlatform().prepare(STACKS[0], Parallel()) == ["CUDA_DEVICE_MAX_CONNECTIONS=1"]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert CudaPlatform().prepare(STACKS[0], Parallel()) == []


def test_a_local_rank_without_a_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PlatformError, match="local rank 2 has no GPU of its own: this host shows 2"):
        CudaPlatform().device(2)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA T4", None),
    ],
)
def test_the_peak_is_the_data_sheets(monkeypatch, name, flops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert CudaPlatform().peak_flops() == flops
