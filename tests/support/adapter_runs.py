"""Backends of engine megatron with adapters, in fp32 on small micro batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megascend import Adam, Adapters, Batching, Parallel


def make_backend(
    checkpoint: Path, parallel: Parallel | None = None, adapters: Adapters | None = None, **options: Any
) -> Any:
    from megascend.backends import MegatronBackend

    settings = {"precision": "fp32", "optimizer": Adam(lr=1e-2), "batching": Batching(micro_batch_tokens=48)} | options
    return MegatronBackend(
        checkpoint, parallel or Parallel(), adapters=adapters or Adapters(), timeout_s=60, **settings
    )
