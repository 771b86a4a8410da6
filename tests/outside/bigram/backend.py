"""The kind of backend: its settings, and what they build."""

from __future__ import annotations

from pathlib import Path

import megascend
from megascend.engines.context import EngineSpec


class BigramBackend(megascend.Backend):
    """A bigram model in fp32, trained by all ranks of this world as data parallel ones."""

    def __init__(
        self,
        model: str | Path,
        precision: megascend.config.Precision = "fp32",
        optimizer: megascend.Adam | None = None,
        schedule: megascend.Schedule | None = None,
        batching: megascend.Batching | None = None,
        platform: megascend.config.PlatformName = "auto",
        seed: int = 1234,
        timeout_s: float = 600.0,
    ) -> None:
        settings = {
            "precision": precision,
            "optimizer": optimizer,
            "schedule": schedule,
            "batching": batching,
            "platform": platform,
            "seed": seed,
            "timeout_s": timeout_s,
        }
        spec = EngineSpec.of(model, settings)
        with megascend.engine_context("bigram", spec) as context:
            from bigram.engine import BigramEngine

            engine = BigramEngine(spec, context)
        super().__init__(engine, context.model_dir, context.runtime.platform)
