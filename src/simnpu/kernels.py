"""Which kernel each aten operator has on the simulated device, and entering them into PyTorch's dispatcher."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from simnpu import autocast, host_memory, memory
from simnpu.dtypes import watched
from simnpu.fallback import Kernel, arguments_to_cpu, kernel_for, name_of
from simnpu.memory import CPU_KEY, cpu_view, npu_view
from simnpu.races import ordered, record_stream

PRODUCT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DOT_DTYPES = (*PRODUCT_DTYPES, torch.uint8, torch.int8, torch.int32)
PRODUCTS = {
    "mm": "aclnnMm",
    "mm.out": "aclnnMm",
    "bmm": "aclnnBatchMatMul",
    "bmm.out": "aclnnBatchMatMul",
    "mv": "aclnnMv",
    "addmm": "aclnnAddmm",
    "addmm.out": "aclnnAddmm",
    "addmm_": "aclnnAddmm",
    "addmv": "aclnnAddmv",
    "addmv.out": "aclnnAddmv",
    "addmv_": "aclnnAddmv",
    "baddbmm": "aclnnBaddbmm",
    "baddbmm.out": "aclnnBaddbmm",
    "baddbmm_": "aclnnBaddbmm",
    "addbmm": "aclnnAddbmm",
    "addbmm.out": "aclnnAddbmm",
    "addbmm_": "aclnnAddbmm",
    "dot": "aclnnDot",
}
"""aten's products and the Ascend kernel of each."""
ACL_NAMES = {
    torch.float32: "DT_FLOAT",
    torch.float16: "DT_FLOAT16",
    torch.bfloat16: "DT_BFLOAT16",
    torch.float64: "DT_DOUBLE",
    torch.int64: "DT_INT64",
    torch.int32: "DT_INT32",
    torch.int16: "DT_INT16",
    torch.int8: "DT_INT8",
    torch.uint8: "DT_UINT8",
    torch.bool: "DT_BOOL",
    torch.complex64: "DT_COMPLEX64",
    torch.complex128: "DT_COMPLEX128",
}


def checked(name: str, kernel: Kernel) -> Kernel:
    """``kernel`` of ``aten::<name>`` behind a check of its tensors' types, if it is a matrix product."""
    if name not in PRODUCTS:
        return kernel
    supported = DOT_DTYPES if name == "dot" else PRODUCT_DTYPES

    def product(*args: Any, **kwargs: Any) -> Any:
        for tensor in args:
            if isinstance(tensor, Tensor) and tensor.dtype not in supported:
                dtypes = "".join(f"{ACL_NAMES[dtype]}," for dtype in supported)
                raise RuntimeError(
                    f"call {PRODUCTS[name]} failed, detail: Tensor not implemented for "
                    f"{ACL_NAMES.get(tensor.dtype, tensor.dtype)}, should be in dtype support list [{dtypes}] "
                    f"[aten::{name} of {tensor.dtype}, simulated by simnpu; use float32, or the CPU]"
                )
        return kernel(*args, **kwargs)

    return product


words = str.split

METADATA = words("""
as_strided view _reshape_alias unfold view_as_real view_as_complex
set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor
""")
"""Operators whose CPU kernel only writes sizes, strides and a storage, and does not look at the storage's device: it
runs on the npu tensors themselves. So views share their base's storage."""

COMPOSITES = words("""
clone constant_pad_nd embedding stack zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full
add.Scalar add_.Scalar sub.Scalar sub_.Scalar mul.Scalar mul_.Scalar div.Scalar div_.Scalar rsub.Scalar sum mean
masked_fill.Scalar masked_fill.Tensor index_put index_put_ fill.Scalar abs abs_ logical_and logical_or logical_not
logsumexp isinf mv
""")
"""Composite operators for which one call to the CPU replaces several to the device."""

NOT_THE_CPUS = {"_fused_sdp_choice", "is_pinned", "_pin_memory"}
"""Operators whose CPU kernels are not used: they would answer for the CPU's attention kernels and pinned memory."""


