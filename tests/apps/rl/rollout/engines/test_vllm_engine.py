"""The client of a vLLM server and the server's guard over HTTP, with doubles of vLLM's engine and sampling parameters.

``tests/real_vllm`` tests the same with a real vLLM.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[4] / "weightwire"))
import os
import signal
import subprocess

from test_vllm_control import Engine

from megascend.apps.rl.rollout.controller.client import ControllerEngine
from megascend.apps.rl.rollout.engines.vllm import VllmAscendEngine, VllmEngine
from megascend.errors import ConfigError, EngineError, EngineLostError, WeightSyncError
from megascend.sync.delivery import Delivery
from megascend.sync.push import push_tensors
from weightwire.engine import Completion, RoutedExperts, Sampling, TopLogprobs
from weightwire.engine_calls import LoopThread
from weightwire.errors import UnsupportedCallError, WireError
from weightwire.keys import ENVIRONMENT, Key, generate_key
from weightwire.vllm.guard import Guard

SECRET = generate_key()
KEY = Key(SECRET)


class SamplingEngine(Engine):
    """Engine double that also generates: every token is its predecessor plus one.

    Attributes:
        experts: as in vLLM 0.24 (``vllm/v1/core/sched/scheduler.py``): [tokens that were computed, layers, k], or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Any] = []
        self.vllm_config.model_config.enable_return_routed_experts = False
        self.experts: np.ndarray | None = None
        self.allowed = {3: math.log(1 - math.exp(-0.5))}

    def rest_of_row(self, count: int) -> dict[int, Any]:
        """Return the entries of tokens that were not drawn: one that was allowed, and others that were not."""
        logprobs = {**self.allowed, 1: -math.inf, 2: -math.inf}
        return {token: SimpleNamespace(logprob=logprob) for token, logprob in list(logprobs.items())[:count]}

    async def generate(self, prompt: Any, params: Any, request: str, lora_request: Any) -> AsyncIterator[Any]:
        self.requests.append(params)
        tokens = prompt["prompt_token_ids"]
        if params.max_tokens > 100:
            raise ValueError("the prompt is too long")
        sampled = [tokens[-1] + 1 + number for number in range(params.max_tokens)]
        rows = [
            {token: SimpleNamespace(logprob=-0.5), **self.rest_of_row(getattr(params, "logprobs", 0))}
            for token in sampled
        ]
        output = SimpleNamespace(token_ids=sampled, logprobs=rows, finish_reason="length", routed_experts=self.experts)
        scores: list[Any] = [None]
        for token in tokens[1:]:  # the likeliest of all, and the sequence's own token, which is of rank 9
            top = {
                90 + rank: SimpleNamespace(logprob=-rank / 2, rank=rank)
                for rank in (2, 1)[: getattr(params, "prompt_logprobs", 0)]
            }
            scores.append({token: SimpleNamespace(logprob=-float(token), rank=9), **top})
        yield SimpleNamespace(finished=True, outputs=[output] * getattr(params, "n", 1), prompt_logprobs=scores)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> SamplingEngine:
    module = ModuleType("vllm.sampling_params")
    module.RequestOutputKind = SimpleNamespace(FINAL_ONLY=0)  # type: ignore[attr-defined]
    module.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
    return SamplingEngine()


@pytest.fixture
def guards() -> list[Guard]:
    """Return the guard of the server, which a test replaces to restart it."""
    return [Guard(lambda *_: pytest.fail("passed on"), KEY)]


@pytest.fixture
def address(double: SamplingEngine, guards: list[Guard]) -> Iterator[str]:
    """Serve a double of vLLM behind the real guard."""
    state = SimpleNamespace(engine_client=double)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await guards[0]({**scope, "app": SimpleNamespace(state=state)}, receive, send)

    with LoopThread("vllm") as thread:
        server = uvicorn.Server(uvicorn.Config(application, port=0, lifespan="off", log_config=None, log_level="error"))
        serving = thread.submit(server.serve())
        while not server.started:
            assert not serving.done()
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        serving.result(30)


