"""The features of this double, in the order in which they register their patches."""

from __future__ import annotations

from mindspeed.features_manager.context_parallel import ContextParallelFeature
from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from mindspeed.features_manager.megatron_basic import MegatronBasicFeature
from mindspeed.features_manager.options import OptionsFeature
from mindspeed.features_manager.requirements import RequirementsBasicFeature
from mindspeed.features_manager.transformer_engine import TransformerEngineBasicFeature

__all__ = ["FEATURES_LIST", "MindSpeedFeature", "MindSpeedFeaturesManager", "create_features_list"]

FEATURES_LIST: list[MindSpeedFeature] = []
"""The list of :mod:`mindspeed.arguments`; not the manager's. mcore-bridge fills it for a moment."""


def create_features_list() -> list[MindSpeedFeature]:
    """Fresh features; the program may extend the manager's list, not this one."""
    return [
        RequirementsBasicFeature(),
        MegatronBasicFeature(),
        TransformerEngineBasicFeature(),
        ContextParallelFeature(),
        OptionsFeature(),
    ]


MindSpeedFeaturesManager.set_features_list(create_features_list())
