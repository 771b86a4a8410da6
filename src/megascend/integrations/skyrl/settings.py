"""Schema of ``--backend-config`` of SkyRL's Tinker server, and its translation. Imports neither SkyRL nor torch."""

from __future__ import annotations

from pydantic import BaseModel, Field

from megascend.config import Batching, Parallel, PlatformName, Precision
from megascend.config.serve import ServeConfig
from megascend.models.checkpoint_files.hub import snapshot

NAME = "megascend.integrations.skyrl.backend:MegascendBackend"
"""Class path for ``--backend``."""


class BackendConfig(BaseModel, extra="forbid"):
    """Settings of :class:`~megascend.integrations.skyrl.backend.MegascendBackend`."""

    max_lora_adapters: int = Field(
        32, ge=1, description="models at a time; a model that is sampled from takes a second slot"
    )
    max_lora_rank: int = Field(32, ge=1, description="largest LoRA rank")
    engine: str = Field("megatron", description="megatron, fsdp or single")
    ranks: int = Field(1, ge=1, description="processes on this host, started by torchrun")
    parallel: Parallel = Parallel()
    precision: Precision = "bf16"
    platform: PlatformName = "auto"
    batching: Batching = Batching()
    batch_tokens: int = Field(65536, ge=1, description="most tokens of one batch of several models")
    timeout_s: float = Field(600, gt=0, description="a rank that is missing for so long is an error on the others")


def serve_settings(base_model: str, config: BackendConfig) -> ServeConfig:
    """Translate to the settings of the ranks. Pure."""
    return ServeConfig(
        model=snapshot(base_model),
        engine=config.engine,
        parallel=config.parallel,
        precision=config.precision,
        platform=config.platform,
        batching=config.batching,
        timeout_s=config.timeout_s,
        max_models=config.max_lora_adapters,
        # Every model may be sampled from at the same time.
        max_samplers=config.max_lora_adapters,
        max_rank=config.max_lora_rank,
        batch_tokens=config.batch_tokens,
    )
