"""A stand-in for MegatronAdaptor, made from the way that public programs use it; see README.md beside this package.

Importing it patches the process: CUDA's names act on the NPU, and Megatron-Core is imported and patched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_npu.contrib import transfer_to_npu  # noqa: F401  # its import redirects torch.cuda to the NPU

from megatron_adaptor.features_manager.features_manager import FeaturesManager
from megatron_adaptor.utils.args_utils import get_full_args, get_mindspeed_args


def patch_features() -> None:
    """Apply the patches that the arguments ask for; the first reading of the arguments parses ``sys.argv``."""
    args = get_mindspeed_args()
    FeaturesManager.apply_features_pre_patches(args)
    FeaturesManager.apply_features_patches(args)


def repatch(args: Mapping[str, Any]) -> None:
    """Take every patch back, merge ``args`` into the arguments, and patch again."""
    FeaturesManager.remove_patches()
    full_args = get_full_args()
    for name, value in args.items():
        setattr(full_args, name, value)
    FeaturesManager.apply_features_pre_patches(full_args)
    FeaturesManager.apply_features_patches(full_args)


patch_features()
