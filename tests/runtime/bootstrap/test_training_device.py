"""The fake device for megatron.training on a CPU, tested on fake modules."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

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
