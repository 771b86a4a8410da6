"""Sampling requests to vLLM servers: bodies and answers, choice of the server, and failures.

A double of a vLLM server stands in; tests/real_vllm/test_serve_sampling.py has the real one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from megascend.apps.sampling.request import SampledSequence, SampleRequest, SampleResult, SamplingParams
from megascend.apps.serve.errors import Failure
from megascend.apps.serve.samplers.vllm import Probe, Servers, VllmSampling, check
from megascend.apps.serve.samplers.vllm_server import (
    RefusedError,
    UnknownModelError,
    VllmServer,
    body_of,
    result_of,
)
from megascend.apps.serve.scheduler.commands import Create, Outcome, Remove, Respond
from megascend.errors import ConfigError, EngineLostError

REQUEST = SampleRequest(
    [5, 6, 7],
    SamplingParams(2, 0.7, 0.9, 40, seed=11, stop=("END", 3)),
    "p1",
    2,
    prompt_logprobs=True,
    topk_prompt_logprobs=2,
    topk_logprobs=2,
)


def choice(index: int, tokens: list[int], finish_reason: str) -> dict[str, Any]:
    """Build a choice as vLLM 0.32 does: the sampled token is the likeliest, token 9 the second."""
    top = [{f"token_id:{token}": -0.5, "token_id:9": -1.5, "token_id:8": -2.5} for token in tokens]
    prompt = [
        None,
        *(
            {str(token): {"logprob": -3.25, "rank": 9}, "1": {"logprob": -0.1}, "2": {"logprob": -0.2}}
            for token in (6, 7)
        ),
    ]
    return {
        "index": index,
        "finish_reason": finish_reason,
        "token_ids": tokens,
        "prompt_logprobs": prompt,
        "logprobs": {"token_logprobs": [-0.5] * len(tokens), "top_logprobs": top},
    }  # fmt: skip


def test_every_setting_is_sent_so_that_the_server_adds_none() -> None:
    body = body_of(REQUEST, "a model", ends=[2])
    assert body["model"] == "a model"
    assert (body["prompt"], body["n"], body["max_tokens"]) == ([5, 6, 7], 2, 2)
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.7, 0.9, 40, 0.0)
    assert (body["repetition_penalty"], body["presence_penalty"], body["frequency_penalty"]) == (1.0, 0.0, 0.0)
    assert (body["stop"], body["stop_token_ids"], body["include_stop_str_in_output"]) == (["END"], [2, 3], True)
    assert (body["logprobs"], body["prompt_logprobs"], body["return_token_ids"]) == (2, 2, True)
    plain = body_of(SampleRequest([1], SamplingParams(0)), "m")
    assert plain["max_tokens"] == 1, "it refuses 0"
    assert plain["top_k"] == -1
    assert "seed" not in plain
    assert "prompt_logprobs" not in plain


def test_answers_are_read_by_token_ids() -> None:
    result = result_of(REQUEST, {"choices": [choice(1, [8, 3], "stop"), choice(0, [4, 4], "length")]})
    assert [sample.tokens for sample in result.samples] == [(4, 4), (8, 3)]
    assert [sample.stop_reason for sample in result.samples] == ["length", "stop"]
    assert result.samples[0].logprobs == (-0.5, -0.5)
    assert result.samples[0].topk_logprobs == (((4, -0.5), (9, -1.5)), ((4, -0.5), (9, -1.5)))
    assert result.prompt_logprobs == (None, -3.25, -3.25)
    assert result.topk_prompt_logprobs == (None, ((1, -0.1), (2, -0.2)), ((1, -0.1), (2, -0.2)))
    no_tokens = result_of(SampleRequest([1], SamplingParams(0)), {"choices": [choice(0, [4], "length")]})
    assert no_tokens.samples == (SampledSequence((), (), "length"),)


@pytest.mark.parametrize(
    "broken",
    [
        {"choices": [choice(0, [4], "stop")]},
        {"choices": [choice(0, [4], "stop"), choice(1, [4], "abort")]},
        {"choices": [choice(0, [4], "stop"), choice(1, [4], "stop") | {"token_ids": [4, 5]}]},
        {"choices": [choice(0, [4], "stop") | {"prompt_logprobs": [None]}, choice(1, [4], "stop")]},
    ],
    ids=["too few", "aborted", "fewer numbers than tokens", "another prompt"],
)
def test_an_answer_that_does_not_fit_is_none(broken) -> None:
    with pytest.raises(ValueError, match=r"responses|finish_reason|log-probabilities"):
        result_of(REQUEST, broken)


NUMBERS = itertools.count()


class Double:
    """A vLLM server in memory: its answers are one token each, number ``token``."""

    def __init__(self, token: int) -> None:
        self.name, self.token = f"vLLM {token}", token
        self.loaded: dict[str, str] = {}
        self.calls: list[str] = []
        self.lost = False
        self.gate: asyncio.Event | None = None
        self.logprobs = (None, -1.0, -2.0)
        self.listed = [{"id": "base", "parent": None, "max_model_len": 64}]

    async def models(self) -> list[dict[str, Any]]:
        return self.listed

    async def check_health(self) -> None:
        if self.lost:
            raise EngineLostError(f"{self.name}: connection refused")

    async def load_adapter(self, name: str, directory: str) -> None:
        self.calls.append("load")
        await asyncio.sleep(0)
        if directory.endswith("bad"):
            raise RefusedError("rank 64 is more than max_lora_rank 16")
        self.loaded[name] = directory

    async def unload_adapter(self, name: str) -> None:
        self.calls.append("unload")
        self.loaded.pop(name, None)

    async def sample(self, request: SampleRequest, model: str, ends=()) -> SampleResult:
        self.calls.append("sample")
        if self.gate is not None:
            await self.gate.wait()
        if self.lost:
            raise EngineLostError(f"{self.name}: connection refused")
        if model not in self.loaded:  # the model itself is not asked: see Servers.base
            raise UnknownModelError(f"{self.name}: no model {model}")
        return SampleResult((SampledSequence((self.token,), (-0.5,), "length"),), self.logprobs)


def run(doubles: list[Double], work: Callable[[VllmSampling, list[Outcome]], Any]) -> list[Outcome]:
    """Return the outcomes after ``work`` once no task is ready."""

    async def main() -> list[Outcome]:
        outcomes: list[Outcome] = []
        sampling = VllmSampling(Servers(doubles, f"s{next(NUMBERS)}", "/storage/null"), outcomes.extend, 100, 64)  # type: ignore
        await work(sampling, outcomes)
        await quiet()
        return outcomes

    return asyncio.run(main())


async def quiet() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def respond(number: int, adapter: str | None = None) -> Respond:
    return Respond(number, adapter or "base", SampleRequest([1, 2, 3], SamplingParams(1), adapter))


def token_of(outcomes: list[Outcome], number: int) -> int:
    (outcome,) = [candidate for candidate in outcomes if candidate.number == number]
    assert outcome.error is None, outcome.error
    return outcome.value.samples[0].tokens[0]


def test_an_adapter_is_loaded_where_it_is_sampled_from_and_once() -> None:
    first, second = Double(1), Double(2)

    async def work(sampling, outcomes) -> None:
        sampling.submit(Create(1, "p1", None, "/storage/a", False))
        for number in range(2, 6):
            sampling.submit(respond(number, "p1"))
        await quiet()
        assert sorted(token_of(outcomes, number) for number in range(2, 6)) == [1, 1, 2, 2], "the least busy one"
        assert first.calls.count("load") == second.calls.count("load") == 1
        assert list(first.loaded.values()) == ["/storage/a"]
        sampling.submit(Remove(6, "p1"))

    outcomes = run([first, second], work)
    assert {outcome.number for outcome in outcomes} == set(range(1, 7))
    assert not first.loaded
    assert not second.loaded


def test_adapter_names_are_unique_to_a_server() -> None:
    """Avoid the name "p1", which an engine may still have from a previous server."""
    double = Double(1)

    async def work(sampling, outcomes) -> None:
        sampling.submit(Create(1, "p1", None, "/storage/a", False))
        sampling.submit(respond(2, "p1"))
        await quiet()

    run([double], work)
    run([double], work)
    assert len(double.loaded) == 2


def test_another_server_answers_for_one_that_is_lost_and_one_that_came_back_loads_again() -> None:
    first, second = Double(1), Double(2)

    async def work(sampling, outcomes) -> None:
        sampling.submit(Create(1, "p1", None, "/storage/a", False))
        first.lost = True
        sampling.submit(respond(2, "p1"))
        await quiet()
        assert token_of(outcomes, 2) == 2
        first.lost, second.lost = False, True
        first.loaded.clear()  # started again
        sampling.submit(respond(3, "p1"))
        await quiet()
        assert token_of(outcomes, 3) == 1
        first.lost = True
        sampling.submit(respond(4))

    (last,) = [outcome for outcome in run([first, second], work) if outcome.number == 4]
    assert isinstance(last.error, EngineLostError)
    failure = Failure.of(last.error)
    assert failure.category == "server"
    assert "connection refused" in failure.message


def test_refused_adapter_fails_only_its_requests() -> None:
    async def work(sampling, outcomes) -> None:
        sampling.submit(Create(1, "p1", None, "/storage/bad", False))
        sampling.submit(respond(2, "p1"))
        sampling.submit(respond(3))

    outcomes = {outcome.number: outcome for outcome in run([Double(7)], work)}
    assert isinstance(outcomes[2].error, ConfigError)
    assert "max_lora_rank" in str(outcomes[2].error)
    assert outcomes[3].value.samples[0].tokens == (7,)


def test_base_model_is_sampled_with_a_null_adapter() -> None:
    double = Double(1)

    async def work(sampling, outcomes) -> None:
        sampling.submit(respond(1))
        sampling.submit(respond(2))
        await quiet()
        assert [token_of(outcomes, number) for number in (1, 2)] == [1, 1]
        assert list(double.loaded.values()) == ["/storage/null"]
        await sampling.close()
        assert not double.loaded

    run([double], work)


def test_cancelled_request_is_given_up() -> None:
    double = Double(1)

    async def work(sampling, outcomes) -> None:
        double.gate = asyncio.Event()
        sampling.submit(respond(1))
        await quiet()
        assert sampling.cancel(1)
        await quiet()
        assert not sampling.cancel(1)

    (outcome,) = run([double], work)
    assert "cancelled" in str(outcome.error)


def test_a_server_with_another_model_is_refused() -> None:
    def checked(double: Double, expected=(-1.0, -2.0)) -> None:
        asyncio.run(check(Servers([double], "s", "/storage/null"), Probe((1, 2, 3), expected), 64))  # type: ignore[list-item]

    checked(Double(1))
    with pytest.raises(ConfigError, match=r"vLLM 1 does not have the model.*differ by 1\.5"):
        checked(Double(1), (-2.0, -4.0))
    nan = Double(1)
    nan.logprobs = (None, float("nan"), -2.0)
    with pytest.raises(ConfigError, match="does not have the model"):
        checked(nan)
    two = Double(1)
    two.listed = [{"id": "a"}, {"id": "b"}, {"id": "adapter", "parent": "a"}]
    with pytest.raises(ConfigError, match="serves 2 models"):
        checked(two)


@pytest.mark.parametrize("address", ["https://host:1", "host:1", "http://host", "http://host:1/v1"])
def test_an_address_that_is_none(address) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        VllmServer(address)
