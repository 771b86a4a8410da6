"""Ranks of the transformers engines for a sampling test. A script, so that Megatron is not imported.

python sampling_ranks.py JOB RESULT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import megascend
from megascend.apps.sampling.request import SampleRequest, SampleResult
from megascend.testing import run_distributed

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens")


def sampled(
    engine: str, ranks: int, checkpoint: str, adapters: dict[str, str], requests: list[SampleRequest]
) -> list[tuple[list[SampleResult], str | None]]:
    """Return the results on every rank, and why no cache was used."""

    def on_rank() -> Any:
        settings: dict[str, Any] = {
            "adapters": megascend.Adapters(
                max_count=4, max_rank=16, targets=TARGETS if engine == "fsdp" else "all-linear"
            ),
            "batching": megascend.Batching(micro_batch_tokens=128, max_length=64),
            "precision": "fp32",
            "platform": "cpu",
        }
        with megascend.make_backend(engine, model=checkpoint, **settings) as backend:
            for name, path in adapters.items():
                backend.load_adapter(name, path)
            sampler = megascend.Sampler(backend)
            return sampler.generate(requests), sampler.cache_unsupported_reason

    if ranks == 1:
        return [on_rank()]
    megascend.bootstrap("cpu", engine=engine)
    return run_distributed(on_rank, ranks, init=False)


if __name__ == "__main__":
    torch.save(sampled(*torch.load(sys.argv[1], weights_only=False)), Path(sys.argv[2]))
