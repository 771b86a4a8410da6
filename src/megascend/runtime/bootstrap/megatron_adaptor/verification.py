"""Verify the process after the packages have patched it; each failure names the check."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megascend.errors import PlatformError
from megascend.runtime.bootstrap import ascend

EXTENSIONS = "megatron.core.extensions.transformer_engine"
LAYERS = {
    "TELinear": "Linear",
    "TELayerNormColumnParallelLinear": "LayerNormLinear",
    "TEDotProductAttention": "DotProductAttention",
}
"""Megatron-Core's layers, and the layers of Transformer Engine that they must be built on."""


def verify(config: Any, defaults: dict[str, Any]) -> None:
    """Raise PlatformError unless the process is patched; ``defaults`` must be attributes of ``config``."""
    failed = [*layers(), *devices(), *optimizer()]
    if missing := sorted(name for name in defaults if not hasattr(config, name)):
        failed.append(f"the model configuration lacks MegatronAdaptor's {', '.join(missing)}")
    if failed:
        raise PlatformError(
            "MegatronAdaptor's patches are not as they must be: "
            + "; ".join(failed)
            + "; start a fresh process with megascend.bootstrap() first, with packages that megascend doctor accepts"
        )


def layers() -> list[str]:
    """Return the problems of Megatron-Core's layers, which must be TransformerEngineNPU's."""
    extensions: Any = import_module(EXTENSIONS)
    # Megatron chooses between its own and Transformer Engine's layers by this flag, at import.
    if not getattr(extensions, "HAVE_TE", False):
        return [f"{EXTENSIONS}.HAVE_TE is False, so layers would be Megatron's slow local ones"]
    failures = [f"{EXTENSIONS} has no {name}" for name in ("TENorm", "te_checkpoint") if not hasattr(extensions, name)]
    engine: Any = import_module("transformer_engine.pytorch")
    for name, base in LAYERS.items():
        kind = getattr(extensions, name, None)
        # MindSpeed or MegatronAdaptor may replace a class by one of theirs, which is on the NPU as well.
        if not (isinstance(kind, type) and (issubclass(kind, getattr(engine, base)) or _is_from_ascend(kind))):
            failures.append(
                f"{EXTENSIONS}.{name} is {ascend.qualified_name(kind)}, which is not built on TransformerEngineNPU"
            )
    return failures


def devices() -> list[str]:
    """Return the problems of the functions by which Megatron-Core accesses the device and its random state."""
    import torch

    npu = vars(torch)["npu"]
    failures = []
    if torch.cuda.current_device() != npu.current_device():
        failures.append(f"torch.cuda.current_device() is {torch.cuda.current_device()!r}, not {npu.current_device()!r}")
    if not random_state_is_npus():
        failures.append("the random states of megatron.core.tensor_parallel.random are not those of the NPU")
    return failures


def random_state_is_npus() -> bool:
    """Check that Megatron-Core's functions read and write the state of the NPU's generator, which is as before afterwards."""
    import torch

    npu = vars(torch)["npu"]
    random: Any = import_module("megatron.core.tensor_parallel.random")
    before = npu.get_rng_state()
    try:
        npu.manual_seed(1)
        seeded = npu.get_rng_state()
        npu.manual_seed(2)
        random._set_cuda_rng_state(seeded)
        return torch.equal(npu.get_rng_state(), seeded) and torch.equal(
            random._get_cuda_rng_state().cpu(), seeded.cpu()
        )
    except (RuntimeError, AttributeError, TypeError, AssertionError):  # CUDA's functions without a CUDA device
        return False
    finally:
        npu.set_rng_state(before)


def optimizer() -> list[str]:
    """Return the problems of the optimizer: Megatron-Core must use a fused Adam."""
    adam: Any = import_module("megatron.core.optimizer").Adam
    if adam.__module__.startswith("torch."):
        return [f"the optimizer's Adam is {ascend.qualified_name(adam)}, not TransformerEngineNPU's"]
    return []


def _is_from_ascend(value: Any) -> bool:
    return getattr(value, "__module__", "").partition(".")[0] in ("mindspeed", "megatron_adaptor")
