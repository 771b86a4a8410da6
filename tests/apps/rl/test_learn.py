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
from megascend.apps.rl.learn import averaged, corrected, learn, objective_loss, step_samples
from megascend.apps.rl.records import push_figures
from megascend.apps.rl.rollout.group import Trajectory, TrajectoryGroup
from megascend.config.rl import Objective
from megascend.sync.push import PushResult
from megascend.testing import run_distributed, write_tiny_checkpoint
from megascend.training.batch.loss import LossInputs
from support.forked_programs import run_forked
from support.gradients import step_gradients
from support.objective_formulas import Formula, reference
from weightwire.engine import RoutedExperts

pytestmark = pytest.mark.usefixtures("megatron_imported")
WORKER = Path(__file__).with_name("gradients_without_megatron.py")
VOCABULARY = 120
FP32_BOUND = 2e-5
"""Of engines in fp32, relative to float64: 6e-6 is the largest that was seen, in a norm's gradient, which cancels."""


LENGTH = 9
"""Longest response."""
CAP = 1.5


def recorded(seed: int = 0) -> list[TrajectoryGroup]:
    """Draw groups as from an engine: log-probabilities that differ from the trainer's, several lengths and versions."""
    draw = random.Random(seed)
    groups = []
    for number in range(3):
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 5)))
        responses = []
        for index in range(4):
            tokens = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, LENGTH)))
            logprobs = tuple(-round(1024 * draw.uniform(2.5, 8.0)) / 1024 for _ in tokens)  # exact in fp32
            # Every second one has several turns: what an environment wrote before the last token is not learned.
            mask = (*(draw.random() < 0.5 for _ in tokens[1:]), True) if index % 2 else None
            logprobs = tuple(value * (mask is None or mask[i]) for i, value in enumerate(logprobs))
            reason = "length" if index == number else "stop"
            responses.append(Trajectory(prompt, tokens, logprobs, draw.random(), reason, number, number, mask))
        groups.append(TrajectoryGroup(number, tuple(responses)))
    return groups


NONE: dict[str, Any] = {"correction": "none"}
CASES: dict[str, tuple[dict[str, Any], Formula]] = {
    "grpo": ({"preset": "grpo"}, Formula(average="responses")),
    "dr_grpo": ({"preset": "dr_grpo"}, Formula(normalised="none", average="fixed", length=LENGTH)),
    "dapo": ({"preset": "dapo", "overlong_share": 0.5}, Formula(high=1.28, cache=4.5, length=LENGTH)),
    "dapo, filtered": (
        {"preset": "dapo", "drop_truncated": True},
        Formula(high=1.28, cache=1.8, length=LENGTH, filtered=True),
    ),
    "gspo": ({"preset": "gspo"}, Formula("gspo", 1 - 3e-4, 1 + 4e-4, average="responses")),
    "cispo": ({"preset": "cispo"}, Formula("cispo", 0.0, 5.0)),
    "reinforce++": ({"preset": "reinforce++"}, Formula(baseline="step", normalised="step", average="responses")),
    "reinforce++, baseline": (
        {"preset": "reinforce++", "advantages": "reinforce++_baseline"},
        Formula(normalised="step", average="responses"),
    ),
    "rloo": (
        {"preset": "rloo"},
        Formula("importance_sampling", baseline="others", normalised="none", average="sums", cap=CAP),
    ),
    "dual clip": ({"preset": "grpo", "dual_clip": 1.7}, Formula(dual=1.7, average="responses")),
    "ppo": (NONE, Formula()),
    "ppo, truncated": ({"average": "responses"}, Formula(average="responses", cap=CAP)),
    "importance sampling": (
        NONE | {"loss": "importance_sampling", "average": "fixed", "drop_truncated": True},
        Formula("importance_sampling", average="fixed", length=LENGTH, filtered=True),
    ),
    "importance sampling, truncated": (
        {"loss": "importance_sampling"},
        Formula("importance_sampling", cap=CAP),
    ),
    "cispo, filtered": (
        NONE | {"loss": "cispo", "average": "responses", "drop_truncated": True},
        Formula("cispo", average="responses", filtered=True),
    ),
    "gspo, sums": (NONE | {"loss": "gspo", "average": "sums"}, Formula("gspo", 1 - 3e-4, 1 + 4e-4, average="sums")),
    "dro": (NONE | {"loss": "dro"}, Formula("dro")),
    "stable_reinforce": (
        NONE | {"loss": "stable_reinforce", "average": "sums"},
        Formula("stable_reinforce", high=2.0, average="sums"),
    ),
    "stable_reinforce, truncated earlier": (
        NONE | {"loss": "stable_reinforce", "loss_settings": {"max_ratio": 1.1}},
        Formula("stable_reinforce", high=1.1),
    ),
}
"""Settings of an objective, and what they must compute."""
ON_RANKS = ["grpo", "dr_grpo", "dapo, filtered", "gspo", "reinforce++", "rloo"]
"""Every average, every loss whose value depends on several tokens, and what is computed over all responses of a step."""
SETTINGS = {"cap": CAP, "length": LENGTH}
Computed = tuple[float, dict[str, torch.Tensor]]
"""Loss, and gradients by the parameters' names."""


