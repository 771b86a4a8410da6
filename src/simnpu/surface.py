"""Putting the pieces together under the name ``torch_npu``."""

from __future__ import annotations

import functools
import os
import sys
import types

import torch

from simnpu import collectives, distributed, host_memory, jit_operators, npu, operators, optim, profiler, races
from simnpu import device as simulated
from simnpu.environment import simulated_version as simulated_version
from simnpu.errors import missing as missing
from simnpu.identity import SIMULATED_VERSION, soc_version
from simnpu.operators import quantised_types
from simnpu.settings import ACTIVE_VARIABLE

UNSUPPORTED_DTYPES = [torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]


def install(package: str) -> None:
    """Register the device and ``hccl`` with torch, and fill the module named ``package`` (``torch_npu``)."""
    module = sys.modules[package]
    simulated.register(npu)
    if torch.npu is not npu:  # type: ignore[attr-defined]  # the device was registered alone before
        del torch.npu  # type: ignore[attr-defined]
        torch._register_device_module("npu", npu)
    collectives.register()
    host_memory.install_reducer()
    accept_simulated_streams()
    alias(f"{package}.npu", npu)
    for name in (
        "amp",
        "amp.autocast_mode",
        "amp.common",
        "amp.grad_scaler",
        "autocast_utils",
        "memory",
        "random",
        "streams",
        "utils",
    ):
        alias(f"{package}.npu.{name}", sys.modules[f"{npu.__name__}.{name}"])
    alias(f"{package}._C", bindings(f"{package}._C"))
    alias(f"{package}.distributed", distributed)
    alias(f"{package}.optim", optim)
    alias(f"{package}.profiler", profiler)
    for name in ("dynamic_profile", "experimental_config", "profiler", "scheduler"):
        sys.modules[f"{package}.profiler.{name}"] = sys.modules[f"{profiler.__name__}.{name}"]
    for name, packet in operators.packets().items():
        setattr(module, name, packet)
    for name, number in quantised_types.PUBLIC.items():
        setattr(module, name, number)
    jit_operators.install()
    torch.version.cann = SIMULATED_VERSION  # type: ignore[attr-defined]
    module.unsupported_dtype = UNSUPPORTED_DTYPES  # type: ignore[attr-defined]
    announce()


def accept_simulated_streams() -> None:
    """Let ``tensor.record_stream`` take the simulated ``Stream``, which is no ``torch.Stream`` to torch's argument parser."""
    original = torch.Tensor.record_stream

    @functools.wraps(original)
    def record_stream(self: torch.Tensor, stream: object) -> None:
        if self.device.type == "npu":
            races.record_stream(self, stream)
        else:
            original(self, stream)  # type: ignore[arg-type]

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]


def alias(name: str, module: types.ModuleType) -> None:
    """Let ``module`` be imported as ``name`` and found as an attribute of the package above it."""
    sys.modules[name] = module
    above, _, last = name.rpartition(".")
    setattr(sys.modules[above], last, module)


def bindings(name: str) -> types.ModuleType:
    """``torch_npu._C``, of which the process-group options are used from Python."""
    from simnpu import hccl_group

    module = types.ModuleType(name, "Stand-in for torch_npu's C++ bindings.")
    module._distributed_c10d = hccl_group  # type: ignore[attr-defined]
    module._npu_get_soc_version = soc_version  # type: ignore[attr-defined]
    module.__getattr__ = lambda attribute: raise_missing(attribute, name)  # type: ignore[attr-defined]
    sys.modules[f"{name}._distributed_c10d"] = hccl_group
    return module


def raise_missing(attribute: str, module: str) -> None:
    raise missing(attribute, module)


def announce() -> None:
    """Print one line on stderr per job, so that its log says what it ran on: from rank 0, or from the launcher above it."""
    launcher_spoke = ACTIVE_VARIABLE in os.environ and "TORCHELASTIC_RUN_ID" in os.environ
    if os.environ.get("RANK", "0") != "0" or launcher_spoke:
        return
    print(
        f"simnpu: torch.device('npu') is SIMULATED on CPU memory (torch_npu {simulated_version()}); its "
        "speed and memory use say nothing about hardware",
        file=sys.stderr,
    )
