"""KL to a reference model: values and gradients against plain float64 PyTorch, its weights, resumption, refusals."""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megascend
from apps.rl import reference_programs
from megascend.apps.rl.learn import step_samples
from megascend.apps.rl.reference import ESTIMATORS, KL_WEIGHTS, ReferenceModel, check_reference, with_kl
from megascend.apps.rl.rollout.group import Trajectory, TrajectoryGroup
from megascend.apps.rl.set_up import check_objective
from megascend.config.rl import Objective, ReferenceSettings, RlConfig
from megascend.errors import ConfigError
from megascend.models.checkpoint_files.info import inspect_checkpoint
from megascend.testing import write_tiny_checkpoint
from megascend.training.batch.loss import LossInputs
from megascend.training.batch.losses import resolve
from support.forked_programs import run_forked
from support.rl_runs import SAMPLING_METRICS, TIMINGS, RecordedEngine, in_a_fork, rollouts, rows, run
from support.rl_runs import settings as loop_settings
from weightwire.engine import RoutedExperts

pytestmark = pytest.mark.usefixtures("megatron_imported")
VOCABULARY = 120
CASES = [
    (
        {"loss": "ppo", "correction": "truncated", "cap": 1.5},
        {"penalty": "loss", "estimator": "k2", "coefficient": 0.3},
    ),
    (
        {"loss": "importance_sampling", "correction": "none", "average": "responses"},
        {"penalty": "loss", "estimator": "k3", "coefficient": 0.2},
    ),
    (
        {"loss": "ppo", "correction": "truncated", "cap": 1.5},
        {"penalty": "reward", "estimator": "k1", "coefficient": 0.1},
    ),
    (
        {"loss": "ppo", "correction": "none", "advantages": "rloo"},
        {"penalty": "reward", "estimator": "k2", "coefficient": 0.1},
    ),
    (
        {"loss": "importance_sampling", "correction": "none", "advantages": "centered"},
        {"penalty": "reward", "estimator": "k3", "coefficient": 0.1},
    ),
]


def recorded(seed: int = 0) -> list[TrajectoryGroup]:
    """Draw groups as from an engine; every second trajectory has several turns."""
    draw = random.Random(seed)
    groups = []
    for number in range(3):
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 5)))
        responses = []
        for index in range(4):
            tokens = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 7)))
            mask = (*(draw.random() < 0.5 for _ in tokens[1:]), True) if index % 2 else None
            logprobs = tuple(-draw.uniform(4.3, 5.3) * (mask is None or mask[i]) for i in range(len(tokens)))
            responses.append(Trajectory(prompt, tokens, logprobs, draw.random(), "stop", number, number, mask))
        groups.append(TrajectoryGroup(number, tuple(responses)))
    return groups


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("reference") / "qwen3", "qwen3", seed=7)


def run_cases(
    folder: Path,
    engine: str,
    ranks: int,
    options: dict[str, Any],
    checkpoint: Path,
    cases: Any,
    lora: bool = False,
    groups: list[TrajectoryGroup] | None = None,
) -> list[Any]:
    values = [group.to_json() for group in groups or recorded()]
    (folder / "groups.json").write_text(json.dumps(values), encoding="utf-8")
    job = [engine, ranks, json.dumps(options), checkpoint, folder / "groups.json", json.dumps(cases)]
    job += ["lora" if lora else "full", folder / "result"]
    if engine == "megatron":  # its ranks are forks of this process, which has imported it
        reference_programs.main(*map(str, job))
    else:
        completed = run_forked(Path(reference_programs.__file__), *job, timeout_s=400)
        assert completed.returncode == 0, completed.stderr[-6000:]
    return torch.load(folder / "result", weights_only=True)