@torch.no_grad()
def mean_entropy(model: Any, groups: list[TrajectoryGroup]) -> float:
    """Compute the mean entropy of a model of transformers at the sampled tokens."""
    entropies = []
    for response in (response for group in groups for response in group.trajectories):
        logits = model(torch.tensor([[*response.prompt_tokens, *response.tokens]])).logits[0].double()
        rows = logits[len(response.prompt_tokens) - 1 : -1][torch.tensor(response.mask)]
        entropies += torch.distributions.Categorical(logits=rows).entropy().tolist()
    return sum(entropies) / len(entropies)


def learned_tokens(groups: list[TrajectoryGroup], filtered: bool) -> int:
    responses = [response for group in groups for response in group.trajectories]
    return sum(part.sampled_tokens for part in responses if not (filtered and part.finish_reason == "length"))


@pytest.fixture(scope="module")
def exact_model(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)


@pytest.fixture(scope="module")
def expected(exact_model: Any) -> dict[str, Computed]:
    """Compute loss and gradients of every case with transformers, in float64."""
    results = {}
    for case, (_, formula) in CASES.items():
        exact_model.zero_grad()
        loss, tokens = reference(exact_model, recorded(), formula)
        results[case] = loss, {name: parameter.grad.clone() for name, parameter in exact_model.named_parameters()}
        assert all(gradient.abs().max() > 0 for gradient in results[case][1].values()), case
        if formula.cap == math.inf and formula.loss in ("ppo", "cispo"):
            # The trajectories reach every bound, with advantages of both signs.
            for sign in (1, -1):
                ratios = tokens[0][tokens[1] == sign]
                assert float(ratios.min()) < formula.low or formula.low == 0
                assert float(ratios.max()) > min(formula.high, formula.dual)
    return results


def assert_close(case: str, computed: Computed, exact: Computed, bound: float) -> None:
    """Compare a loss and every gradient, in parts of the largest entry of each parameter's."""
    loss, gradients = computed
    assert loss == pytest.approx(exact[0], rel=bound, abs=bound), case
    assert gradients.keys() >= exact[1].keys()
    for name, gradient in exact[1].items():
        largest = float((gradients[name].double() - gradient).abs().max())
        assert largest <= bound * float(gradient.abs().max()), (case, name, largest)


@pytest.mark.parametrize("case", CASES)
def test_objectives_equal_their_formulas_in_float64(case: str, exact_model: Any, expected: dict[str, Computed]) -> None:
    """Call the loss of a step on its samples, all in one batch, with the log-probabilities of transformers."""
    objective, groups = Objective(**CASES[case][0], **SETTINGS), recorded()
    exact_model.zero_grad()
    samples = step_samples(groups, objective)
    logprobs = [
        exact_model(sample.input_ids[None]).logits[0].log_softmax(-1).gather(1, sample.target_ids[:, None])[:, 0]
        for sample in samples
    ]
    if objective.correction == "truncated":
        samples = [corrected(sample, values.detach(), CAP) for sample, values in zip(samples, logprobs, strict=True)]
    index = torch.arange(len(samples)).repeat_interleave(torch.tensor([len(sample) for sample in samples]))
    weights = torch.cat([sample.weights for sample in samples]).double()
    inputs = LossInputs(
        targets=torch.cat([sample.target_ids for sample in samples]),
        weights=weights,
        sample=index,
        sample_count=len(samples),
        pairs=torch.zeros(0, 2, dtype=torch.int64),
        reduce_context=lambda values: values,
        advantages=torch.cat([sample.advantages for sample in samples]).double(),
        old_logprobs=torch.cat([sample.old_logprobs for sample in samples]).double(),
    )
    loss = averaged(objective_loss(objective), groups, objective)
    assert loss.divisor is not None
    values = loss(torch.cat(logprobs), inputs)[0]
    total = torch.where(weights > 0, values * weights, 0.0).sum() / loss.divisor
    total.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in exact_model.named_parameters()}
    assert_close(case, (float(total.detach()), gradients), expected[case], 1e-6)


@pytest.mark.parametrize(("engine", "ranks", "cases"), [("single", 1, [*CASES]), ("fsdp", 2, ON_RANKS)])
def test_gradients_equal_plain_pytorch(
    engine: str,
    ranks: int,
    cases: list[str],
    checkpoint: Path,
    tmp_path: Path,
    exact_model: Any,
    expected: dict[str, Computed],
) -> None:
    """Use engines without patches, in a separate process, so that accumulated gradients can be read."""
    groups = recorded()
    (tmp_path / "groups.json").write_text(json.dumps([group.to_json() for group in groups]), encoding="utf-8")
    settings = [CASES[case][0] | SETTINGS for case in cases]
    job = [checkpoint, tmp_path / "groups.json", json.dumps(settings), engine, ranks, tmp_path / "result"]
    completed = run_forked(WORKER, *job, timeout_s=240)
    assert completed.returncode == 0, completed.stderr[-4000:]
    for case, result in zip(cases, torch.load(tmp_path / "result", weights_only=True), strict=True):
        assert_close(case, (result["loss"], result["gradients"]), expected[case], FP32_BOUND)
        if not CASES[case][1].filtered:
            assert result["entropy"] == pytest.approx(mean_entropy(exact_model, groups), abs=1e-5)
        assert result["tokens"] == learned_tokens(groups, CASES[case][1].filtered)
        assert 0 < result["truncated"] < result["tokens"]


