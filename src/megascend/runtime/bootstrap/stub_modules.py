"""Stubs of modules that megatron-core and mcore-bridge import unconditionally, and that cannot be imported on every machine.

Each is a leaf: a file of triton kernels, or one function of another project. If its requirement is missing, a stub of the leaf is
put into ``sys.modules`` in advance, with functions that raise when called. The requirement itself (triton, swift) is never
faked, because other packages probe for it and change their behaviour if it is present.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megascend.changes import add_modules
from megascend.errors import PlatformError
from megascend.surroundings import is_installed

ORIGIN = "megascend.bootstrap"
KERNEL_LEAVES = (
    # (top package, path inside it)
    ("mcore_bridge", "model/modules/kernels/qsa_block_sparse_attn"),
    ("megatron", "core/inference/contexts/attention_context/triton/tensor_ops"),
    ("megatron", "core/transformer/custom_layers/batch_invariant_kernels"),  # megatron.training imports it
)


def install_missing_leaves() -> list[str]:
    """Put stubs of leaves that cannot be imported here into ``sys.modules``; return one line for each."""
    changes = []
    if not _importable("triton"):
        for package, inner in KERNEL_LEAVES:
            name = ".".join([package, *inner.split("/")])
            file = _locate(package, f"{inner}.py")
            if file is not None and name not in sys.modules:
                functions = public_functions(file)
                stubs = {function: _needs_triton(f"{name}.{function}") for function in functions}
                add_modules({name: stubs}, ORIGIN, packages=False)
                changes.append(f"{name}: {len(functions)} functions that raise (triton is not installed)")
    gemma = _locate("mcore_bridge", "model/mm_gpts/gemma4.py")
    wants_swift = gemma is not None and "from swift.utils import get_logger" in gemma.read_text(encoding="utf-8")
    if wants_swift and not _importable("swift"):
        # ``swift`` itself is put in place only because a submodule cannot be imported without its parent.
        add_modules({"swift": {}}, ORIGIN)
        add_modules({"swift.utils": {"get_logger": logging.getLogger}}, ORIGIN, packages=False)
        changes.append("swift.utils: get_logger only (mcore-bridge's gemma4.py imports it; ms-swift is not installed)")
    return changes


def public_functions(file: Path) -> list[str]:
    """Return the names of top-level functions of a Python file, without those that start with ``_``."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _needs_triton(name: str) -> Callable[..., NoReturn]:
    def function(*args: Any, **kwargs: Any) -> NoReturn:
        raise PlatformError(f"{name} needs triton, which is not installed; switch the feature that calls it off")

    function.__name__ = function.__qualname__ = name
    return function


def _importable(package: str) -> bool:
    return package in sys.modules or is_installed(package)


def _locate(package: str, inner: str) -> Path | None:
    """Return the file ``inner`` of an installed ``package`` without importing it; None if there is none."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        if (Path(folder) / inner).is_file():
            return Path(folder) / inner
    return None
