"""Patches of upstream packages on every platform, applied when the patched module is imported, whoever imports it.

- megatron-core's ``_reduce`` gives wrong numbers without an error; ``tests/test_upstream_faults.py`` fails when upstream has
  mended it.
- transformers reads all 1,700 files in the folder of its models twice, a fifth of all that a training process opens at its
  start: it caches the result by the folder's path for ``transformers``, by that of a file in it for ``transformers.models``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megascend.bootstrap.import_hooks import after_import
from megascend.changes import patch

if TYPE_CHECKING:
    from torch import Tensor


MAPPINGS = "megatron.core.tensor_parallel.mappings"


def patch_on_import() -> None:
    """Patch each module as soon as it is imported; at once, if it has been."""
    after_import(MODULE, read_once)
    after_import(MAPPINGS, mend_reduce)


def mend_reduce() -> None:
    """Idempotent."""
    mappings = import_module(MAPPINGS)
    if mappings._reduce is not reduce:
        patch(mappings, "_reduce", reduce, "also reduces tensors that are not contiguous")


def reduce(input_: Tensor, group: Any) -> Tensor:
    """Sum of ``input_`` over the tensor parallel group.

    Megatron's own reduces a contiguous copy and returns the tensor it was given: one that is not contiguous (the gradient
    of hidden states of several samples, [batch, sequence] seen as [sequence, batch]) comes back as this rank's part.
    """
    import torch.distributed as dist

    if group.size() == 1:
        return input_
    total = input_.contiguous()
    dist.all_reduce(total, group=group)
    return total


MODULE = "transformers.utils.import_utils"
FUNCTION = "create_import_structure_from_path"


def read_once() -> None:
    """Idempotent. Versions of transformers that do not remember anything, or have no such function, are left as they are."""
    utils = import_module(MODULE)
    original: Any = getattr(utils, FUNCTION, None)
    if hasattr(original, "cache_info") and not hasattr(original, "__megascend__"):
        patch(utils, FUNCTION, by_folder(original), "remembers folders, whichever of their files it is given")


def by_folder(original: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    """transformers' function, which says of a file what it says of the file's folder, asked for the folder."""

    @functools.wraps(original)
    def function(module_path: str | os.PathLike[str]) -> dict[Any, Any]:
        path = os.fspath(module_path)
        return original(os.path.dirname(path) if os.path.isfile(path) else path)

    function.__megascend__ = True  # type: ignore[attr-defined]
    return function
