"""Samplers with a cache, on every engine: their responses beside those without one, and the checks of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megascend import Batching, Parallel
from megascend.apps.sampling.request import SampleRequest, SampleResult, SamplingParams
from megascend.testing import run_distributed
from support.forked_programs import run_forked
from support.generated import Response, assert_equal

RUNS = Path(__file__).parents[2] / "engines" / "fsdp" / "linear_attention_runs.py"
VARIED = SamplingParams(12, temperature=1.3, seed=11, stop=((7,), *((n,) for n in range(40, 90))))
"""Sampled responses end after different numbers of tokens."""

CachedDecoder = tuple[list[SampleResult], list[SampleResult], str | None]
"""Results with a cache and without one, and the reason why a cache is not supported."""


def make_backend(checkpoint: Path, parallel: Parallel, *, packing: bool = True, **options: Any) -> Any:
    from megascend.backends import MegatronBackend

    return MegatronBackend(
        model=checkpoint,
        parallel=parallel,
        precision="fp32",
        batching=Batching(packing=packing, micro_batch_tokens=256),
        timeout_s=60,
        self_check=False,
        **options,
    )


def megatron_results(
    checkpoint: Path, layout: tuple[int, Parallel], packing: bool, requests: Sequence[SampleRequest]
) -> list[CachedDecoder]:
    """Sample on Megatron's engine; return every rank's results."""
    world_size, parallel = layout

    def on_rank() -> CachedDecoder:
        from megascend.apps.sampling.sampler import Sampler

        with make_backend(checkpoint, parallel, packing=packing) as backend:
            sampler = Sampler(backend)
            results = sampler.generate(requests)
            return results, Sampler(backend, cache=False).generate(requests), sampler.cache_unsupported_reason

    return run_distributed(on_rank, world_size, init=False, timeout_s=120)


def engine_results(
    folder: Path, engine: str, ranks: int, checkpoint: Path, packing: bool, requests: Sequence[SampleRequest]
) -> list[CachedDecoder]:
    """Sample on an engine without Megatron; return every rank's results."""
    options = {"batching": Batching(packing=packing, micro_batch_tokens=256)}
    (results,) = run_jobs(folder, ("sampled", (engine, ranks, str(checkpoint), requests, {}), options))
    assert len(results) == ranks
    return results


def run_jobs(folder: Path, *jobs: Any) -> list[Any]:
    torch.save(list(jobs), folder / "jobs")
    completed = run_forked(RUNS, folder / "jobs", folder / "results", timeout_s=400)
    assert completed.returncode == 0, completed.stderr[-6000:]
    return torch.load(folder / "results", weights_only=False)


def assert_cached_equal(ranks: Sequence[CachedDecoder], expected: Sequence[Response]) -> None:
    """Compare greedy responses with the expected ones, and all, of which the last are sampled, with those without a cache."""
    for results, recomputed, reason in ranks:
        assert reason is None
        assert_equal(results[:-1], list(expected))
        for result, other in zip(results, recomputed, strict=True):
            assert [sample.tokens for sample in result.samples] == [sample.tokens for sample in other.samples]
            for sample, without_cache in zip(result.samples, other.samples, strict=True):
                assert sample.logprobs == pytest.approx(without_cache.logprobs, abs=2e-5)
