"""Verify the process after MindSpeed has patched Megatron for a model; each failure names the check and its likely cause."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megascend.errors import PlatformError
from megascend.runtime.bootstrap import ascend

EXTENSIONS = "megatron.core.extensions.transformer_engine"
RING = "MindSpeedCPDotProductAttention"


def verify(config: Any, arguments: dict[str, Any], rotary: Any) -> None:
    """Raise PlatformError unless the process is patched for ``config``; ``rotary``: mcore-bridge's ``apply_rotary_pos_emb``."""
    failed = problems(config, arguments, rotary)
    if failed:
        raise PlatformError(
            f"MindSpeed's patches are not as they must be: {'; '.join(failed)}; start a fresh process with "
            "megascend.bootstrap() before any import of Megatron"
        )


def problems(config: Any, arguments: dict[str, Any], rotary: Any) -> list[str]:
    """Return the failed checks, one sentence each."""
    extensions = import_module(EXTENSIONS)
    layers = import_module("megatron.core.tensor_parallel.layers")
    failures = []
    # Megatron chooses between its own and Transformer Engine's layers by this flag, at import.
    if not getattr(extensions, "HAVE_TE", False):
        failures.append(f"{EXTENSIONS}.HAVE_TE is False, so layers would be Megatron's slow local ones")
    failures += _attention(extensions.TEDotProductAttention, arguments)
    for name, native in (
        ("TEColumnParallelLinear", layers.ColumnParallelLinear),
        ("TERowParallelLinear", layers.RowParallelLinear),
    ):
        if getattr(extensions, name) is not native:
            failures.append(
                f"{EXTENSIONS}.{name} is {ascend.qualified_name(getattr(extensions, name))}, not Megatron's own {native.__name__}"
            )
    # By module: MindSpeed wraps the function, so there is no object to compare it with.
    fuser = import_module("megatron.core.jit").jit_fuser
    if not _from_mindspeed(fuser):
        failures.append(f"megatron.core.jit.jit_fuser is {ascend.qualified_name(fuser)}, which would compile for CUDA")
    adam = import_module("megatron.core.optimizer").Adam
    if not _from_mindspeed(adam):
        failures.append(f"the optimizer's Adam is {ascend.qualified_name(adam)}, not MindSpeed's")
    if changed := ascend.modules_with_other_rotary(rotary):
        failures.append(f"apply_rotary_pos_emb of {', '.join(changed)} is no longer mcore-bridge's")
    for name in ("context_parallel_algo", "attention_mask_type", "use_flash_attn"):
        if name in arguments and getattr(config, name, None) != arguments[name]:
            failures.append(
                f"the model configuration has {name}={getattr(config, name, None)!r} instead of {arguments[name]!r}: its "
                "class has lost MindSpeed's patch"
            )
    return failures


def _attention(kind: Any, arguments: dict[str, Any]) -> list[str]:
    if not _from_mindspeed(kind):
        return [f"TEDotProductAttention is {ascend.qualified_name(kind)}, not MindSpeed's"]
    ring = arguments["context_parallel_size"] > 1 and arguments["context_parallel_algo"] == "megatron_cp_algo"
    if (kind.__name__ == RING) != ring:
        expected = RING if ring else "TEDotProductAttention"
        return [
            f"attention is {ascend.qualified_name(kind)}, but context parallel size {arguments['context_parallel_size']} with "
            f"{arguments['context_parallel_algo']} needs {expected}"
        ]
    return []


def _from_mindspeed(value: Any) -> bool:
    return getattr(value, "__module__", "").split(".")[0] == "mindspeed"
