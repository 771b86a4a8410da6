"""What an unknown name of ``torch_npu`` turns into: an error that names it, never a value."""

from __future__ import annotations

from simnpu.errors import NotSimulatedError


def missing(name: str, where: str = "torch_npu") -> AttributeError:
    """The exception for ``torch_npu.<name>``; dunder names get a plain AttributeError, as Python's protocols expect."""
    if name.startswith("__"):
        return AttributeError(f"module '{where}' has no attribute '{name}'")
    kind = "operator" if name.lstrip("_").startswith("npu_") else "name"
    return NotSimulatedError(
        f"{where}.{name}: this {kind} is not simulated by simnpu. It may exist in Huawei's torch_npu; to run "
        "it here, add it under simnpu (an operator: simnpu/operators), or switch off the feature "
        "that calls it"
    )
