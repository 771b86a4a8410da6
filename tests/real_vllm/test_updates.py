"""Updates of a real vLLM on the CPU: active weights after updates and after faults, and access control."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megascend import Adam, Adapters, Lora, Parallel, Sample
from megascend.apps.rl.rollout.engines.vllm import VllmEngine
from megascend.testing import run_distributed
from megascend.testing.parity import causal_samples, token_lists
from megascend.testing.tiny_models import write_tiny_checkpoint
from support.trainers import make_trainer
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
from weightwire.errors import (
    CommitError,
    DigestError,
    ManifestError,
    NotServingError,
    VersionError,
)
from weightwire.group import Listener

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LORA_BOUND = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_python()
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", head_dim=32)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
    with Server(checkpoint, tmp_path_factory.mktemp("vllm"), *options) as instance:
        yield instance


def test_update_is_active_and_responses_report_its_version(server, weights, reference, listener):
    new = changed(weights, seed=1)
    old_values, new_values = reference.logprobs(weights, TOKENS), reference.logprobs(new, TOKENS)
    assert far(old_values, new_values) > 0.1

    async def act(engine):
        await assert_active(engine, old_values, 0)
        await push(engine, listener, new, 1)
        await assert_active(engine, new_values, 1)
        sampling = Sampling(max_tokens=16, stop_token_ids=(299,), seed=3)
        for completion in await engine.generate(TOKENS[:12], sampling, n=3):
            assert (completion.first_version, completion.last_version) == (1, 1)
            sequence = [*TOKENS[:12], *completion.tokens]
            assert far(completion.logprobs, reference.logprobs(new, sequence, begin=12)) < BOUND
        with pytest.raises(VersionError, match="version 1 of model is offered, and version 1 is already active"):
            await push(engine, listener, weights, 1)
        await assert_active(engine, new_values, 1)
        await push(engine, listener, weights, 2)
        await assert_active(engine, old_values, 2)

    server.run(act)


def test_logprobs_are_of_the_sampling_distribution(server, weights, reference, listener):
    async def act(engine):
        await push(engine, listener, weights, 1)
        return (await engine.generate(TOKENS[:8], Sampling(max_tokens=1, temperature=0.5, seed=1)))[0]

    completion = server.run(act)
    logs = torch.tensor([reference.logprobs(weights, [*TOKENS[:8], token], begin=8)[0] for token in range(320)])
    expected = (logs / 0.5).log_softmax(0)[completion.tokens[0]].item()
    assert abs(completion.logprobs[0] - expected) < BOUND


def test_response_during_an_update_has_tokens_of_both_versions(server, weights, reference, listener):
    new = changed(weights, seed=2)

    async def act(engine):
        await push(engine, listener, weights, 1)
        running = [
            asyncio.create_task(engine.generate(TOKENS[: 6 + index], Sampling(max_tokens=300, seed=index)))
            for index in range(4)
        ]
        await asyncio.sleep(0.3)
        await push(engine, listener, new, 2)
        return [(await task)[0] for task in running]

    completions = server.run(act)
    assert any(completion.first_version < completion.last_version for completion in completions)
    for index, completion in enumerate(completions):
        sequence = [*TOKENS[: 6 + index], *completion.tokens]
        old_values, new_values = (reference.logprobs(model, sequence, begin=6 + index) for model in (weights, new))
        from_old = [abs(a - b) < BOUND for a, b in zip(completion.logprobs, old_values, strict=True)]
        from_new = [abs(a - b) < BOUND for a, b in zip(completion.logprobs, new_values, strict=True)]
        count = len(completion.tokens)
        cuts = [cut for cut in range(count + 1) if all(from_old[:cut]) and all(from_new[cut:])]
        assert cuts, f"response {index} matches neither version"
        assert completion.first_version == (1 if cuts[-1] > 0 else 2)
        assert completion.last_version == (
            2 if cuts[0] < count else 1
        )  # a response that ended before the update has version 1


LAYOUTS = {"single": (1, None), "TP2": (2, Parallel(tensor=2)), "PP2": (2, Parallel(pipeline=2))}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trained", ["model", "merged", "adapter"])
@pytest.mark.usefixtures("megatron_imported")
def test_engine_logprobs_match_the_trainer(server, checkpoint, layout, trained):
    """Push the trained model, the base merged with an adapter, and only the adapter, from each layout."""
    world_size, parallel = LAYOUTS[layout]
    sample = Sample(TOKENS[:-1], TOKENS[1:], [1.0] * (len(TOKENS) - 1))

    def on_rank():
        from megascend import WeightSync

        lora, adapter_only = trained != "model", trained == "adapter"
        options = {"adapters": Adapters()} if lora else {"optimizer": Adam(lr=5e-3)}
        backend = make_trainer(checkpoint, parallel, timeout_s=120, **options)
        name = "policy" if lora else None
        if lora:
            backend.add_adapter("policy", Lora(rank=4, alpha=8.0, optimizer=Adam(lr=2e-2)))
        engine = server.engine() if backend.rank == 0 else None
        sync = WeightSync(backend, [engine] if engine else [], bucket_bytes=50_000)
        if adapter_only:
            sync.push(1)
        for _ in range(2):
            backend.forward_backward(backend.shard(causal_samples(token_lists())), adapter=name)
            backend.optimizer_step()
        values = backend.forward([sample], adapter=name).logprobs[0].tolist()
        sync.push(2, name, adapter_only=adapter_only)

        async def ask(engine):
            adapter = "policy" if adapter_only else None
            logprobs = await engine.logprobs(TOKENS, adapter=adapter)
            sampled = (await engine.generate(TOKENS[:9], Sampling(4), adapter=adapter))[0]
            await engine.close()
            return logprobs, (sampled.first_version, sampled.last_version)

        results = asyncio.run(ask(engine)) if engine else None
        sync.close()
        return values, results

    (values, (actual, versions)), *_ = run_distributed(on_rank, world_size, init=False, timeout_s=300)
    assert versions == (2, 2)
    assert far(values, actual) < (LORA_BOUND if trained == "adapter" else BOUND)


# --- faults ---


@pytest.fixture
def baseline(server, weights, reference, listener) -> list[float]:
    """Push the checkpoint's weights as version 1; return their log-probabilities."""

    async def act(engine):
        await push(engine, listener, weights, 1)

    server.run(act)
    return reference.logprobs(weights, TOKENS)


