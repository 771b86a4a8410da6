"""The CUDA platform: NVIDIA GPUs with NCCL, and the precision of fp32 matrix products (fp32 or, on request, TensorFloat-32).

Transformer Engine requests TF32 from cuBLAS whenever its inputs are fp32 (``cublaslt_gemm.cu``:
``CUBLAS_COMPUTE_32F_FAST_TF32``), regardless of torch's own switch; with ten bits of mantissa, gradient norms of different
layouts differ by 1e-4. cuBLAS's variable ``NVIDIA_TF32_OVERRIDE=0`` takes precedence over a caller's request, and is read when
the library is loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping
from typing import ClassVar

from megascend.errors import ConfigError, PlatformError
from megascend.runtime.platforms.base import AcceleratorPlatform
from weightwire.background import BackgroundThread

# Dense bf16 peak in FLOP/s, from NVIDIA's data sheets (without sparsity).
PEAK_FLOPS = {
    # Matched as parts of the device's name, in this order.
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40": 181e12,
}


class CudaPlatform(AcceleratorPlatform):
    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"
    backend: ClassVar[str] = "nccl"
    bind_device: ClassVar[bool] = True
    page_locks_memory: ClassVar[bool] = True
    fuses_activations: bool = True

    def unavailable_because(self) -> str | None:
        import torch

        return None if torch.cuda.is_available() else "torch.cuda.is_available() is False"

    def configure_products(self, tf32: bool) -> list[str]:
        return configure_tf32(tf32, os.environ)

    def check_products(self) -> None:
        if self.has_transformer_engine_kernels:
            check_fp32_products(relative_error())

    def limit_collectives(self, timeout_s: float) -> list[str]:
        return shorten_dump(os.environ)

    def device(self, local_rank: int):
        import torch

        count = torch.cuda.device_count()
        if local_rank >= count:
            raise PlatformError(f"local rank {local_rank} has no GPU of its own: this host has {count}")
        # Libraries that allocate on the current device would otherwise all use GPU 0.
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def warm_up(self, local_rank: int) -> None:
        # Not a daemon: a process that ends within a second has to wait, since exiting during CUDA's start-up crashes.
        BackgroundThread(first_products, local_rank, name="megascend-cuda-start", daemon=False).start()

    def pci_address(self, local_rank: int) -> str | None:
        import torch

        if local_rank >= torch.cuda.device_count():
            return None  # :meth:`device` reports the missing GPU
        properties = torch.cuda.get_device_properties(local_rank)
        # torch 2.6 does not have these attributes.
        numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
        return None if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*numbers)

    def peak_flops(self) -> float | None:
        import torch

        name = torch.cuda.get_device_name()
        return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def shorten_dump(environment: MutableMapping[str, str]) -> list[str]:
    """Shorten the time for which torch keeps a rank alive to dump its flight recorder after an NCCL timeout.

    The time is four times the variable, whose default is 15 s (``ProcessGroupNCCL.cpp``): on an H200 the process ended a minute
    after the timeout. A value in the environment takes precedence.
    """
    name, milliseconds = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 2000
    if name in environment:
        return []
    environment[name] = str(milliseconds)
    return [f"{name}={milliseconds}"]


def first_products(local_rank: int) -> None:
    """Initialise a device's context and cuBLAS by small products. Most of the time is spent without the GIL."""
    import torch

    with contextlib.suppress(RuntimeError):  # reported where the device is first needed
        if local_rank >= torch.cuda.device_count():
            return
        # cuBLAS loads kernels by dtype, so each precision is warmed up.
        for dtype in (torch.bfloat16, torch.float32):
            matrix = torch.ones(16, 16, dtype=dtype, device=torch.device("cuda", local_rank))
            torch.mm(matrix, matrix)
        torch.cuda.synchronize(local_rank)


TF32_VARIABLE = "NVIDIA_TF32_OVERRIDE"
TF32_ERROR = 3e-5
"""Threshold of the relative error of a product, between fp32's (about 3e-7) and TF32's (about 3e-4)."""


def configure_tf32(tf32: bool, environment: MutableMapping[str, str]) -> list[str]:
    """Set the precision of fp32 products for this process; return one line for every change."""
    value = environment.get(TF32_VARIABLE)
    if value is not None:
        # "0" forbids TF32 to every caller; any other value leaves it to the caller.
        if (value == "0") is tf32:
            raise ConfigError(f"tf32={tf32} contradicts {TF32_VARIABLE}={value} in the environment: change one of them")
        return []
    if tf32:
        import torch

        torch.set_float32_matmul_precision("high")
        return ["torch.set_float32_matmul_precision('high'): TF32"]
    environment[TF32_VARIABLE] = "0"
    return [f"{TF32_VARIABLE}=0: products of fp32 matrices are fp32"]


def relative_error() -> float:
    """Return the relative error of Transformer Engine's product of fp32 matrices against float64. Synchronizes."""
    import torch
    from transformer_engine.pytorch import Linear

    size = 256
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(size, size, device="cuda", generator=generator)
    layer = Linear(size, size, bias=False, params_dtype=torch.float32, device="cuda")
    with torch.no_grad():
        torch.nn.init.normal_(layer.weight, generator=generator)
        # In float64, which TF32 does not affect.
        exact = rows.double() @ layer.weight.double().t()
        return float((layer(rows).double() - exact).norm() / exact.norm())


def check_fp32_products(error: float) -> None:
    """Raise PlatformError if the relative error of a product shows that it was not computed in fp32."""
    if error > TF32_ERROR:
        raise PlatformError(
            f"fp32 is configured, but a product of Transformer Engine has a relative error of {error:.1e}, as with TF32 (fp32: "
            f"below {TF32_ERROR:.0e}): start the program with {TF32_VARIABLE}=0"
        )