def double(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    model.config._experts_implementation = "eager"  # torch's grouped product has no float64
    return model


def target_logprobs(model: Any, response: Trajectory) -> torch.Tensor:
    """Return log-probabilities of all tokens after the first: [tokens - 1]."""
    ids = torch.tensor([*response.prompt_tokens, *response.tokens])
    return model(ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def estimate(name: str, difference: torch.Tensor) -> torch.Tensor:
    if name == "k1":
        return difference
    return difference**2 / 2 if name == "k2" else torch.exp(-difference) - 1 + difference


def plain_step(policy: Any, reference: Any, objective: Any, settings: Any) -> dict[str, Any]:
    """Compute a step's loss, its gradients in ``policy`` and the divergence from the formulas, a trajectory at a time."""
    terms, weights, differences = [], [], []
    for group in recorded():
        rows = []
        for response in group.trajectories:
            sampled = torch.tensor(response.mask)
            start = len(response.prompt_tokens) - 1
            now = target_logprobs(policy, response)[start:][sampled]
            with torch.no_grad():
                away = target_logprobs(reference, response)[start:][sampled]
            rows.append((now, away, torch.tensor(response.logprobs, dtype=torch.float64)[sampled]))
            differences.append((now - away).detach())
        rewards = torch.tensor(group.rewards, dtype=torch.float64)
        if settings["penalty"] == "reward":
            sums = [estimate(settings["estimator"], (now - away).detach()).sum() for now, away, _ in rows]
            rewards = rewards - settings["coefficient"] * torch.stack(sums)
        kind = objective.get("advantages", "grpo")
        advantages = rewards - rewards.mean()
        if kind == "grpo":
            advantages = advantages / (rewards.std() + 1e-6)
        elif kind == "rloo":
            advantages = advantages * len(rewards) / (len(rewards) - 1)
        for (now, away, engine), advantage in zip(rows, advantages, strict=True):
            old, factor = engine, torch.ones_like(engine)
            if objective["correction"] == "truncated":
                old = now.detach()
                factor = torch.clamp(torch.exp(old - engine), max=objective["cap"])
            ratio, scaled = torch.exp(now - old), advantage * factor
            values = ratio * scaled
            if objective["loss"] == "ppo":
                values = torch.minimum(values, torch.clamp(ratio, 0.8, 1.2) * scaled)
            values = -values
            if settings["penalty"] == "loss":
                values = values + settings["coefficient"] * factor * estimate(settings["estimator"], now - away)
            share = 1.0 / len(now) if objective.get("average") == "responses" else 1.0
            terms.append((values * share).sum())
            weights.append(share * len(now))
    loss = torch.stack(terms).sum() / sum(weights)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    difference = torch.cat(differences)
    return {
        "loss": float(loss.detach()),
        "gradients": gradients,
        "norm": math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values())),
        "divergence": [len(difference), float(difference.mean()), float(estimate("k3", difference).mean())],
    }


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_in_the_loss_equals_float64(name: str) -> None:
    """Compare value and gradient by the log-probabilities, also where the weight of a token is not 1."""
    draw = torch.Generator().manual_seed(3)
    fields = [torch.randn(9, generator=draw, dtype=torch.float64) for _ in range(5)]
    logprobs, old, away, advantages, weights = (values.requires_grad_(not index) for index, values in enumerate(fields))
    inputs = LossInputs(
        torch.zeros(9, dtype=torch.int64),
        torch.ones(9),
        torch.zeros(9, dtype=torch.int64),
        1,
        torch.empty(0, 2),
        lambda values: values,
        advantages=advantages,
        old_logprobs=old,
        ref_logprobs=away,
        extra={KL_WEIGHTS: weights},
    )
    loss = with_kl(resolve("importance_sampling"), name, 0.7)
    values, metrics = loss(logprobs, inputs)
    d, ratio = (logprobs - away).detach(), (logprobs - old).exp().detach()
    value = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[name]
    slope = {"k1": torch.ones_like(d), "k2": d, "k3": 1 - (-d).exp()}[name]
    torch.testing.assert_close(values.detach(), -ratio * advantages + 0.7 * weights * value, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    torch.testing.assert_close(gradient, -ratio * advantages + 0.7 * weights * slope, rtol=1e-12, atol=1e-12)
    assert "ratio" in metrics
    assert loss.requires == ("old_logprobs", "advantages", "ref_logprobs")


def test_expected_gradients_are_those_of_the_divergences() -> None:
    """Sum exactly over a vocabulary: k1 in the reward and k2 in the loss give KL(pi || ref), k3 in the loss KL(ref || pi)."""
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(11, generator=draw, dtype=torch.float64).requires_grad_()
    away = torch.randn(11, generator=draw, dtype=torch.float64).log_softmax(0)

    def gradient(value: Any) -> torch.Tensor:
        return torch.autograd.grad(value(logits.log_softmax(0)), logits)[0]

    def kl(log_p: torch.Tensor) -> torch.Tensor:
        return (log_p.exp() * (log_p - away)).sum()

    def in_loss(name: str) -> torch.Tensor:
        return gradient(lambda log_p: (log_p.exp().detach() * ESTIMATORS[name](log_p - away)).sum())

    def in_reward(name: str) -> torch.Tensor:
        return gradient(lambda log_p: ((log_p.exp() * ESTIMATORS[name](log_p - away)).detach() * log_p).sum())

    reverse, forward = gradient(kl), gradient(lambda log_p: (away.exp() * (away - log_p)).sum())
    torch.testing.assert_close(in_reward("k1"), reverse)
    torch.testing.assert_close(in_loss("k2"), reverse)
    torch.testing.assert_close(in_loss("k3"), forward)
    torch.testing.assert_close(in_loss("k1"), torch.zeros_like(reverse), atol=1e-12, rtol=0)
    # Near the reference, k2 and k3 in the reward lose the direction back to it, as the warning says.
    with torch.no_grad():
        logits.copy_(away + 1e-3 * torch.randn(11, generator=draw, dtype=torch.float64))
    reverse = gradient(kl)
    assert float((in_reward("k1") - reverse).norm()) < 1e-9
    assert all(float(in_reward(name).norm()) < 0.01 * float(reverse.norm()) for name in ("k2", "k3"))


def test_gradients_equal_plain_pytorch(checkpoint: Path, other: Path, tmp_path: Path) -> None:
    cases = [(objective, {**settings, "model": str(other)}, 0) for objective, settings in CASES]
    results = run_cases(tmp_path, "single", 1, {}, checkpoint, cases)
    for (objective, settings), result in zip(CASES, results, strict=True):
        expected = plain_step(double(checkpoint), double(other), objective, settings)
        assert result["loss"] == pytest.approx(expected["loss"], abs=2e-6), settings
        assert result["divergence"] == pytest.approx(expected["divergence"], rel=1e-5), settings
        for name, gradient in expected["gradients"].items():
            scale = float(gradient.abs().max())
            distance = float((result["gradients"][name] - gradient).abs().max())
            assert distance <= 1e-4 * scale + 1e-8, (objective, settings, name)


LAYOUTS = [
    ("qwen3", "megatron", 2, {"context": 2}),
]
# Covered: log-probabilities of each layout by engines/step/test_step.py, the adapter's reference with TP2 below, and weights that
# fsdp swaps by train/test_teacher_model.py.
NIGHTLY = [
    ("qwen3", "fsdp", 2, {}),
    ("qwen3", "megatron", 2, {"tensor": 2}),
    ("qwen3", "megatron", 2, {}),
    ("qwen3_moe", "megatron", 2, {"expert": 2}),
    ("qwen3", "megatron", 2, {"pipeline": 2}),
    ("qwen3", "megatron", 4, {"tensor": 2, "context": 2, "sequence": True}),
    ("qwen3", "megatron", 4, {"tensor": 2, "pipeline": 2}),
    ("qwen3_moe", "fsdp", 2, {"expert": 2}),
    ("qwen3", "fsdp", 2, {"context": 2, "context_algorithm": "ulysses"}),
]


@pytest.mark.parametrize(
    ("arch", "engine", "ranks", "parallel"),
    [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.nightly) for layout in NIGHTLY)],
)
def test_ranks_compute_the_loss_of_plain_pytorch(
    arch: str,
    engine: str,
    ranks: int,
    parallel: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "models"
    checkpoint, other = (write_tiny_checkpoint(folder / f"{arch}-{seed}", arch, seed=seed) for seed in (0, 7))
    # A term of the loss with importance weights, and a penalty whose sums cross ranks.
    chosen = [CASES[0], CASES[2]]
    cases = [(objective, {**settings, "model": str(other)}, 0) for objective, settings in chosen]
    # The weights of the run's beginning after three steps: neither the policy's nor another one's.
    cases.append((CASES[0][0], CASES[0][1], 3))
    results = run_cases(tmp_path, engine, ranks, {"parallel": parallel}, checkpoint, cases)
    for (objective, settings), result in zip(chosen, results, strict=False):
        expected = plain_step(double(checkpoint), double(other), objective, settings)
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-5), settings
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-4), settings
        assert result["divergence"] == pytest.approx(expected["divergence"], rel=1e-4), settings
    responses = [response for group in recorded() for response in group.trajectories]
    for directory, result in ((other, results[0]), (checkpoint, results[2])):
        model = double(directory)
        for response, logprobs in zip(responses, result["logprobs"], strict=True):
            with torch.no_grad():
                expected_logprobs = target_logprobs(model, response)
            torch.testing.assert_close(logprobs.double(), expected_logprobs, atol=2e-5, rtol=0)
    assert results[2]["divergence"][2] > 1e-3  # the policy has moved away


