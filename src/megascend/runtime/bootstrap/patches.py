"""Patches of upstream packages, applied at the first import of the patched module; for all platforms, unless they say otherwise.

- megatron-core's ``_reduce`` returns wrong numbers without an error before 0.19; ``tests/test_upstream_faults.py`` has the test.
- From 0.18 on, megatron-core compiles a C++ extension in the first backward pass of a rank that recomputes norms or activations.
- megatron-core 0.19 adds a norm to queries that latent attention does not compress; no published model has it.
- From 0.17 on, megatron-core clips gradients one by one with a Transformer Engine before 2.14, and waits for the device for the
  norm of each. Providers of Transformer Engine and its reference patch it.
- transformers reads all 1,700 files in the folder of its models twice, a fifth of all files that a training process opens at
  its start: it caches the result by the folder's path for ``transformers``, and by a file's path for ``transformers.models``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megascend.changes import patch
from megascend.runtime.bootstrap.import_hooks import after_import

if TYPE_CHECKING:
    from torch import Tensor


MAPPINGS = "megatron.core.tensor_parallel.mappings"
RANDOM = "megatron.core.tensor_parallel.random"
LATENT_NORMS = "megatron.core.transformer.mla_qk_norm_config"  # a module of 0.19


def patch_on_import() -> None:
    """Register the patches for the import of their modules; patch at once what is imported already."""
    after_import(IMPORT_UTILS, cache_import_structure)
    after_import(MAPPINGS, patch_reduce)
    after_import(RANDOM, patch_share_storage)
    after_import(LATENT_NORMS, patch_latent_norms)


def patch_reduce() -> None:
    """Replace Megatron's ``_reduce``. Idempotent."""
    mappings = import_module(MAPPINGS)
    if mappings._reduce is not reduce:
        patch(mappings, "_reduce", reduce, "also reduces tensors that are not contiguous")


def reduce(input_: Tensor, group: Any) -> Tensor:
    """Sum ``input_`` over the tensor parallel group.

    Megatron's function up to 0.18 reduces a contiguous copy and returns its argument: for a tensor that is not contiguous (the
    gradient of hidden states of several samples, [batch, sequence] viewed as [sequence, batch]) it returns this rank's part.
    """
    import torch.distributed as dist

    if group.size() == 1:
        return input_
    # A contiguous input is summed in place, as by Megatron's function; for another one this is a copy, which is returned.
    total = input_.contiguous()
    dist.all_reduce(total, group=group)
    return total


SHARE_STORAGE = "_get_share_storage"


def patch_share_storage() -> None:
    """Replace the compiled function that moves a recomputed output to the place of the discarded one. Idempotent.

    That function avoids a copy, which megatron-core 0.16 makes, too. But it needs a compiler and ninja on every host, and in the
    first step the other ranks wait half a minute for the build. Versions without it are unchanged.
    """
    random = import_module(RANDOM)
    if getattr(random, SHARE_STORAGE, _get_copy_storage) is not _get_copy_storage:
        patch(random, SHARE_STORAGE, _get_copy_storage, "copies recomputed outputs, and compiles nothing")


def _get_copy_storage() -> Callable[[Tensor, Tensor], None]:
    return copy_storage


def copy_storage(output: Tensor, recomputed: Tensor) -> None:
    """Fill the storage of ``output``, which was released, from that of ``recomputed``: views of it see the numbers too."""
    # On storages: autograd would treat a write to the tensor as a modification of a saved tensor.
    storage, source = output.untyped_storage(), recomputed.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)


def patch_latent_norms() -> None:
    """Leave queries that are not compressed without a norm, as in DeepSeek-V2-Lite and Moonlight. Idempotent."""
    resolver: Any = import_module(LATENT_NORMS).QKNormConfigResolver
    resolve: Any = resolver._resolve_mla_qk_layernorm
    if hasattr(resolve, "__megascend__"):
        return

    @functools.wraps(resolve)
    def without_query_norm(self: Any) -> dict[str, Any]:
        # ``qk_layernorm`` switches both norms of compressed states on, and such models have only that of keys and values.
        resolved = resolve(self)
        if not self.has_q_lora:
            resolved["linear_q_proj"] = self.submodules.linear_q_proj or self.linear_impl
        return resolved

    without_query_norm.__megascend__ = True  # type: ignore[attr-defined]
    patch(resolver, "_resolve_mla_qk_layernorm", without_query_norm, "no norm of queries that are not compressed")


CLIPPING = "megatron.core.optimizer.clip_grads"


def patch_gradient_clipping() -> list[str]:
    """Let gradient clipping use Transformer Engine's functions on lists of tensors. Idempotent.

    Megatron-Core imports four of them in one statement, ``multi_tensor_scale_tensor`` of 2.14 among them, and without it replaces
    all four by loops over tensors. Versions that import three, and functions of Apex, are unchanged.
    """
    clipping, utils = import_module(CLIPPING), import_module("megatron.core.utils")
    if clipping.multi_tensor_applier is not utils.local_multi_tensor_applier:
        return []
    try:
        from transformer_engine.pytorch.optimizers import (  # type: ignore[reportMissingImports]
            multi_tensor_applier,
            multi_tensor_l2norm,
            multi_tensor_scale,
        )
    except ImportError:
        return []
    # Without a multi_tensor_scale_tensor_impl Megatron-Core reads the norm once, and scales by a number, as 0.16 does.
    for name, function in (
        ("multi_tensor_applier", multi_tensor_applier),
        ("l2_norm_impl", multi_tensor_l2norm),
        ("multi_tensor_scale_impl", multi_tensor_scale),
    ):
        patch(clipping, name, function, "Transformer Engine's, for all gradients at once")
    return []


IMPORT_UTILS = "transformers.utils.import_utils"
FUNCTION = "create_import_structure_from_path"


def cache_import_structure() -> None:
    """Cache transformers' import structure by folder. Idempotent; versions without that function or its cache are unchanged."""
    utils = import_module(IMPORT_UTILS)
    original: Any = getattr(utils, FUNCTION, None)
    if hasattr(original, "cache_info") and not hasattr(original, "__megascend__"):
        patch(utils, FUNCTION, by_folder(original), "caches by folder, for any of a folder's files")


def by_folder(original: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    """Wrap the function to be called with the folder of a file: its result for both is the same."""

    @functools.wraps(original)
    def function(module_path: str | os.PathLike[str]) -> dict[Any, Any]:
        path = os.fspath(module_path)
        return original(os.path.dirname(path) if os.path.isfile(path) else path)

    function.__megascend__ = True  # type: ignore[attr-defined]
    return function
