"""megascend's changes to MindSpeed's patches.

They form a MindSpeed feature, the last one in its list. So every patch and repatch applies and removes them with the others, and
nothing has to be repaired afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from megascend.runtime.bootstrap.ascend import DROPS_FLOAT64, refusing_float64_wrapper

ROPE = "megatron.core.models.common.embeddings.rope_utils.apply_rotary_pos_emb"
ALL_REDUCE = "torch.distributed.all_reduce"
EXTENSIONS = "megatron.core.extensions.transformer_engine"
LOAD_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict"
CAPABILITY = "torch.cuda.get_device_capability"


def install(stack: str, rotary: Callable[..., Any] | None = None) -> Any:
    """Append the feature to MindSpeed's list and return it; idempotent. Call before the adaptor is imported.

    Set its ``rotary`` attribute to mcore-bridge's function once that is known. ``stack``: name of the version table's row.
    """
    manager = import_module("mindspeed.features_manager.features_manager").MindSpeedFeaturesManager
    for feature in manager.FEATURES_LIST:
        if getattr(feature, "feature_name", None) == "megascend":
            return feature
    feature = _feature_class()(stack)
    manager.FEATURES_LIST.append(feature)
    return feature


def levels(megascend_feature: Any) -> dict[str, int]:
    """Return the lowest optimization level at which MindSpeed reads each of its features, by the feature's argument."""
    manager = import_module("mindspeed.features_manager.features_manager").MindSpeedFeaturesManager
    return {
        feature.feature_name: feature.optimization_level
        for feature in manager.FEATURES_LIST
        if feature is not megascend_feature
    }


def branch_changes(stack: str) -> str:
    """Return a text about patches for one branch only, for ``Runtime.changes``."""
    if stack != "0.15":
        return ""
    return "; core_r0.15.3: the ring's attention class under context parallelism, get_device_capability takes a device"


def _feature_class() -> type:
    base: Any = import_module("mindspeed.features_manager.feature").MindSpeedFeature

    class MegascendFeature(base):
        """Patches on top of MindSpeed's: see :func:`patches`."""

        def __init__(self, stack: str) -> None:
            super().__init__("megascend", optimization_level=0)
            self.stack = stack
            self.rotary: Callable[..., Any] | None = None

        def register_patches(self, patch_manager: Any, args: Any) -> None:
            register(patch_manager, args, self.stack, self.rotary)

    return MegascendFeature


def register(manager: Any, args: Any, stack: str, rotary: Callable[..., Any] | None) -> None:
    """Register megascend's patches with MindSpeed's ``manager`` for the arguments ``args``."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    # peft recognises MindSpeed's own linears neither as Transformer Engine's nor as Megatron's, and has no LoRA for them.
    manager.register_patch(f"{EXTENSIONS}.TEColumnParallelLinear", ColumnParallelLinear, force_patch=True)
    manager.register_patch(f"{EXTENSIONS}.TERowParallelLinear", RowParallelLinear, force_patch=True)
    if rotary is not None:
        # MindSpeed's function lacks mla_rotary_interleaved, and would replace mcore-bridge's in every module that imported it.
        manager.register_patch(ROPE, rotary, force_patch=True)
    # MindSpeed's method is older than Megatron's and refuses optimizer state that any layout can read (fully_reshardable).
    # While patches are being registered, the class has Megatron's own method.
    manager.register_patch(LOAD_OPTIMIZER, DistributedOptimizer.load_state_dict, force_patch=True)
    _all_reduce(manager)
    if stack == "0.15":
        _only_in_0_15(manager, args)


def _all_reduce(manager: Any) -> None:
    """Replace MindSpeed's wrapper for float64, which reduces a copy and discards the result."""
    if DROPS_FLOAT64 in [wrapper.__name__ for wrapper in manager.patches_info[ALL_REDUCE].wrappers]:
        manager.remove_wrappers(ALL_REDUCE, DROPS_FLOAT64)
        manager.register_patch(ALL_REDUCE, refusing_float64_wrapper)


def _only_in_0_15(manager: Any, args: Any) -> None:
    """Fix two faults of branch core_r0.15.3 that no order of imports prevents."""
    if int(getattr(args, "context_parallel_size", 1)) > 1 and args.context_parallel_algo == "megatron_cp_algo":
        # The branch selects a class without ring attention ("Unsupported CP strategy").
        ring = import_module("mindspeed.core.context_parallel.adaptor").MindSpeedCPDotProductAttention
        manager.register_patch(f"{EXTENSIONS}.TEDotProductAttention", ring, force_patch=True)
    if CAPABILITY in manager.patches_info:
        # MindSpeed's replacement takes no argument, but torch's collectives pass the device.
        manager.register_patch(CAPABILITY, device_capability, force_patch=True)


def device_capability(device: Any = None) -> tuple[int, int]:
    """Return the CUDA compute capability reported for an NPU: 9.0, like core_r0.16.0."""
    return 9, 0
