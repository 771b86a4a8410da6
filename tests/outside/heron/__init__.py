"""A family of somebody else's, declared in under 60 lines: layers like Mistral's, whose window is called ``reach``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import megascend
from megascend.models import Architecture, Config


@dataclass(frozen=True)
class Heron(Architecture):
    """Every layer attends within ``reach`` tokens, itself included."""

    def megatron_settings(self, config: Config) -> dict[str, Any]:
        return super().megatron_settings(config) | {"window_size": f"{config['reach'] - 1},0", "add_qkv_bias": False}

    def unsupported(self, config: Config) -> list[str]:
        return super().unsupported(config) + (["reach: 0 attends to nothing"] if config.get("reach") == 0 else [])


megascend.register_architecture(
    Heron(("heron",), transformers="heron.hugging_face", megatron="heron.megatron", tiny={"reach": 16})
)