def assert_unharmed(server, weights, reference, listener, baseline) -> None:
    """Check that the previous weights are active and the next update works."""
    new = changed(weights, seed=9)

    async def act(engine):
        await assert_active(engine, baseline, 1)
        await push(engine, listener, new, 2)
        await assert_active(engine, reference.logprobs(new, TOKENS), 2)

    server.run(act)


class Flipping:
    """A transport that flips a bit of the second bucket."""

    def __init__(self, transport: Any) -> None:
        self._transport, self._count = transport, 0

    def send(self, buffer: torch.Tensor) -> Any:
        self._count += 1
        if self._count == 2:
            buffer = buffer.clone()
            buffer[1234] ^= 1
        return self._transport.send(buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def test_flipped_byte_raises_digest_error(server, weights, reference, listener, baseline):
    async def act(engine):
        with pytest.raises(DigestError, match=r"worker 0.*1 of \d+ buckets differ.*the first is bucket 2"):
            await push(engine, listener, changed(weights, 3), 2, wrap=Flipping)

    server.run(act)
    assert_unharmed(server, weights, reference, listener, baseline)


@pytest.mark.parametrize("fault", ["shape", "missing", "extra"])
def test_tensors_of_another_model_are_refused_before_sending(server, weights, reference, listener, baseline, fault):
    other = changed(weights, 3)
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "shape":
        other[name] = other[name][:-1].contiguous()
    elif fault == "missing":
        del other[name]
    else:
        other["model.layers.4.mlp.up_proj.weight"] = other[name].clone()

    async def act(engine):
        with pytest.raises(ManifestError, match=r"model\.layers\.[14]\.mlp\.up_proj\.weight"):
            await push(engine, listener, other, 2)

    server.run(act)
    assert_unharmed(server, weights, reference, listener, baseline)


def test_failed_commit_restores_the_previous_weights(server, weights, reference, listener, baseline):
    async def act(engine):
        running = asyncio.create_task(engine.generate(TOKENS[:7], Sampling(max_tokens=200, seed=1)))
        await asyncio.sleep(0.2)
        server.fault.write_text("load")
        try:
            with pytest.raises(CommitError, match=r"no sixth tensor.*The weights from before it are active") as caught:
                await push(engine, listener, changed(weights, 4), 2)
            assert not isinstance(caught.value, NotServingError)
        finally:
            server.fault.unlink()
        completion = (await running)[0]
        sequence = [*TOKENS[:7], *completion.tokens]
        assert far(completion.logprobs, reference.logprobs(weights, sequence, begin=7)) < BOUND
        assert (completion.first_version, completion.last_version) == (1, 1)

    server.run(act)
    assert_unharmed(server, weights, reference, listener, baseline)


class Dying:
    """A transport whose process is killed at the second bucket."""

    def __init__(self, transport: Any) -> None:
        self._transport, self._count = transport, 0

    def send(self, buffer: torch.Tensor) -> Any:
        self._count += 1
        if self._count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._transport.send(buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.mark.parametrize("moment", ["offered", "sending", "sent", "verified", "committing", "paused"])
def test_trainer_killed_at_any_moment_leaves_a_working_engine(server, weights, reference, listener, baseline, moment):
    new = changed(weights, 6)

    async def die(engine: VllmEngine) -> None:
        def now() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if moment == "paused":
            await engine.pause(2.0)
            now()
        listener_of_trainer = Listener()
        offer = offered(engine, listener_of_trainer, manifest_of(new, 2), await engine.receivers())
        await engine.begin_update(offer)
        if moment == "offered":
            now()
        seal = await asyncio.to_thread(send, offer, new, Dying if moment == "sending" else lambda transport: transport)
        if moment == "sent":
            now()
        await engine.verify(seal, 30.0)
        if moment == "verified":
            now()
        server.fault.write_text("slow")
        asyncio.get_running_loop().call_later(0.5, now)
        await engine.commit(offer.update)

    assert forked_trainer(lambda: die(server.engine())) == -signal.SIGKILL
    if moment == "paused":
        assert asyncio.run(server.engine().info())["paused"]
    if moment != "committing":
        asyncio.run(until_running(server))
        assert_unharmed(server, weights, reference, listener, baseline)
        return
    server.fault.unlink()  # the engine finishes the commit
    asyncio.run(until_running(server))

    async def act(engine):
        await assert_active(engine, reference.logprobs(new, TOKENS), 2)

    server.run(act)


async def until_running(server: Server) -> None:
    """Wait for the end of a pause."""
    deadline = time.monotonic() + 60
    engine = server.engine()
    while (await engine.info())["paused"]:
        assert time.monotonic() < deadline, "still paused"
        await asyncio.sleep(0.1)


def test_vllm_responses_have_version_headers(server, baseline):
    body = json.dumps({"model": str(server.checkpoint), "prompt": TOKENS[:5], "max_tokens": 2}).encode()
    request = urllib.request.Request(server.process.address + "/v1/completions", data=body)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert (answer.headers["X-Weight-Version-First"], answer.headers["X-Weight-Version-Last"]) == ("1", "1")


# --- many updates ---


def memory(server: Server) -> int:
    """Return the unique set size of the server and its workers, in bytes."""
    leader = psutil.Process(server.process.pid)
    return sum(process.memory_full_info().uss for process in (leader, *leader.children(recursive=True)))


def test_hundred_updates_lose_no_request_and_no_memory(server, weights, reference, listener, baseline):
    versions = [weights, changed(weights, 7)]
    sizes: list[int] = []

    async def act(engine):
        running, answers, count = True, [], 0

        async def ask(number: int) -> None:
            nonlocal count
            while running:
                prompt = TOKENS[: 4 + number % 8]
                answers.append((await engine.generate(prompt, Sampling(max_tokens=24, seed=count)))[0])
                count += 1

        requests = [asyncio.create_task(ask(number)) for number in range(32)]
        for number in range(2, 102):
            await push(engine, listener, versions[number % 2], number)
            if number in (22, 101):
                sizes.append(memory(server))
        running = False
        await asyncio.gather(*requests)
        await assert_active(engine, reference.logprobs(versions[101 % 2], TOKENS), 101)
        assert len(answers) == count >= 32
        assert all(len(completion.tokens) == 24 or completion.finish_reason == "stop" for completion in answers)
        assert all(1 <= completion.first_version <= completion.last_version <= 101 for completion in answers)
        assert any(completion.first_version < completion.last_version for completion in answers)

    server.run(act)
    print("bytes of server and workers after updates 21 and 100:", sizes)
    assert sizes[1] - sizes[0] < 20 * 2**20, sizes
