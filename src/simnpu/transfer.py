"""``torch_npu.contrib.transfer_to_npu``: CUDA's names act on the NPU from here on.

The names and their treatment follow the public source of torch_npu (Ascend/pytorch, contrib/transfer_to_npu.py):
device arguments that say ``cuda`` come to mean ``npu``, what ``torch.npu.__all__`` names is merged into ``torch.cuda``
(the module itself stays), backend ``nccl`` becomes ``hccl``, and ``torch.jit.script`` returns the function unscripted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._device import DeviceContext

from simnpu.triton_stand_in import install_triton_stand_in

FACTORIES = """arange as_tensor bartlett_window blackman_window empty empty_like empty_strided eye from_file frombuffer
full full_like hamming_window hann_window kaiser_window linspace load logspace normal ones ones_like rand rand_like
randint randint_like randn randn_like randperm range scalar_tensor set_default_device sparse_coo_tensor
sparse_compressed_tensor sparse_csr_tensor tensor tril_indices triu_indices zeros zeros_like get_device_module"""
TENSOR_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros to pin_memory"
MODULE_METHODS = "to to_empty"
TAKES_A_NUMBER_AS_DEVICE = ("to", "to_empty")
CUDA_FUNCTIONS = """can_device_access_peer current_stream default_stream get_device_capability get_device_name
get_device_properties max_memory_allocated max_memory_reserved mem_get_info memory_allocated memory_reserved
memory_stats memory_summary reset_max_memory_allocated reset_peak_memory_stats set_device
set_per_process_memory_fraction synchronize utilization"""
DEVICE_KEYWORDS = ("device", "device_type", "map_location", "device_id")
MERGED = {
    "cuda": "npu",
    "cuda.amp": "npu.amp",
    "cuda.amp.autocast_mode": "npu.amp.autocast_mode",
    "cuda.amp.common": "npu.amp.common",
    "cuda.amp.grad_scaler": "npu.amp.grad_scaler",
    "cuda.random": "npu.random",
}


@functools.cache
def transfer() -> None:
    """Apply everything, once per process."""
    from simnpu import npu

    merge(npu)
    wrap_functions(torch.cuda, CUDA_FUNCTIONS)
    wrap_functions(torch.cuda.device, "__init__")
    torch.cuda.default_generators = npu.default_generators
    torch.cuda.CUDAGraph = npu.NPUGraph  # type: ignore[misc]
    torch.cuda.DoubleTensor = npu.FloatTensor  # type: ignore[attr-defined]  # torch_npu: no double type on the device

    wrap_functions(torch, FACTORIES)
    wrap_functions(torch.Tensor, TENSOR_METHODS)
    wrap_functions(torch.nn.Module, MODULE_METHODS)
    wrap_functions(torch.amp.autocast_mode.autocast, "__init__")
    wrap_functions(DeviceContext, "__init__")
    torch.Tensor.cuda = torch.Tensor.npu  # type: ignore[attr-defined]
    torch.Tensor.is_cuda = torch.Tensor.is_npu  # type: ignore[attr-defined]
    torch.nn.Module.cuda = torch.nn.Module.npu  # type: ignore[attr-defined]
    torch.Generator.devices = ("npu", "cuda")  # type: ignore[attr-defined]  # see device.DeviceRedirect

    transfer_distributed()
    torch.jit.script = unscripted  # type: ignore[assignment]
    install_triton_stand_in()


def merge(npu: ModuleType) -> None:
    """Put the public names of ``torch.npu`` and its submodules into ``torch.cuda``'s."""
    for cuda_name, npu_name in MERGED.items():
        target = sys.modules[f"torch.{cuda_name}"]
        source = sys.modules[npu.__name__ + npu_name.removeprefix("npu")]
        for name in source.__all__:
            setattr(target, name, getattr(source, name))


def transfer_distributed() -> None:
    """Backends and devices of ``torch.distributed``."""
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d, fsdp

    from simnpu.hccl_group import ProcessGroupHCCL

    dist.init_process_group = redirected(dist.init_process_group, backends=True)
    distributed_c10d._new_group_with_tag = redirected(distributed_c10d._new_group_with_tag, backends=True)
    dist.is_nccl_available = lambda: True
    wrap_functions(dist.ProcessGroup, "_get_backend")
    wrap_functions(fsdp.FullyShardedDataParallel, "__init__")
    wrap_functions(torch.nn.parallel.DistributedDataParallel, "__init__")
    wrap_functions(device_mesh, "init_device_mesh")
    wrap_functions(device_mesh.DeviceMesh, "__init__")
    dist.init_device_mesh = device_mesh.init_device_mesh
    dist.Backend.default_device_backend_map.pop("cuda", None)
    dist.ProcessGroupNCCL = distributed_c10d.ProcessGroupNCCL = ProcessGroupHCCL  # type: ignore[misc,assignment]


def wrap_functions(owner: Any, names: str) -> None:
    """Replace those of ``names`` (separated by spaces) that ``owner`` has by :func:`redirected` versions."""
    for name in names.split():
        if hasattr(owner, name):
            setattr(owner, name, redirected(getattr(owner, name)))


def redirected(function: Callable[..., Any], backends: bool = False) -> Callable[..., Any]:
    """``function`` with ``cuda`` in its device arguments read as ``npu`` (and ``nccl`` as ``hccl``)."""
    numbers = getattr(function, "__name__", "") in TAKES_A_NUMBER_AS_DEVICE

    def text(value: str) -> str:
        value = value.replace("cuda", "npu")
        return value.replace("nccl", "hccl") if backends else value

    def positional(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and numbers:
            return f"npu:{value}"
        return replaced(value)

    def replaced(value: Any) -> Any:
        if type(value) is str:
            return text(value)
        if type(value) is torch.device and value.type == "cuda":
            return torch.device("npu", value.index) if value.index is not None else torch.device("npu")
        if type(value) is dict:
            return {positional(k): positional(v) for k, v in value.items()}
        return value

    def keyword(name: str, value: Any) -> Any:
        if name in DEVICE_KEYWORDS:
            return f"npu:{value}" if type(value) is int else replaced(value)
        if name == "backend" and backends and type(value) is str:
            return text(value)
        if name == "device_ids" and isinstance(value, (list, tuple)):
            return type(value)(replaced(item) for item in value)
        return value

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(positional, args), **{name: keyword(name, value) for name, value in kwargs.items()})

    return call


def unscripted(obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``torch.jit.script``, which transfer_to_npu switches off."""
    return obj
