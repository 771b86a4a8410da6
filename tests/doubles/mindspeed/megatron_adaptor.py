"""Import this and the process is patched: the one line by which MindSpeed is switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_npu.contrib import transfer_to_npu  # noqa: F401  # its import redirects torch.cuda to the NPU

from mindspeed.args_utils import get_full_args, get_mindspeed_args
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from mindspeed.log_config import set_log_config


def patch_features() -> None:
    """Everything that the arguments ask for, in the order that lets megatron-core find what it looks for."""
    set_log_config()
    args = get_mindspeed_args()
    MindSpeedFeaturesManager.apply_features_pre_patches(args)
    MindSpeedFeaturesManager.apply_features_patches(args)


def repatch(args: Mapping[str, Any]) -> None:
    """Take every patch back, merge ``args`` into the runtime arguments, and patch anew.

    Arguments of earlier calls stay, unless ``args_utils._MINDSPEED_ARGS`` is replaced.
    """
    MindSpeedFeaturesManager.remove_patches()
    full_args = get_full_args()
    for name, value in args.items():
        setattr(full_args, name, value)
    MindSpeedFeaturesManager.apply_features_pre_patches(full_args)
    MindSpeedFeaturesManager.apply_features_patches(full_args)


patch_features()
