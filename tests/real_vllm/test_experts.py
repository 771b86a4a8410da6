"""A model with experts: from a trainer whose experts are on two ranks to an engine whose shards are in two workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from driving import TOKENS, Reference, Server, changed, far, push, vllm_python
from safetensors.torch import load_file

from megascend import Adam, Batching, Parallel, Sample
from megascend.testing import run_distributed
from megascend.testing.parity import causal_samples, token_lists
from megascend.testing.tiny_models import write_tiny_checkpoint
from weightwire.errors import CommitError
from weightwire.group import Listener
from weightwire.manifest import Manifest
from weightwire.sender import spec_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly]

BOUND = 1e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_python()
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "moe", "qwen3_moe", head_dim=32)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(checkpoint, tmp_path_factory.mktemp("vllm"), "--tensor-parallel-size", "2")
    yield found
    found.process.close()


@pytest.mark.usefixtures("megatron_imported")
def test_the_engine_computes_what_the_trainer_does(server, checkpoint):
    sample = Sample(TOKENS[:-1], TOKENS[1:], [1.0] * (len(TOKENS) - 1))

    def on_rank():
        from megascend.backends import MegatronBackend

        backend = MegatronBackend(
            checkpoint,
            Parallel(expert=2),
            precision="fp32",
            timeout_s=120,
            batching=Batching(micro_batch_tokens=64),
            optimizer=Adam(lr=5e-3),
        )
        for _ in range(2):
            backend.forward_backward(backend.shard(causal_samples(token_lists())))
            backend.optimizer_step()
        values = backend.forward([sample]).logprobs[0].tolist()
        tensors = {name: tensor.clone() for name, tensor in backend.named_weights(receivers={0}, device="cpu")}
        if backend.rank != 0:
            return None

        async def act():
            engine = server.engine()
            specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
            assert await engine.receivers() == 2
            await push(engine, Listener(), tensors, 1, manifest=Manifest(1, specs, 50_000))
            found = await engine.logprobs(TOKENS)
            await engine.close()
            return values, found

        return asyncio.run(act())

    values, found = run_distributed(on_rank, 2, init=False, timeout_s=300)[0]
    assert far(values, found) < BOUND


def test_a_commit_that_fails_is_undone_on_both_workers(server, checkpoint):
    weights, reference, listener = load_file(checkpoint / "model.safetensors"), Reference(checkpoint), Listener()

    async def act():
        engine = server.engine()
        await push(engine, listener, weights, 1)
        known = await engine.logprobs(TOKENS)
        assert far(known, reference.logprobs(weights, TOKENS)) < BOUND
        server.fault.write_text("load:1")  # in the second worker alone
        try:
            with pytest.raises(CommitError, match=r"worker 1.*no sixth tensor"):
                await push(engine, listener, changed(weights, 1), 2)
        finally:
            server.fault.unlink()
        assert await engine.logprobs(TOKENS) == known
        info = await engine.info()
        assert (info["paused"], info["not_serving"], info["versions"]["model"]) == (False, None, 1)
        new = changed(weights, 2)
        await push(engine, listener, new, 2)
        assert far(await engine.logprobs(TOKENS), reference.logprobs(new, TOKENS)) < BOUND
        await engine.close()

    asyncio.run(asyncio.wait_for(act(), 300))