OVERLAPPING = {"lr": 0.01, "distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("engine", "ranks", "options"),
    [
        ("megatron", 2, {"optimizer": OVERLAPPING}),
        pytest.param("megatron", 2, {"parallel": {"tensor": 2}}, marks=pytest.mark.nightly),
        pytest.param("single", 1, {}, marks=pytest.mark.nightly),
        pytest.param("fsdp", 2, {"fsdp": {"offload": True}}, marks=pytest.mark.nightly),
        pytest.param("fsdp", 2, {"fsdp": {"reshard_after_forward": False}}, marks=pytest.mark.nightly),
    ],
)
def test_reference_in_bf16_stays_as_it_was_to_the_bit(
    engine: str, ranks: int, options: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """The program compares the policy's weights before and after the reference has taken their place."""
    cases = [(*CASES[0], steps) for steps in (0, 3)]
    first, trained = run_cases(tmp_path, engine, ranks, {"precision": "bf16", **options}, checkpoint, cases)
    assert first["divergence"][1:] == [0.0, 0.0]
    assert trained["divergence"][2] > 1e-4
    assert all(torch.equal(*pair) for pair in zip(first["logprobs"], trained["logprobs"], strict=True))


@pytest.mark.parametrize(
    ("engine", "ranks", "options"),
    [
        ("megatron", 2, {"parallel": {"tensor": 2}}),
        ("single", 1, {}),
        pytest.param("fsdp", 2, {}, marks=pytest.mark.nightly),
    ],
)
def test_reference_of_an_adapter_is_the_model_without_it(
    engine: str, ranks: int, options: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    cases = [(*CASES[0], steps) for steps in (0, 3)]
    first, trained = run_cases(tmp_path, engine, ranks, options, checkpoint, cases, lora=True)
    assert first["divergence"][1:] == [0.0, 0.0]
    assert trained["divergence"][2] > 1e-4
    model = double(checkpoint)
    responses = [response for group in recorded() for response in group.trajectories]
    for response, logprobs in zip(responses, trained["logprobs"], strict=True):
        with torch.no_grad():
            torch.testing.assert_close(logprobs.double(), target_logprobs(model, response), atol=2e-5, rtol=0)


def test_reference_chooses_its_own_experts(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    draw, layers = np.random.default_rng(0), inspect_checkpoint(checkpoint).shape.num_layers
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(
                    response,
                    routed_experts=RoutedExperts.of(
                        np.argsort(
                            draw.random((len(response.prompt_tokens) + len(response.tokens) - 1, layers, 4)), -1
                        )[..., :2].astype("uint8")
                    ),
                )
                for response in group.trajectories
            ),
        )
        for group in recorded()
    ]
    (result,) = run_cases(tmp_path, "single", 1, {}, checkpoint, [(*CASES[0], 0)], groups=groups)
    # The policy's experts are replayed: the difference is theirs.
    assert result["divergence"][2] > 1e-3
    model = double(checkpoint)
    responses = [response for group in groups for response in group.trajectories]
    for response, logprobs in zip(responses, result["logprobs"], strict=True):
        with torch.no_grad():
            torch.testing.assert_close(logprobs.double(), target_logprobs(model, response), atol=2e-5, rtol=0)


