"""Matrix products on the device take float16, bfloat16 and float32, as the cube unit does; others are refused.

torch_npu's list of native functions names the types of ``torch.mm``, ``matmul``, ``bmm`` and ``addmm``; with float64 or
an integer type the real ones fail with this message.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simnpu.fallback import Kernel

SUPPORTED = (torch.float32, torch.float16, torch.bfloat16)
FOR_DOT = (*SUPPORTED, torch.uint8, torch.int8, torch.int32)
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
    supported = FOR_DOT if name == "dot" else SUPPORTED

    def product(*args: Any, **kwargs: Any) -> Any:
        for tensor in args:
            if isinstance(tensor, Tensor) and tensor.dtype not in supported:
                listed = "".join(f"{ACL_NAMES[dtype]}," for dtype in supported)
                raise RuntimeError(
                    f"call {PRODUCTS[name]} failed, detail: Tensor not implemented for "
                    f"{ACL_NAMES.get(tensor.dtype, tensor.dtype)}, should be in dtype support list [{listed}] "
                    f"[aten::{name} of {tensor.dtype}, simulated by simnpu; use float32, or the CPU]"
                )
        return kernel(*args, **kwargs)

    return product
