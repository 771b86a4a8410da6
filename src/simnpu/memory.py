"""The memory of the simulated device: npu tensors that alias CPU memory, and back.

A DLPack capsule is a tensor's description with a device field in front. Rewriting that field and importing the capsule
again yields a tensor of the other device over the same bytes, whose storage keeps the first tensor's alive. That is
all the "device memory" there is: about 2 microseconds a crossing, no copy, nothing to free.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from torch import Tensor

from simnpu import allocations
from simnpu.dtypes import EVERY_TYPE, report
from simnpu.host_memory import marked
from simnpu.visible import CURRENT, index_of

# DLPack (dlpack.h): DLManagedTensor starts with DLTensor {void *data; DLDevice {int32 type; int32 id}; ...}
DEVICE_OFFSET = ctypes.sizeof(ctypes.c_void_p)
K_DL_CPU = 1
K_DL_EXT_DEV = 12  # what PyTorch calls PrivateUse1
ID_SHIFT = 32

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_device_at = ctypes.c_int64.from_address
_to_dlpack: Any = torch._C._to_dlpack
_from_dlpack: Any = torch._C._from_dlpack
CPU = torch.device("cpu")
CPU_KEY = torch._C.DispatchKey.CPU


def cpu_view(tensor: Tensor) -> Tensor:
    """Return the CPU tensor over an npu tensor's memory: same sizes, strides and bytes, no autograd history."""
    capsule = _to_dlpack(tensor)
    _device_at(_capsule_pointer(capsule, b"dltensor") + DEVICE_OFFSET).value = K_DL_CPU
    return _from_dlpack(capsule)


def npu_view(tensor: Tensor, index: int | None = None) -> Tensor:
    """Return the npu tensor over a CPU tensor's memory: same sizes, strides and bytes, no autograd history.

    Args:
        tensor: a CPU tensor.
        index: index of the device; by default the current one's.
    """
    capsule = _to_dlpack(tensor)
    number = CURRENT.index if index is None else index
    _device_at(_capsule_pointer(capsule, b"dltensor") + DEVICE_OFFSET).value = K_DL_EXT_DEV | number << ID_SHIFT
    view = _from_dlpack(capsule)
    allocations.add(view, number)
    return view


def empty(
    size: list[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    memory_format: torch.memory_format | None = None,
    **options: Any,
) -> Tensor:
    """aten::empty.memory_format; ``options`` are aten's ``layout`` and ``pin_memory``."""
    _refuse_options(**options)
    return npu_view(
        torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format),
        index_of(device),
    )


def empty_strided(
    size: list[int],
    stride: list[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> Tensor:
    """aten::empty_strided; ``options`` as for :func:`empty`."""
    _refuse_options(**options)
    return npu_view(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), index_of(device))


def _refuse_options(layout: torch.layout | None = None, pin_memory: bool | None = None) -> None:
    _refuse_layout(layout)
    if pin_memory:
        raise RuntimeError("Only dense CPU tensors can be pinned")


def _refuse_layout(layout: torch.layout | None) -> None:
    if layout not in (None, torch.strided):
        raise NotImplementedError(f"the simulated npu holds dense tensors only, not layout {layout}")


def _side(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.is_cpu else cpu_view(tensor)


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """aten::_copy_from: between npu and CPU either way, between two npus or on one, with casts and broadcasting."""
    _side(target).copy_(_side(source))
    return target


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """aten::copy_, to save PyTorch's way round through ``_copy_from``."""
    if source.is_meta or target.is_meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    _side(target).copy_(_side(source))
    return target


def to_copy(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """aten::_to_copy of an npu tensor: always new memory, strides as PyTorch's own kernel keeps them."""
    if dtype is not None and dtype not in EVERY_TYPE:
        report("_to_copy", dtype)
    _refuse_layout(layout)
    if device is not None and device.type == "meta":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
    copy = torch.ops.aten._to_copy.default(
        cpu_view(tensor), dtype=dtype, pin_memory=pin_memory, memory_format=memory_format
    )
    if device is None:
        return npu_view(copy, tensor.get_device())
    if non_blocking and device.type == "cpu":
        return marked(copy)  # torch_npu copies to pinned memory then
    return npu_view(copy, index_of(device)) if device.type == "npu" else copy


def resize_(tensor: Tensor, size: list[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    """aten::resize_. A tensor that outgrows its storage moves to a new one; views of the old one stay behind.

    Real devices grow the shared storage in place. CPU memory behind a capsule cannot grow, and no caller we know relies
    on a view following a growing base.
    """
    shape = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    byte_count = (tensor.storage_offset() + extent(shape)) * tensor.element_size()
    if byte_count > tensor.untyped_storage().nbytes():
        old = cpu_view(tensor.as_strided([tensor.untyped_storage().nbytes() // tensor.element_size()], [1], 0))
        grown = torch.empty(byte_count // tensor.element_size(), dtype=tensor.dtype)
        grown[: old.numel()] = old
        set_storage(
            tensor,
            npu_view(grown, tensor.get_device()).untyped_storage(),
            tensor.storage_offset(),
            size,
            shape.stride(),
        )
    else:
        tensor.as_strided_(size, shape.stride())
    return tensor


def extent(tensor: Tensor) -> int:
    """Count the elements that lie between a tensor's first and last, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def set_storage(tensor: Tensor, storage: Any, offset: int | torch.SymInt, size: Any, stride: Any) -> Tensor:
    """aten::set_.source_Storage_storage_offset. The CPU kernel only writes metadata, so it runs on the npu tensor."""
    op = torch.ops.aten.set_.source_Storage_storage_offset
    return cast(Tensor, op._op_dk(CPU_KEY, tensor, storage, offset, size, stride))


def set_nothing(tensor: Tensor) -> Tensor:
    """aten::set_ without a source: an empty tensor."""
    no_bytes = npu_view(torch.empty(0, dtype=torch.uint8), tensor.get_device())
    return set_storage(tensor, no_bytes.untyped_storage(), 0, [0], [1])


def efficient_zeros(size: list[int], **options: Any) -> Tensor:
    """aten::_efficientzerotensor, with memory: a saving that a simulation does not need."""
    return npu_view(torch.zeros(size, dtype=options.get("dtype")), index_of(options.get("device")))


def has_compatible_shallow_copy_type(tensor: Tensor, other: Tensor) -> bool:
    """Check whether ``tensor.data = other`` may swap implementations. True between CPU and npu, as in torch_npu.

    PyTorch's own answer for a PrivateUse1 device is no, and ``module.to`` then replaces every Parameter by a new one,
    which loses the attributes that Megatron hangs on them.
    """
    dense = all(t.layout == torch.strided and t.device.type in ("cpu", "npu") for t in (tensor, other))
    return dense or tensor.device.type == other.device.type


KERNELS: dict[str, Any] = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "_copy_from": copy_from,
    "copy_": copy_,
    "_to_copy": to_copy,
    "resize_": resize_,
    "set_": set_nothing,
    "_efficientzerotensor": efficient_zeros,
    "_has_compatible_shallow_copy_type": has_compatible_shallow_copy_type,
}
"""Kernels of the npu key, by aten name. ``_has_compatible_shallow_copy_type`` sees a CPU and an npu tensor: npu wins."""
