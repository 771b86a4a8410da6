"""Commits of a real vLLM that copy into the parameters in use. Linear layers compute with plain weights, as on GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from megascend.testing.tiny_models import write_tiny_checkpoint
from support.vllm_server import (
    BOUND,
    TOKENS,
    Server,
    assert_active,
    changed,
    far,
    forked_trainer,
    manifest_of,
    offered,
    push,
    send,
    vllm_python,
)
from weightwire.engine import Sampling
from weightwire.errors import CommitError, NotServingError
from weightwire.group import Listener

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VARIABLES = {"WEIGHTWIRE_PLAIN_LINEAR": "1", "WEIGHTWIRE_SCRATCH_BYTES": "40000"}


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    vllm_python()
    folder = tmp_path_factory.mktemp(f"vllm{request.param}")
    checkpoint = write_tiny_checkpoint(folder / "qwen3", "qwen3", head_dim=32)
    with Server(checkpoint, folder, f"--tensor-parallel-size={request.param}", variables=VARIABLES) as instance:
        yield instance


def test_first_update_reloads_and_later_ones_are_exchanged(server, weights, reference, listener):
    async def act(engine):
        for version in range(1, 5):
            new = changed(weights, seed=version)
            seconds = await push(engine, listener, new, version)
            assert (await engine.info())["reload_reason"] == ""
            assert ("reload" in seconds, "exchange" in seconds) == (version == 1, version > 1)
            await assert_active(engine, reference.logprobs(new, TOKENS), version)
        assert seconds["exchange"] < seconds["paused"] < 2

    server.run(act)


def test_response_during_an_exchange_has_tokens_of_both_versions(server, weights, reference, listener):
    new = changed(weights, seed=12)

    async def act(engine):
        # How long the responses and the push take depends on the machine: again, until one has tokens of both.
        for version in range(1, 20, 2):
            await push(engine, listener, weights, version)
            running = [
                asyncio.create_task(engine.generate(TOKENS[: 6 + index], Sampling(max_tokens=480, seed=index)))
                for index in range(4)
            ]
            await asyncio.sleep(0.05 * version)
            assert "exchange" in await push(engine, listener, new, version + 1)
            completions = [(await task)[0] for task in running]
            if any(completion.first_version < completion.last_version for completion in completions):
                return completions
        raise AssertionError("no response was sampled during a push")

    completions = server.run(act)
    for index, completion in enumerate(completions):
        sequence = [*TOKENS[: 6 + index], *completion.tokens]
        old, new_values = (reference.logprobs(model, sequence, begin=6 + index) for model in (weights, new))
        from_old = [abs(a - b) < BOUND for a, b in zip(completion.logprobs, old, strict=True)]
        from_new = [abs(a - b) < BOUND for a, b in zip(completion.logprobs, new_values, strict=True)]
        assert any(all(from_old[:cut]) and all(from_new[cut:]) for cut in range(len(from_old) + 1)), index


@pytest.fixture
def baseline(server, weights, reference, listener) -> list[float]:
    """Push the checkpoint's weights as version 1; return their log-probabilities."""

    async def act(engine):
        await push(engine, listener, weights, 1)
        await push(engine, listener, weights, 2)

    server.run(act)
    return reference.logprobs(weights, TOKENS)


def assert_unharmed(server, weights, reference, listener, baseline) -> None:
    new = changed(weights, seed=9)

    async def act(engine):
        await assert_active(engine, baseline, 2)
        assert "exchange" in await push(engine, listener, new, 3)
        await assert_active(engine, reference.logprobs(new, TOKENS), 3)

    server.run(act)


@pytest.mark.parametrize("fault", ["exchange", "exchange:1"])
def test_exchange_that_stops_is_undone_on_all_workers(server, weights, reference, listener, baseline, fault):
    async def act(engine):
        if fault == "exchange:1" and await engine.receivers() == 1:
            pytest.skip("one worker")
        running = asyncio.create_task(engine.generate(TOKENS[:7], Sampling(max_tokens=200, seed=1)))
        await asyncio.sleep(0.2)
        server.fault.write_text(fault)
        try:
            with pytest.raises(CommitError, match=r"no third group.*The weights from before it are active") as caught:
                await push(engine, listener, changed(weights, 4), 3)
            assert not isinstance(caught.value, NotServingError)
        finally:
            server.fault.unlink()
        completion = (await running)[0]
        sequence = [*TOKENS[:7], *completion.tokens]
        assert far(completion.logprobs, reference.logprobs(weights, sequence, begin=7)) < BOUND

    server.run(act)
    assert_unharmed(server, weights, reference, listener, baseline)


def test_trainer_killed_during_an_exchange_does_not_stop_it(server, weights, reference, listener, baseline):
    new = changed(weights, 6)

    async def die(engine: Any) -> None:
        listener = Listener()
        offer = offered(engine, listener, manifest_of(new, 3), await engine.receivers())
        await engine.begin_update(offer)
        seal = await asyncio.to_thread(send, offer, new)
        await engine.verify(seal, 30.0)
        server.fault.write_text("slow")
        commit = asyncio.create_task(engine.commit(offer.update))
        while not (await engine.info())["paused"]:
            assert not commit.done(), "the exchange ended before it was seen"
            await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked_trainer(lambda: die(server.engine())) == -signal.SIGKILL
    server.fault.unlink()

    async def act(engine):
        while (await engine.info())["paused"]:
            await asyncio.sleep(0.1)
        await assert_active(engine, reference.logprobs(new, TOKENS), 3)

    server.run(act)
