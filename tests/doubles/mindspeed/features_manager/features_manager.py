"""The list of features, and applying it."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Any

from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.patch_utils import MindSpeedPatchesManager


class MindSpeedFeaturesManager:
    """Class methods over one list; whoever wants patches of their own in every repatch appends a feature to it."""

    FEATURES_LIST: list[MindSpeedFeature] = []  # noqa: RUF012  # the list is the class's, as callers expect

    @classmethod
    def set_features_list(cls, features_list: Iterable[MindSpeedFeature]) -> None:
        cls.FEATURES_LIST[:] = features_list

    @classmethod
    def register_features_args(cls, parser: ArgumentParser) -> None:
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def apply_features_pre_patches(cls, mindspeed_args: Any) -> None:
        for feature in cls._needed(mindspeed_args):
            feature.pre_register_patches(MindSpeedPatchesManager, mindspeed_args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def apply_features_patches(cls, mindspeed_args: Any) -> None:
        for feature in cls._needed(mindspeed_args):
            feature.register_patches(MindSpeedPatchesManager, mindspeed_args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def remove_patches(cls) -> None:
        MindSpeedPatchesManager.remove_patches()

    @classmethod
    def pre_validate_features_args(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.pre_validate_args(args)

    @classmethod
    def post_validate_features_args(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.post_validate_args(args)

    @classmethod
    def validate_features_args(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.validate_args(args)

    @classmethod
    def _needed(cls, args: Any) -> list[MindSpeedFeature]:
        return [feature for feature in cls.FEATURES_LIST if feature.is_need_apply(args)]
