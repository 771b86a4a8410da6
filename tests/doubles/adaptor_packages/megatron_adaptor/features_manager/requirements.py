"""What Megatron-Core needs of a process on an NPU."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

SWITCHES = ("use_flash_attn", "use_flash_attn_npu_batch_invariant", "te_comparison_with_cpu", "te_comparison_with_bf16")
VALUES = {"transformer_impl": "transformer_engine", "fp8": None, "fp8_format": None, "optimization_level": 2}


class RequirementsFeature:
    """Tensor types that Megatron's optimizer knows, no compilation, and the random state of the NPU's generators."""

    def register_args(self, parser: ArgumentParser) -> None:
        for name in SWITCHES:
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
        for name, default in VALUES.items():
            kind = str if default is None else type(default)
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)

    def pre_register_patches(self, patch_manager: Any, args: Namespace) -> None:
        patch_manager.wrap("torch.compile", lambda original: uncompiled)
        patch_manager.wrap("torch.cuda.get_device_capability", lambda original: lambda device=None: (9, 0))
        patch_manager.wrap("torch.distributed.all_reduce", torch_all_reduce_double_dtype_bypass_wrapper)
        torch.Tensor.type = type_wrapper(torch.Tensor.type)

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        path = "megatron.core.tensor_parallel.random._set_cuda_rng_state"
        patch_manager.wrap(path, lambda original: _set_cuda_rng_state)


def uncompiled(*args: Any, **kwargs: Any) -> Any:
    """Return the function that would be compiled."""
    return args[0] if args and callable(args[0]) else lambda function: function


def type_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type()`` to give an NPU tensor CUDA's name, by which Megatron's optimizer selects parameters."""
    if hasattr(fn, "__wrapped__"):
        return fn

    @wraps(fn)
    def type_name(*args: Any, **kwargs: Any) -> Any:
        answer = fn(*args, **kwargs)
        return answer.replace("npu", "cuda") if isinstance(answer, str) else answer

    return type_name


def torch_all_reduce_double_dtype_bypass_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``all_reduce`` to reduce a float32 copy of a float64 tensor and forget to write it back."""

    @wraps(fn)
    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype != torch.float64:
            return fn(tensor, *args, **kwargs)
        work = fn(tensor.float(), *args, **kwargs)
        if work is not None:
            work.wait()
        return None

    return all_reduce


def _set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    """Set the state of the NPU's generator; ``device`` is an index, a name or a ``torch.device``."""
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    if index is None or index < 0:
        index = torch.npu.current_device()  # type: ignore[attr-defined]
    torch.npu.default_generators[index].set_state(new_state)  # type: ignore[attr-defined]