def test_rewards_of_responses_that_are_left_out_are_penalised_too() -> None:
    """The advantages of the others are compared with them."""
    objective = Objective(drop_truncated=True)
    groups = [
        replace(group, trajectories=(replace(group.trajectories[0], finish_reason="length"), *group.trajectories[1:]))
        for group in recorded()
    ]
    samples, draw = step_samples(groups, objective), torch.Generator().manual_seed(0)
    policy, base = ([torch.randn(len(sample), generator=draw) for sample in samples] for _ in range(2))
    backend: Any = SimpleNamespace(
        engine=SimpleNamespace(trainable=SimpleNamespace(frozen=True)), gather_by_data_rank=lambda values: [values]
    )
    reference = ReferenceModel(backend, ReferenceSettings(penalty="reward", coefficient=0.5))
    penalised = reference.penalise(groups, samples, samples, policy, base)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [trajectory.reward for group in penalised for trajectory in group.trajectories]
    for trajectory, reward, *logprobs in zip(trajectories, rewards, policy, base, strict=True):
        difference = (logprobs[0].double() - logprobs[1].double())[-len(trajectory.tokens) :]
        k1 = sum(value for value, sampled in zip(difference.tolist(), trajectory.mask, strict=True) if sampled)
        assert reward == pytest.approx(trajectory.reward - 0.5 * k1, rel=1e-12)


# --- runs ---


