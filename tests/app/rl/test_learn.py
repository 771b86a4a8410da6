"""Gradients of a step on recorded rollouts, against independent plain PyTorch and transformers."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megascend
from megascend.app.rl.learn import corrected, group_samples, learn
from megascend.config.rl import Objective
from megascend.rollout.group import Trajectory, TrajectoryGroup
from megascend.testing import run_distributed, write_tiny_checkpoint
from support.forked_programs import run_forked
from weightwire.engine import RoutedExperts

pytestmark = pytest.mark.usefixtures("megatron_imported")
WORKER = Path(__file__).with_name("single_gradients.py")
VOCABULARY = 120


def recorded(seed: int = 0) -> list[TrajectoryGroup]:
    """Draw groups as from an engine: log-probabilities that differ from the trainer's, several lengths and versions."""
    draw = random.Random(seed)
    groups = []
    for number in range(3):
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 5)))
        responses = []
        for index in range(4):
            tokens = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 7)))
            logprobs = tuple(-draw.uniform(3.5, 6.5) for _ in tokens)
            # Every second one has several turns: what an environment wrote before the last token is not learned.
            mask = (*(draw.random() < 0.5 for _ in tokens[1:]), True) if index % 2 else None
            logprobs = tuple(value * (mask is None or mask[i]) for i, value in enumerate(logprobs))
            responses.append(Trajectory(prompt, tokens, logprobs, draw.random(), "stop", number, number, mask))
        groups.append(TrajectoryGroup(number, tuple(responses)))
    return groups


