"""Sharded updates of a real vLLM with two workers: each gets the slices that it loads, from every rank of a trainer.

Linear layers compute with plain weights, as on GPUs, so that commits are in place; experts, which the CPU packs, are reloaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megascend import Adam, Parallel, WeightSync
from megascend.errors import WeightSyncError
from megascend.testing import run_distributed
from megascend.testing.parity import causal_samples, token_lists
from megascend.testing.tiny_models import write_tiny_checkpoint
from support.trainers import make_trainer
from support.vllm_server import BOUND, TOKENS, Reference, Server, far, vllm_python
from weightwire.manifest import TensorSpec
from weightwire.plan import Region
from weightwire.sender import spec_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly]

VARIABLES = {"WEIGHTWIRE_PLAIN_LINEAR": "1", "WEIGHTWIRE_SCRATCH_BYTES": "40000"}

UNCHANGED = [3, 5, 8, 12]
"""Versions that are pushed without a step since the last one, by differences."""

MODELS: dict[str, tuple[str, dict[str, Any], Parallel]] = {
    "dense, TP2": ("qwen3", {"head_dim": 32}, Parallel(tensor=2)),
    "one KV head, tied, PP2": (
        "qwen3",
        {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True},
        Parallel(pipeline=2),
    ),
    "experts, EP2": ("qwen3_moe", {"head_dim": 32, "moe_intermediate_size": 48}, Parallel(expert=2)),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Parallel]:
    vllm_python()
    arch, overrides, parallel = MODELS[request.param]
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / arch, arch, **overrides), parallel


@pytest.fixture(scope="module")
def server(model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm")
    with Server(model[0], folder, "--tensor-parallel-size", "2", variables=VARIABLES) as instance:
        yield instance


def expected_needs(
    specs: Sequence[TensorSpec], config: Any, worker: int
) -> set[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return (name, offsets, sizes) by the rules of tensor parallelism with two workers, whatever vLLM's loaders do."""
    needs = set()
    for spec in specs:
        offsets, sizes = [0] * len(spec.shape), list(spec.shape)

        def half(dim: int, sizes: list[int] = sizes, offsets: list[int] = offsets) -> None:
            sizes[dim] //= 2
            offsets[dim] = worker * sizes[dim]

        if "embed_tokens" in spec.name or "lm_head" in spec.name:
            rows = -(-spec.shape[0] // 64) * 64 // 2  # padded to a multiple of 64, then divided
            offsets[0] = min(worker * rows, spec.shape[0])
            sizes[0] = min(rows, spec.shape[0] - offsets[0])
        elif spec.name.endswith(("k_proj.weight", "v_proj.weight")):
            if config.num_key_value_heads > 1:
                half(0)
        elif spec.name.endswith(("o_proj.weight", "down_proj.weight")):
            half(1)
        elif spec.name.endswith(("q_proj.weight", "gate_proj.weight", "up_proj.weight")):
            half(0)
        needs.add((spec.name, tuple(offsets), tuple(sizes)))
    return needs


def test_workers_describe_their_slices_and_get_them(
    server: Server, model: tuple[Path, Parallel], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    checkpoint, parallel = model
    config, weights = AutoConfig.from_pretrained(checkpoint), load_file(checkpoint / "model.safetensors")
    specs = tuple(spec_of(*item) for item in weights.items())
    reference = Reference(checkpoint)

    async def ask() -> tuple[Any, list[float]]:
        engine = server.engine("trainer")
        needs, before = await engine.needs(specs), await engine.logprobs(TOKENS)
        # Observed, not loaded: nothing of the model has changed.
        assert await engine.needs(specs) == needs
        assert await engine.logprobs(TOKENS) == before
        await engine.close()
        return needs, before

    needs, before = asyncio.run(ask())
    assert far(before, reference.logprobs(weights, TOKENS)) < BOUND
    for worker, pieces in enumerate(needs):
        assert {(specs[piece.tensor].name, *piece.box) for piece in pieces} == expected_needs(specs, config, worker)

    in_place = parallel.expert == 1
    # In the second worker only, while the first one succeeds; or in both.
    fault = "exchange:1" if parallel.tensor == 2 else "exchange" if in_place else "load:1"

    def on_rank() -> Any:
        backend = make_trainer(checkpoint, parallel, optimizer=Adam(lr=1e-2), timeout_s=120)
        engine = server.engine("trainer") if backend.rank == 0 else None
        history: list[tuple[Any, list[float], str]] = []

        async def observe() -> tuple[list[float], str]:
            reader = server.engine("reader")
            values, info = await reader.logprobs(TOKENS), await reader.info()
            await reader.close()
            assert (info["paused"], info["not_serving"]) == (False, None)
            return values, info["reload_reason"]

        def push(sync: WeightSync, version: int) -> None:
            if version not in UNCHANGED:
                backend.forward_backward(backend.shard(causal_samples(token_lists())))
                backend.optimizer_step()
            pushed = sync.push(version)
            backend.export_hf(tmp_path / str(version))
            if engine is not None:
                history.append((pushed, *asyncio.run(observe())))

        def connected(**options: Any) -> WeightSync:
            return WeightSync(backend, [engine] if engine else [], bucket_bytes=50_000, **options)

        with connected(mode="delta", full_every=2) as sync:
            for version in range(1, 6):
                push(sync, version)
            if engine is not None:
                server.fault.write_text(fault)
            with pytest.raises(WeightSyncError, match="the fault of a test"):
                sync.push(6)
            if engine is not None:
                server.fault.unlink()
                assert far(asyncio.run(observe())[0], history[-1][1]) == 0
            # After a failure everything is sent, by another plan.
            for version in (7, 8):
                push(sync, version)
        with connected(sharded=False) as sync:
            for version in (9, 10):
                push(sync, version)
        with connected(mode="delta") as sync:
            for version in (11, 12):
                push(sync, version)
        if engine is not None:
            asyncio.run(engine.close())
        return history

    history, _ = run_distributed(on_rank, 2, init=False, timeout_s=500)
    pushes = [pushed for pushed, _, _ in history]
    assert [push.version for push in pushes] == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    assert [push.base for push in pushes] == [None, 1, 2, None, 4, None, 7, None, None, None, 11]
    assert [push.sharded for push in pushes] == [push.version not in (9, 10) for push in pushes]
    # A step changes nearly all words of fp32 numbers, so that chunks are sent as they are; else the workers' copies are used.
    assert [push.version for push in pushes if push.share < 0.1] == UNCHANGED
    commits = [[kind for kind in ("reload", "exchange") if f"commit.{kind}" in push.parts] for push in pushes]
    assert commits == [["reload"], *[["exchange" if in_place else "reload"]] * 10]
    assert [bool(reason) for _, _, reason in history] == [not in_place] * 11
    # Not both workers everything: about half, but for norms and replicated heads.
    payload = sum(spec.nbytes for spec in specs)
    assert pushes[0].nbytes == max(sum(piece.nbytes(specs) for piece in pieces) for pieces in needs)
    assert pushes[0].nbytes < 0.7 * payload
    last = before
    for push, actual, _ in history:
        expected = reference.logprobs(load_file(tmp_path / str(push.version) / "model.safetensors"), TOKENS)
        assert (far(expected, last) > 100 * BOUND) == (push.version not in UNCHANGED)
        assert far(expected, actual) < BOUND
        last = expected
    assert all(isinstance(piece, Region) for piece in needs[0])
