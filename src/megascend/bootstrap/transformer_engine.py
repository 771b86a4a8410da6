"""The provider of CUDA: NVIDIA's Transformer Engine, which Megatron-Core uses without any patch."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import ClassVar

from megascend.bootstrap.providers import PatchProvider
from megascend.errors import PlatformError
from megascend.surroundings import is_installed


class TransformerEngine(PatchProvider):
    name: ClassVar[str] = "transformer_engine"
    must_come_first: ClassVar[bool] = False

    def before_megatron(self) -> list[str]:
        if not is_installed("transformer_engine"):
            raise PlatformError(
                "platform 'cuda' needs Transformer Engine: pip install --no-build-isolation "
                "'transformer-engine[pytorch]'. To run with megascend's slower reference implementation instead, "
                "set MEGASCEND_REFERENCE_TE=1."
            )
        self.setup.platform.has_transformer_engine_kernels = True
        return one_connection(os.environ)


def one_connection(environment: MutableMapping[str, str]) -> list[str]:
    """``CUDA_DEVICE_MAX_CONNECTIONS=1`` where it is not set: the order of kernels that Megatron-Core's overlaps rely on."""
    if "CUDA_DEVICE_MAX_CONNECTIONS" in environment:
        return []
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return ["CUDA_DEVICE_MAX_CONNECTIONS=1"]