def client(address: str, **options: Any) -> VllmEngine:
    return VllmEngine(address, key=KEY, **options)


def test_an_update_reaches_both_workers_and_versions_are_reported(address: str, double: SamplingEngine) -> None:
    engine = client(address, owner="trainer")
    delivery = Delivery(device=torch.device("cpu"), bucket_bytes=1024, timeout_s=60.0)
    weights = {"w": torch.full((1000,), 3.0)}
    assert push_tensors(delivery, [engine], 1, weights).transport == "gloo"
    assert double.values == [3.0, 3.0]
    with pytest.raises(
        WeightSyncError, match=r"VersionError: .*begin_update: version 1 of model is offered, and version 1"
    ):
        push_tensors(delivery, [engine], 1, weights)
    delivery.close()

    async def ask() -> None:
        assert await engine.version() == 1
        assert await engine.receivers() == 2
        completions = await engine.generate([5, 6], Sampling(2, 0.5, (9,), seed=4), n=2)
        assert completions == [Completion((7, 8), (-0.5, -0.5), "length", 1, 1)] * 2
        assert await engine.logprobs([5, 6, 7]) == [-6.0, -7.0]
        with pytest.raises(EngineError, match=r"vLLM at 127.*generate: the prompt is too long"):
            await engine.generate([5], Sampling(101))
        with pytest.raises(EngineError, match=r"unknown adapter 'a'; loaded: none"):
            await engine.generate([5], Sampling(1), adapter="a")
        await engine.close()
        assert (await engine.info())["owner"] is None

    asyncio.run(ask())
    params = double.requests[0]
    assert (params.n, params.max_tokens, params.temperature, params.stop_token_ids, params.seed) == (2, 2, 0.5, [9], 4)


