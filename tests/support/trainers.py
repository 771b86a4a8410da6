"""A trainer of tests that push weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megascend
from megascend import Batching, Parallel


def make_trainer(checkpoint: Path, parallel: Parallel | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"precision": "fp32", "timeout_s": 60, "batching": Batching(micro_batch_tokens=64)}
    return megascend.MegatronBackend(checkpoint, parallel, **settings | options)
