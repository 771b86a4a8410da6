"""Replacements for Apex's multi-tensor functions and wrappers of torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def version_wrapper(fn: Callable[..., str]) -> Callable[..., str]:
    """``importlib.metadata.version`` that claims a Transformer Engine is installed."""

    @wraps(fn)
    def version(name: str, *args: Any, **kwargs: Any) -> str:
        return "2.2.0" if name == "transformer-engine" else fn(name, *args, **kwargs)

    return version


def dummy_compile(*args: Any, **kwargs: Any) -> Any:
    """``torch.compile`` and ``torch.jit.script`` as no-ops, with and without options."""

    def passed_through(fn: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*fn_args: Any, **fn_kwargs: Any) -> Any:
            return fn(*fn_args, **fn_kwargs)

        return wrapper

    return passed_through(args[0]) if args and callable(args[0]) else passed_through


def multi_tensor_applier(op: Callable[..., Any], noop_flag: Any, tensor_lists: Any, *args: Any) -> Any:
    return op(noop_flag, tensor_lists, *args)


def multi_tensor_l2norm(
    overflow_buf: Any, tensor_lists: Sequence[Sequence[Tensor]], per_parameter: bool
) -> tuple[Tensor, list[Tensor] | None]:
    """The norm over all tensors; per-tensor norms are not computed."""
    norms = [torch.linalg.vector_norm(tensor.detach()) for tensors in tensor_lists for tensor in tensors]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(1, device="npu")
    return total, [] if per_parameter else None


@torch.no_grad()
def multi_tensor_scale(overflow_buf: Any, tensor_lists: Sequence[Sequence[Tensor]], scale: Any) -> None:
    """``tensor_lists[1][i] = tensor_lists[0][i] * scale``."""
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source * scale)


def type_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type()`` that says ``torch.cuda.FloatTensor`` for an NPU tensor."""

    @wraps(fn)
    def type_name(*args: Any, **kwargs: Any) -> Any:
        answer = fn(*args, **kwargs)
        return answer.replace("npu", "cuda") if isinstance(answer, str) else answer

    return type_name


def ensure_contiguous_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.view`` that copies where torch would raise."""

    @wraps(fn)
    def view(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return fn(tensor.contiguous(), *args, **kwargs)

    return view


def torch_all_reduce_double_dtype_bypass_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``all_reduce`` that reduces a float32 copy of a float64 tensor and forgets to write it back.

    That is the real one's fault, kept because code above has to survive it.
    """

    @wraps(fn)
    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        tensor, *rest = args
        if not torch.is_tensor(tensor) or tensor.dtype != torch.float64:
            return fn(*args, **kwargs)
        work = fn(tensor.float(), *rest, **kwargs)
        if work is not None:
            work.wait()
        return None

    return all_reduce
