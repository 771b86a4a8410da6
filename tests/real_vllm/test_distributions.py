"""Distributions from a real vLLM on the CPU: a teacher's likeliest tokens, and the tokens that sampling allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megascend.apps.rl.learn import learn
from megascend.apps.rl.rollout.group import Trajectory, TrajectoryGroup
from megascend.config.rl import Objective
from megascend.testing import run_distributed
from megascend.testing.parity import Case, case_backend
from megascend.testing.tiny_models import write_tiny_checkpoint
from support.vllm_server import TOKENS, Server
from weightwire.engine import Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly, pytest.mark.usefixtures("megatron_imported")]

BOUND = 1e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Heads of 32, as vLLM's attention on the CPU needs.
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", head_dim=32)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(checkpoint, tmp_path_factory.mktemp("server"))
    yield server
    server.process.close()


def logprobs_of(checkpoint: Path, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return transformers' log-probabilities [tokens - 1, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return (model(torch.tensor([tokens])).logits[0, :-1].double() / temperature).log_softmax(-1)


def test_likeliest_tokens_are_those_of_transformers(server: Server, checkpoint: Path) -> None:
    """More than vLLM's own limit of 20."""
    top = asyncio.run(server.engine().top_logprobs(TOKENS, 40))
    expected = logprobs_of(checkpoint, TOKENS)
    target = expected.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(top.logprobs, dtype=torch.float64), target, atol=BOUND, rtol=0)
    values = torch.tensor(top.top_logprobs, dtype=torch.float64)
    torch.testing.assert_close(values, expected.topk(40).values, atol=BOUND, rtol=0)
    torch.testing.assert_close(expected.gather(1, torch.tensor(top.ids)), values, atol=BOUND, rtol=0)


def test_seeded_prompts_of_more_tokens_than_a_step_takes_are_sampled(server: Server) -> None:
    """vLLM would compute one of them in two steps, which its generators for the CPU do not support."""
    prompts = [[first, *TOKENS[:30] * 4] for first in range(64)]

    async def sample() -> list[int]:
        calls = [server.engine().generate(prompt, Sampling(2, seed=number)) for number, prompt in enumerate(prompts)]
        return [len(completion.tokens) for [completion] in await asyncio.gather(*calls)]

    assert asyncio.run(sample()) == [2] * len(prompts)


def test_trainer_has_the_policy_that_vllm_sampled_from(server: Server, checkpoint: Path) -> None:
    sampling = Sampling(24, temperature=0.8, top_k=30, top_p=0.8, seed=5)
    completions = asyncio.run(server.engine().generate(TOKENS[:12], sampling, n=4))
    trajectories = []
    for number, completion in enumerate(completions):
        assert completion.allowed is not None
        expected = logprobs_of(checkpoint, [*TOKENS[:12], *completion.tokens], 0.8)[11:]
        for row, token, allowed, logprob in zip(
            expected, completion.tokens, completion.allowed, completion.logprobs, strict=True
        ):
            assert 1 <= len(allowed) <= 30
            assert sorted(allowed) == sorted(row.topk(len(allowed)).indices.tolist())
            assert logprob == pytest.approx(float(row[token] - row[list(allowed)].logsumexp(0)), abs=BOUND)
        trajectories.append(
            Trajectory(
                tuple(TOKENS[:12]),
                completion.tokens,
                completion.logprobs,
                float(number % 2),
                completion.finish_reason,
                0,
                0,
                temperature=0.8,
                allowed=completion.allowed,
            )
        )

    def on_rank() -> float:
        with case_backend(Case("single", micro_batch_tokens=100), checkpoint) as backend:
            learned = learn(backend, [TrajectoryGroup(0, tuple(trajectories))], Objective())
            assert learned.mismatch is not None
            return learned.mismatch.max_abs

    (largest,) = run_distributed(on_rank, 1, init=False, timeout_s=120)
    assert largest < BOUND