def test_wrong_key_and_wrong_server_raise_engine_errors(address: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT was expected"):
        VllmEngine("localhost:8000", key=KEY)
    with pytest.raises(EngineError, match=r"status 401, not signed: .*the signature is wrong"):
        asyncio.run(VllmEngine(address, key=generate_key()).info())
    with pytest.raises(EngineLostError, match=r"vLLM at 127\.0\.0\.1:1: info"):
        asyncio.run(client("http://127.0.0.1:1").info())
    with pytest.raises(EngineError, match="its workers are on cpu, not on npu"):
        asyncio.run(VllmAscendEngine(address, key=KEY).begin_update(None))  # type: ignore[arg-type]


def test_controller_process_claims_and_releases_the_server(address: str, tmp_path: Path) -> None:
    published = tmp_path / "controller.json"
    command = [sys.executable, "-m", "megascend.apps.rl.rollout.controller", address, "--publish", str(published)]
    environment = {**os.environ, ENVIRONMENT: SECRET, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        assert program.stdout.readline().startswith("rollout controller at 127.0.0.1:")
        engine = ControllerEngine(published, KEY, owner="trainer")

        async def use() -> None:
            assert await engine.receivers() == 2
            assert (await engine.generate([5], Sampling(1)))[0].tokens == (6,)
            async with engine.paused(60):
                assert (await client(address).info())["paused"]
            with pytest.raises(EngineError, match=r"vLLM at 127.*generate: the prompt is too long"):
                await engine.generate([5], Sampling(101))
            await engine.close()

        asyncio.run(use())
        program.send_signal(signal.SIGTERM)
        _, log = program.communicate(timeout=60)
    finally:
        program.kill()
        program.wait()
    assert program.returncode == 128 + signal.SIGTERM
    assert SECRET not in log
    assert asyncio.run(client(address).info())["owner"] is None


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_routed_experts_of_prompt_and_response_arrive_exactly(address: str, double: SamplingEngine, dtype: str) -> None:
    double.vllm_config.model_config.enable_return_routed_experts = True
    # Three prompt tokens and four sampled ones, the last of which is never computed.
    double.experts = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (6, 5, 2)).astype(dtype)

    async def ask() -> tuple[list[Completion], list[Completion]]:
        engine = client(address)
        return (
            await engine.generate([5, 6, 7], Sampling(4, routed_experts=True), n=2),
            await engine.generate([5, 6, 7], Sampling(4)),
        )

    replayed, plain = asyncio.run(ask())
    assert [completion.routed_experts for completion in plain] == [None]
    for completion in replayed:
        assert completion.routed_experts is not None
        numbers = completion.routed_experts.numbers()
        assert numbers.dtype == np.dtype(dtype)
        assert np.array_equal(numbers, double.experts)


def test_an_engine_without_routed_experts_refuses_to_replay(address: str, double: SamplingEngine) -> None:
    async def ask() -> None:
        await client(address).generate([5, 6, 7], Sampling(4, routed_experts=True))

    with pytest.raises(UnsupportedCallError, match="start it with --enable-return-routed-experts"):
        asyncio.run(ask())
    double.vllm_config.model_config.enable_return_routed_experts = True
    with pytest.raises(
        EngineError, match="routed experts of none tokens; a prompt of 3 and a response of 4 tokens have 6"
    ):
        asyncio.run(ask())
    double.experts = np.zeros((7, 5, 2), np.uint8)
    with pytest.raises(
        EngineError, match="routed experts of 7 tokens; a prompt of 3 and a response of 4 tokens have 6"
    ):
        asyncio.run(ask())
    double.experts = np.zeros((6, 5, 2), np.uint8)
    with pytest.raises(UnsupportedCallError, match="returned 0 for all routed experts"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {"shape": [2, 2], "dtype": "uint8", "data": ""},
        {"shape": [1, 1, 2], "dtype": "int64", "data": "AAA="},
        {"shape": [1, 1, 2], "dtype": "uint16", "data": "AAA="},
        {"shape": [1, 1, 2], "dtype": "uint8", "data": "not base64"},
    ],
)
def test_malformed_routed_experts_raise_wire_error(fields: Any) -> None:
    with pytest.raises(WireError, match="routed experts"):
        RoutedExperts.from_json(fields)


def test_likeliest_tokens_come_by_rank_without_the_sequences_own(address: str) -> None:
    top = asyncio.run(client(address).top_logprobs([5, 6, 7], 2))
    assert top == TopLogprobs((-6.0, -7.0), ((91, 92),) * 2, ((-0.5, -1.0),) * 2)


def test_allowed_tokens_are_those_with_a_probability(address: str, double: SamplingEngine) -> None:
    double.vllm_config.model_config.logprobs_mode = "processed_logprobs"
    sampling = Sampling(2, top_k=3, top_p=0.9)
    (completion,) = asyncio.run(client(address).generate([5, 6], sampling))
    assert completion == Completion((7, 8), (-0.5, -0.5), "length", 0, 0, allowed=((3, 7), (3, 8)))
    request = double.requests[-1]
    assert (request.top_k, request.top_p, request.logprobs) == (3, 0.9, 35)
    double.allowed = {}
    with pytest.raises(
        EngineError, match=r"the 1 tokens that vLLM reports as allowed have the probability 0.6065 together"
    ):
        asyncio.run(client(address).generate([5, 6], sampling))


@pytest.mark.parametrize(
    ("mode", "sampling", "message"),
    [
        ("raw_logprobs", Sampling(2, top_k=3), "need --logprobs-mode processed_logprobs, .* it is raw_logprobs"),
        ("processed_logprobs", Sampling(2, top_p=0.5), "top_p needs top_k, which bounds"),
    ],
)
def test_truncation_whose_mask_is_unknown_is_refused(
    address: str, double: SamplingEngine, mode: str, sampling: Sampling, message: str
) -> None:
    double.vllm_config.model_config.logprobs_mode = mode
    with pytest.raises(UnsupportedCallError, match=message):
        asyncio.run(client(address).generate([5, 6], sampling))