def convolution(*args: Any) -> Tensor:
    """aten::convolution_overrideable: what PyTorch leaves to a device."""
    views, index = arguments_to_cpu(args)
    return npu_view(torch.ops.aten.convolution(*views), index)


def convolution_backward(grad: Tensor, input_: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """aten::convolution_backward_overrideable, which unlike aten::convolution_backward does not say the bias' size."""
    (grad_view, *views), index = arguments_to_cpu((grad, input_, weight))
    cpu = torch.ops.aten.convolution_backward(grad_view, *views, [grad.shape[1]], *rest)
    return tuple(None if result is None else npu_view(result, index) for result in cpu)


def histc(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """aten::histc, also of integers, which the CPU's kernel does not take and a device's does."""
    index, values = tensor.get_device(), cpu_view(tensor)
    if values.is_floating_point():
        return npu_view(torch.histc(values, *args, **kwargs), index)
    return npu_view(torch.histc(values.double(), *args, **kwargs).to(values.dtype), index)


HAND_WRITTEN: dict[str, Kernel] = {
    **memory.KERNELS,
    "convolution_overrideable": convolution,
    "convolution_backward_overrideable": convolution_backward,
    "histc": histc,
    "record_stream": record_stream,
}
"""Written by hand."""


def register() -> list[torch.library.Library]:
    """Enter all kernels; they live as long as the libraries returned.

    Every aten operator that the CPU has a kernel for gets one of its own, the rest goes to a boxed fallback. A kernel of
    its own comes before PyTorch's composite: the npu computes ``native_layer_norm`` with the CPU's kernel, where the
    fallback alone would be given a decomposition, with other rounding.
    """
    aten = torch.library.Library("aten", "IMPL")
    assert aten.m is not None  # None only after the library was destroyed
    enter = aten.m.impl
    for name, kernel in HAND_WRITTEN.items():
        kernel = watched(name, kernel) if name == "convolution_overrideable" else kernel
        enter(name, "PrivateUse1", ordered(name, kernel))
    for name in METADATA:
        enter(name, "PrivateUse1", functools.partial(_overload(name)._op_dk, CPU_KEY))
    for name in _operators() - HAND_WRITTEN.keys() - set(METADATA):
        enter(name, "PrivateUse1", ordered(name, checked(name, watched(name, _made_when_called(name)))))
    for name, kernel in host_memory.CPU_KERNELS.items():
        enter(name, "CPU", kernel)
    any_namespace = torch.library.Library("_", "IMPL")
    any_namespace.fallback(boxed, "PrivateUse1")
    return [aten, any_namespace, *autocast.register(aten)]


def _operators() -> set[str]:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    names = {*registered("CPU"), *(name for name in registered("CompositeExplicitAutograd") if "::_foreach_" in name)}
    return {n.removeprefix("aten::") for n in names if n.startswith("aten::")}.union(COMPOSITES) - NOT_THE_CPUS


def _made_when_called(name: str) -> Kernel:
    """Defer building a kernel to its first call: building all takes longer than most programs run."""
    compiled: Kernel | None = None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            compiled = kernel_for(_overload(name))
        return compiled(*args, **kwargs)

    return kernel


_kernels: dict[Any, Kernel] = {}


def boxed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an aten operator that has no kernel of its own. Operators of other libraries are refused."""
    if op not in _kernels:
        if op.namespace != "aten":
            raise NotImplementedError(
                f"Could not run '{op.name()}' with arguments from the 'npu' backend: simnpu has PyTorch's own operators only; "
                "register a PrivateUse1 kernel"
            )
        _kernels[op] = ordered(name_of(op).removeprefix("aten::"), kernel_for(op))
    return _kernels[op](*args, **kwargs)


def _overload(name: str) -> Any:
    """Return the ``OpOverload`` of a name such as ``add.Tensor``."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")
