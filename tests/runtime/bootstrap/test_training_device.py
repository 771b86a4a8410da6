"""The fake device for megatron.training on a CPU, tested on fake modules."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from megascend.errors import ImportOrderError
from megascend.runtime.bootstrap.reference import training_device

NAME = training_device.MODULES[0]


def test_only_the_patched_module_sees_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(NAME)
    module.torch = torch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, module)
    truth = torch.cuda.is_available(), torch.cuda.device_count()
    training_device.install(NAME)
    patched_torch = module.torch
    training_device.install(NAME)
    assert module.torch is patched_torch
    assert patched_torch.cuda.is_available()
    assert patched_torch.cuda.device_count() == 1
    assert (
        patched_torch.cuda.get_device_capability()[0] == patched_torch.cuda.get_device_properties("cuda:0").major >= 8
    )
    assert patched_torch.cuda.Stream is torch.cuda.Stream
    assert patched_torch.tensor is torch.tensor
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == truth


def test_install_before_import_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(ImportOrderError, match=NAME):
        training_device.install(NAME)


def test_fused_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(training_device.FUSED_KERNELS)
    module.load = lambda args: pytest.fail("compiles")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, training_device.FUSED_KERNELS, module)
    training_device.without_fused_kernels()
    module.load(None)