def reference(model: Any, groups: list[TrajectoryGroup], loss: str, correction: str, average: str, cap: float) -> float:
    """Compute a step's loss, and its gradients in ``model``, from the formulas, one trajectory at a time."""
    terms, weights = [], []
    for group in groups:
        rewards = torch.tensor(group.rewards, dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for response, advantage in zip(group.trajectories, advantages, strict=True):
            ids = torch.tensor([[*response.prompt_tokens, *response.tokens]])
            logits = model(ids).logits[0].float()
            start = len(response.prompt_tokens)
            chosen = [(i, token) for i, token in enumerate(response.tokens) if response.mask[i]]
            now = torch.stack([logits[start + i - 1].log_softmax(-1)[token] for i, token in chosen])
            engine = torch.tensor([response.logprobs[i] for i, _ in chosen])
            old, factor = engine, torch.ones_like(engine)
            if correction == "truncated":
                old = now.detach()
                factor = torch.clamp(torch.exp(old - engine), max=cap)
            ratio, scaled = torch.exp(now - old), float(advantage) * factor
            if loss == "ppo":
                objective = torch.minimum(ratio * scaled, torch.clamp(ratio, 0.8, 1.2) * scaled)
            else:
                objective = ratio * scaled
            share = 1.0 if average == "tokens" else 1.0 / len(chosen)
            terms.append(-(objective * share).sum())
            weights.append(share * len(chosen))
    total = torch.stack(terms).sum() / sum(weights)
    total.backward()
    return float(total.detach())


CASES = [
    ("ppo", "none", "tokens"),
    ("ppo", "truncated", "responses"),
    ("importance_sampling", "none", "responses"),
    ("importance_sampling", "truncated", "tokens"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("rl") / "qwen3", "qwen3")


def test_gradients_equal_plain_pytorch(checkpoint: Path, tmp_path: Path) -> None:
    """Use the engine without patches, in a separate process, so that accumulated gradients can be read."""
    from transformers import AutoModelForCausalLM

    groups, cap = recorded(), 1.5
    (tmp_path / "groups.json").write_text(json.dumps([group.to_json() for group in groups]))
    job = [checkpoint, tmp_path / "groups.json", json.dumps(CASES), str(cap), tmp_path / "result"]
    completed = run_forked(WORKER, *job, timeout_s=240)
    assert completed.returncode == 0, completed.stderr[-4000:]
    for case, result in zip(CASES, torch.load(tmp_path / "result", weights_only=True), strict=True):
        expected: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        assert result["loss"] == pytest.approx(reference(expected, groups, *case, cap), abs=2e-6), case
        for name, parameter in expected.named_parameters():
            scale = float(parameter.grad.abs().max())
            assert float((result["gradients"][name] - parameter.grad).abs().max()) <= 1e-4 * scale + 1e-8, (case, name)
        assert result["tokens"] == sum(response.sampled_tokens for group in groups for response in group.trajectories)
        assert 0 < result["truncated"] < result["tokens"]


def test_samples_have_advantages_only_on_responses() -> None:
    group = recorded()[0]
    for sample, response in zip(group_samples(group, Objective(advantages="rloo")), group.trajectories, strict=True):
        prompt = len(response.prompt_tokens) - 1
        assert sample.weights.tolist() == [0.0] * prompt + [float(mark) for mark in response.mask]
        assert sample.target_ids[prompt:].tolist() == list(response.tokens)
        assert sample.old_logprobs[prompt:].tolist() == pytest.approx(list(response.logprobs))
        other_rewards = [member.reward for member in group.trajectories if member is not response]
        expected = response.reward - sum(other_rewards) / len(other_rewards)
        assert sample.advantages[prompt:].tolist() == pytest.approx(
            [expected * mark for mark in response.mask], abs=1e-6
        )
        assert not any(sample.advantages[:prompt].tolist())


def test_ranks_share_a_batch_and_agree_on_its_metrics(checkpoint: Path) -> None:
    groups = recorded(1)

    def on_rank(parallel: megascend.Parallel) -> tuple[float, float, Any]:
        with megascend.MegatronBackend(
            checkpoint, parallel, precision="fp32", self_check=False, timeout_s=60
        ) as backend:
            learned = learn(backend, groups, Objective())
            return learned.result.loss, backend.optimizer_step().grad_norm, learned.mismatch

    single = run_distributed(on_rank, 1, megascend.Parallel(), init=False)[0]
    for ranks, parallel in ((2, megascend.Parallel()), (2, megascend.Parallel(tensor=2))):
        for loss, norm, mismatch in run_distributed(on_rank, ranks, parallel, init=False):
            assert loss == pytest.approx(single[0], abs=1e-5)
            assert norm == pytest.approx(single[1], rel=1e-4)
            assert mismatch.tokens == single[2].tokens
            assert mismatch.max_abs == pytest.approx(single[2].max_abs, abs=1e-4)
            assert math.isclose(mismatch.kl_k3, single[2].kl_k3, rel_tol=1e-4)


def test_samples_carry_the_experts_of_every_input_token() -> None:
    numbers = np.random.default_rng(0).integers(0, 8, (5, 4, 2)).astype("uint8")
    experts = RoutedExperts.of(numbers)
    responses = tuple(
        Trajectory((4, 5, 6), (7, 8, 9), (-1.0, -2.0, -3.0), reward, "stop", 0, 0, routed_experts=experts)
        for reward in (0.0, 1.0)
    )
    group = TrajectoryGroup.from_json(json.loads(json.dumps(TrajectoryGroup(0, responses).to_json())))
    assert group.trajectories == responses
    for sample in group_samples(group, Objective()):
        assert sample.input_ids.tolist() == [4, 5, 6, 7, 8]  # the last sampled token is a target only
        assert torch.equal(sample.routed_experts, torch.from_numpy(numbers.astype("int16")))
        replayed = corrected(sample, torch.full((5,), -1.0), 2.0)
        assert torch.equal(replayed.routed_experts, sample.routed_experts)


def test_allowed_tokens_and_temperature_go_with_their_targets() -> None:
    """The tokens of an environment, between sampled ones, may be any of the vocabulary."""
    allowed = ((7, 8), (), (9,))
    response = Trajectory(
        (4, 5, 6),
        (7, 8, 9),
        (-1.0, 0.0, -3.0),
        1.0,
        "stop",
        0,
        0,
        (True, False, True),
        temperature=0.5,
        allowed=allowed,
    )
    responses = (response, replace(response, reward=0.0))
    group = TrajectoryGroup.from_json(json.loads(json.dumps(TrajectoryGroup(0, responses).to_json())))
    assert group.trajectories == responses
    for sample in group_samples(group, Objective()):
        for same in (sample, corrected(sample, torch.full((5,), -1.0), 2.0)):
            assert same.temperature == 0.5
            assert same.target_ids.tolist() == [5, 6, 7, 8, 9]
            assert same.allowed.tolist() == [[-1, -1], [-1, -1], [7, 8], [-1, -1], [9, -1]]


def test_rollout_experts_are_replayed_token_by_token(tmp_path: Path) -> None:
    """Take the choices of transformers, as an engine makes them: equal weights choose alike, so none changes a choice here."""
    checkpoint = write_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    groups = recorded()

    def route() -> list[list[Any]]:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

        def chosen(tokens: list[int]) -> Any:
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
            return torch.stack([layer.topk(2, dim=-1).indices for layer in logits], 1).to(torch.uint8).numpy()

        # The last sampled token is not computed.
        return [
            [chosen([*response.prompt_tokens, *response.tokens[:-1]]) for response in group.trajectories]
            for group in groups
        ]

    def with_experts(shift: int) -> list[TrajectoryGroup]:
        return [
            replace(
                group,
                trajectories=tuple(
                    replace(response, routed_experts=RoutedExperts.of((numbers + shift) % 4))
                    for response, numbers in zip(group.trajectories, choices, strict=True)
                ),
            )
            for group, choices in zip(groups, routes, strict=True)
        ]

    def on_rank() -> list[tuple[float, float | None]]:
        with megascend.MegatronBackend(checkpoint, precision="fp32", self_check=False, timeout_s=60) as backend:
            results = [learn(backend, batch, Objective()).result for batch in batches]
            return [(result.loss, result.metrics.get("router_replay_changed")) for result in results]

    (routes,) = run_distributed(route, 1, init=False)
    batches = [groups, with_experts(0), with_experts(1)]
    ((plain, absent), (equal, unchanged), (shifted, changed)) = run_distributed(on_rank, 1, init=False)[0]
    assert absent is None
    assert unchanged == 0.0
    assert equal == pytest.approx(plain, abs=1e-6)
    assert changed is not None
    assert changed > 0.4
    assert abs(shifted - plain) > 1e-4
