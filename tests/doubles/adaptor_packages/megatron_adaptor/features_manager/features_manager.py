"""The list of features, and their patches."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib import import_module
from typing import Any

from megatron_adaptor.features_manager.requirements import RequirementsFeature

_applied: list[tuple[Any, str, Any, Any]] = []  # owner, name, original, replacement


class FeaturesManager:
    """Class methods over one list of features, to which MindSpeed's later branches append."""

    FEATURES_LIST: list[Any] = [RequirementsFeature()]  # noqa: RUF012  # the list is the class's, as callers expect

    @classmethod
    def add_feature(cls, feature: Any) -> None:
        cls.FEATURES_LIST.append(feature)

    @classmethod
    def register_features_args(cls, parser: ArgumentParser) -> None:
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def apply_features_pre_patches(cls, args: Namespace) -> None:
        """Patch torch, before Megatron-Core is imported."""
        for feature in cls.FEATURES_LIST:
            feature.pre_register_patches(cls, args)

    @classmethod
    def apply_features_patches(cls, args: Namespace) -> None:
        """Import Megatron-Core and patch it."""
        for feature in cls.FEATURES_LIST:
            feature.register_patches(cls, args)

    @classmethod
    def remove_patches(cls) -> None:
        """Put every original back, newest first."""
        while _applied:
            owner, name, original, replacement = _applied.pop()
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)

    @staticmethod
    def wrap(path: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace the attribute at ``path`` by ``wrapper(original)``, also in modules that have imported it."""
        module_name, _, name = path.rpartition(".")
        module = import_module(module_name)
        original = getattr(module, name)
        replacement = wrapper(original)
        for holder in [module, *(other for other in sys.modules.copy().values() if other is not module)]:
            if vars(holder).get(name) is original if hasattr(holder, "__dict__") else False:
                setattr(holder, name, replacement)
                _applied.append((holder, name, original, replacement))