@pytest.mark.nightly_cases("TP2", "DP2")  # covered: CP2; two ranks of fsdp; the losses in engines/step/test_step.py
@pytest.mark.parametrize(
    "parallel",
    [megascend.Parallel(), megascend.Parallel(tensor=2), megascend.Parallel(context=2)],
    ids=["DP2", "TP2", "CP2"],
)
def test_gradients_on_ranks_equal_plain_pytorch(
    parallel: megascend.Parallel, checkpoint: Path, exact_model: Any, expected: dict[str, Computed]
) -> None:
    """Measure as well: the mean entropy, and the tokens that all ranks have counted."""

    def on_rank() -> dict[str, tuple[Computed, float, float | None, int]]:
        batching = megascend.Batching(micro_batch_tokens=24)  # several micro batches a rank
        adam = megascend.Adam(lr=0.0, weight_decay=0.0, distributed=False)  # every rank has all reduced gradients
        results = {}
        with megascend.MegatronBackend(
            checkpoint, parallel, precision="fp32", optimizer=adam, batching=batching, self_check=False, timeout_s=60
        ) as backend:
            for case in ON_RANKS:
                objective, learned = Objective(**CASES[case][0], **SETTINGS), []
                gradients = step_gradients(
                    backend,
                    lambda chosen=objective, results=learned: results.append(learn(backend, recorded(), chosen)),
                )
                assert learned[0].result.micro_batches > 1
                computed = learned[0].result.loss, gradients.values
                results[case] = computed, gradients.norm, learned[0].entropy, learned[0].mismatch.tokens
        return results

    exact_entropy = mean_entropy(exact_model, recorded())
    for results in run_distributed(on_rank, 2, init=False, timeout_s=200):
        for case, (computed, norm, entropy, tokens) in results.items():
            assert_close(case, computed, expected[case], FP32_BOUND)
            exact = torch.cat([gradient.flatten() for gradient in expected[case][1].values()]).norm()
            assert norm == pytest.approx(float(exact), rel=FP32_BOUND), case
            if not CASES[case][1].filtered:
                assert entropy == pytest.approx(exact_entropy, abs=1e-5)
            assert tokens == learned_tokens(recorded(), CASES[case][1].filtered)


def test_a_step_of_truncated_responses_learns_nothing(checkpoint: Path) -> None:
    cut = [
        replace(group, trajectories=tuple(replace(response, finish_reason="length") for response in group.trajectories))
        for group in recorded()
    ]

    def on_rank() -> tuple[float, float, int]:
        with megascend.MegatronBackend(checkpoint, precision="fp32", self_check=False, timeout_s=60) as backend:
            learned = learn(backend, cut, Objective(drop_truncated=True))
            return learned.result.loss, backend.optimizer_step().grad_norm, learned.result.tokens

    assert run_distributed(on_rank, 2, init=False) == [(0.0, 0.0, 0)] * 2


def test_samples_have_advantages_only_on_responses() -> None:
    group = recorded()[0]
    for sample, response in zip(step_samples([group], Objective(advantages="rloo")), group.trajectories, strict=True):
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


def test_samples_carry_the_experts_of_every_input_token() -> None:
    numbers = np.random.default_rng(0).integers(0, 8, (5, 4, 2)).astype("uint8")
    experts = RoutedExperts.of(numbers)
    responses = tuple(
        Trajectory((4, 5, 6), (7, 8, 9), (-1.0, -2.0, -3.0), reward, "stop", 0, 0, routed_experts=experts)
        for reward in (0.0, 1.0)
    )
    group = TrajectoryGroup.from_json(json.loads(json.dumps(TrajectoryGroup(0, responses).to_json())))
    assert group.trajectories == responses
    for sample in step_samples([group], Objective()):
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
    for sample in step_samples([group], Objective()):
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


def test_updates_of_one_step_are_added_up():
    def pushed(payload: int, share: float, paused: float) -> PushResult:
        return PushResult(1, 100, 1, ("engine",), {"commit": paused}, payload=payload, share=share)

    # An engine that failed got its weights after the others, completely: 50 of 200 bytes, then 200.
    figures = push_figures([pushed(50, 0.25, 0.1), pushed(200, 1.0, 0.3)])
    assert figures == {"sync_bytes": 250, "sync_share": 0.625, "pause_s": 0.3}
    assert push_figures([]) == {"sync_bytes": 0, "sync_share": None, "pause_s": 0.0}
