"""The device that megatron.training is shown on a CPU, on modules that stand for its own."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from megascend.bootstrap.reference import training_device
from megascend.errors import ImportOrderError

NAME = training_device.MODULES[0]


def test_one_module_sees_a_device_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(NAME)
    module.torch = torch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, module)
    truth = torch.cuda.is_available(), torch.cuda.device_count()
    training_device.install(NAME)
    shown = module.torch
    training_device.install(NAME)
    assert module.torch is shown
    assert shown.cuda.is_available()
    assert shown.cuda.device_count() == 1
    assert shown.cuda.get_device_capability()[0] == shown.cuda.get_device_properties("cuda:0").major >= 8
    assert shown.cuda.Stream is torch.cuda.Stream
    assert shown.tensor is torch.tensor
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == truth


def test_too_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(ImportOrderError, match=NAME):
        training_device.install(NAME)


def test_nothing_is_compiled_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(training_device.FUSED_KERNELS)
    module.load = lambda args: pytest.fail("compiles")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, training_device.FUSED_KERNELS, module)
    training_device.without_fused_kernels()
    module.load(None)
