"""What matrix products of fp32 tensors are on CUDA: fp32, or TensorFloat-32 where that was asked for.

Transformer Engine asks cuBLAS for TF32 whenever its inputs are fp32 (``cublaslt_gemm.cu``: ``CUBLAS_COMPUTE_32F_FAST_TF32``),
whatever torch's own switch says; ten bits of mantissa put gradient norms of layouts 1e-4 apart. cuBLAS's variable
``NVIDIA_TF32_OVERRIDE=0`` takes precedence over what a caller asks for, and is read when the library is loaded.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from megascend.errors import ConfigError, PlatformError

VARIABLE = "NVIDIA_TF32_OVERRIDE"
TF32_ERROR = 3e-5
"""Relative error of a product that lies between fp32's (about 3e-7) and TF32's (about 3e-4)."""


def configure(tf32: bool, environment: MutableMapping[str, str]) -> list[str]:
    """Choose for this process; one line for every change.

    Raises:
        ConfigError: the variable is set, and says the opposite.
    """
    found = environment.get(VARIABLE)
    if found is not None:
        if (found == "0") is tf32:
            raise ConfigError(f"tf32={tf32} with {VARIABLE}={found} in the environment: change one of them")
        return []
    if tf32:
        import torch

        torch.set_float32_matmul_precision("high")
        return ["torch.set_float32_matmul_precision('high'): TF32"]
    environment[VARIABLE] = "0"
    return [f"{VARIABLE}=0: products of fp32 matrices are fp32"]


def relative_error() -> float:
    """Of a product of fp32 matrices by Transformer Engine, against float64. Waits for the device."""
    import torch
    from transformer_engine.pytorch import Linear

    size = 256
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(size, size, device="cuda", generator=generator)
    layer = Linear(size, size, bias=False, params_dtype=torch.float32, device="cuda")
    with torch.no_grad():
        torch.nn.init.normal_(layer.weight, generator=generator)
        exact = rows.double() @ layer.weight.double().t()
        return float((layer(rows).double() - exact).norm() / exact.norm())


def check(error: float) -> None:
    """Raise PlatformError if a product with this relative error was not fp32."""
    if error > TF32_ERROR:
        raise PlatformError(
            f"fp32 was asked for, but a matrix product of Transformer Engine has a relative error of {error:.1e}, as TF32 has "
            f"(fp32: below {TF32_ERROR:.0e}). cuBLAS was in use before megascend.bootstrap() could set {VARIABLE}=0: call the "
            f"bootstrap first, or set the variable before the program starts; tf32=True accepts TF32"
        )