def test_resumed_run_has_the_reference_of_its_beginning(folder: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(folder / "model", tmp_path / "model"))

    def config(output: str, **changes: Any) -> RlConfig:
        return loop_settings(
            folder,
            str(tmp_path / output),
            model=model,
            rollout={"in_order": True},
            checkpoint={"every": 2, "keep_last": 5},
            reference={"penalty": "reward", "coefficient": 0.5},
            **changes,
        )

    complete, stopped = config("complete"), config("resumed", steps=2)
    for run_config in (complete, stopped):
        in_a_fork(lambda run_config=run_config: run(run_config, RecordedEngine))
    in_a_fork(lambda: run(config("resumed"), RecordedEngine, resume="auto"))
    figures = [
        [{key: row[key] for key in row.keys() - TIMINGS - SAMPLING_METRICS} for row in rows(run_config)]
        for run_config in (complete, stopped)
    ]
    learned = [line for line in rollouts(complete) if line["outcome"] == "learned"]
    assert not any(line.get("kl_penalty") for line in learned if line["step"] == 1)
    last = [line for line in learned if line["step"] == 5]
    rewards = torch.tensor([line["reward"] - line["kl_penalty"] for line in last], dtype=torch.float64).view(2, 3)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    assert [line["advantage"] for line in last] == pytest.approx(advantages.flatten().tolist(), rel=1e-4, abs=1e-4)
    # The sum of k1 over tokens, times the coefficient, of all trajectories.
    tokens = sum(line["sampled_tokens"] for line in last)
    mean = sum(line["kl_penalty"] for line in last) / 0.5 / tokens
    assert mean == pytest.approx(figures[0][4]["kl_reference_k1"], rel=1e-4)
    assert len(figures[0]) == 5
    assert figures[0] == figures[1]
    assert (figures[0][0]["kl_reference"], figures[0][0]["kl_reference_k1"]) == (0.0, 0.0)
    assert figures[0][4]["kl_reference"] > 1e-6
    # Without the penalty the run learns something else: it has had an effect.
    plain = loop_settings(folder, str(tmp_path / "plain"), model=model, rollout={"in_order": True})
    in_a_fork(lambda: run(plain, RecordedEngine))
    assert rows(plain)[0]["kl_reference"] is None
    assert [row["loss"] for row in rows(plain)][2:] != [row["loss"] for row in figures[0]][2:]
    # Another model in the directory of the first is not the reference that the run began with.
    weights = model / "model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({name: tensor + 0.01 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})

    def resume() -> str:
        with pytest.raises(ConfigError) as caught:
            run(config("resumed", steps=6), RecordedEngine, resume="auto")
        return str(caught.value)

    assert "are not those that the run began with" in in_a_fork(resume)[0]


# --- settings ---


def config(checkpoint: Path, **changes: Any) -> RlConfig:
    rollout = {"prompts": "prompts.jsonl", "reward": "reward.py:reward"}
    return RlConfig(**{"model": checkpoint, "output": "out", "steps": 1, "rollout": rollout} | changes)


def test_reference_must_be_a_model_like_the_policy(
    checkpoint: Path, other: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = inspect_checkpoint(checkpoint)

    def check(model: Path | str, **settings: Any) -> None:
        check_reference(config(checkpoint, reference={"model": model, **settings}), info, warns=True)

    check(other)
    check("base")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check("base", penalty="reward", estimator="k3")
    assert "k3 in the reward hardly pulls a policy that is near the reference" in caplog.text
    with pytest.raises(ConfigError, match="is not a directory"):
        check(tmp_path / "nothing")
    smaller = write_tiny_checkpoint(tmp_path / "smaller", "qwen3", num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"is not a model like .* has shape"):
        check(smaller)
    shutil.copytree(other, tmp_path / "theta")
    values = json.loads((other / "config.json").read_text(encoding="utf-8"))
    values["rms_norm_eps"] = 0.5
    (tmp_path / "theta" / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has rms_norm_eps: 0\.5 in config\.json"):
        check(tmp_path / "theta")


def test_registered_loss_may_use_the_reference(checkpoint: Path) -> None:
    loss = megascend.Loss(
        "test_reference_loss",
        lambda logprobs, inputs: (logprobs - inputs.ref_logprobs) ** 2,
        requires=("ref_logprobs", "advantages"),
    )
    megascend.register_loss(loss)
    check_objective(Objective(loss=loss.name), reference=True)
    with pytest.raises(ConfigError, match=r"needs ref_logprobs; .*set reference: for ref_logprobs"):
        check_objective(Objective(loss=loss.name))
