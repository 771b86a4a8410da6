"""What a feature is: arguments, checks, patches, and the optimization level from which it applies."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any


class MindSpeedFeature:
    """Base class. Level 0 applies always; a higher one if the level is reached and the argument of its name is set."""

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.strip().lower().replace("-", "_")
        self.optimization_level = optimization_level
        self.default_patches = optimization_level == 0

    def is_need_apply(self, args: Any) -> Any:
        """Whether the feature's patches belong in a process with these arguments."""
        if self.default_patches:
            return True
        return self.optimization_level <= args.optimization_level and getattr(args, self.feature_name, None)

    def register_args(self, parser: ArgumentParser) -> None:
        """Declare the feature's options."""

    def pre_validate_args(self, args: Namespace) -> None:
        """Before Megatron checks its configuration."""

    def validate_args(self, args: Namespace) -> None:
        """After Megatron has checked its configuration."""

    def post_validate_args(self, args: Namespace) -> None:
        """Between the two."""

    def pre_register_patches(self, patch_manager: Any, args: Namespace) -> None:
        """Register what has to be in place before megatron.core is imported."""

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        """Register the rest; may import megatron.core."""
