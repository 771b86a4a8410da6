"""Declarations of architectures: one file a family, and the registry."""

from megascend.models.base import Architecture, Config, ImageLayout, Images, expert_count, expert_layers, text_config
from megascend.models.registry import (
    architecture_named,
    architecture_of,
    proven,
    register_architecture,
    registered,
)

__all__ = [
    "Architecture",
    "Config",
    "ImageLayout",
    "Images",
    "architecture_named",
    "architecture_of",
    "expert_count",
    "expert_layers",
    "proven",
    "register_architecture",
    "registered",
    "text_config",
]
