"""The full loop with a real engine in the same process: staleness, active weights, resume, signals, failures."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megascend.apps.rl.learner import Totals
from megascend.apps.rl.rollout.controller.controller import Controller
from megascend.apps.rl.rollout.controller.server import ControllerServer
from megascend.apps.rl.rollout.engines.local import LocalEngine
from megascend.apps.rl.rollout.group import Trajectory, TrajectoryGroup
from megascend.apps.rl.train import train_rl
from megascend.apps.train.learner import RunResult
from megascend.config.rl import RlConfig
from megascend.errors import ConfigError, DataError, EngineError, EngineTimeoutError
from megascend.testing import faults, run_distributed
from support.objective_formulas import Formula, expected_advantages, reference
from support.rl_runs import (
    DEADLINE_S,
    SAMPLING_METRICS,
    TIMINGS,
    RecordedEngine,
    dry,
    in_a_fork,
    rollouts,
    rows,
    run,
    settings,
)
from support.run_directory import snapshot
from weightwire.engine import Completion
from weightwire.engine_calls import LoopThread
from weightwire.keys import ENVIRONMENT, Key, generate_key

pytestmark = pytest.mark.usefixtures("megatron_imported")


@pytest.fixture(autouse=True)
def nothing_left_for_a_fork() -> Iterator[None]:
    """Collect loops and engines in the process that has their threads: in a fork their destructors would wait for none."""
    yield
    gc.collect()


class FailingEngine(LocalEngine):
    async def generate(self, *_: Any, **__: Any) -> list[Completion]:
        raise EngineError(f"{self.name} is out of order")


@pytest.mark.nightly_cases("1")  # covered: 0 and 2
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_lag_is_bounded_and_engines_have_the_reported_weights(folder: Path, lag: int) -> None:
    config = settings(folder, f"lag-{lag}", rollout={"max_lag": lag})
    result = in_a_fork(lambda: run(config, engines=2))[0]
    metric_rows = rows(config)
    assert result.steps == len(metric_rows) == 5
    assert [row["version"] for row in metric_rows] == [1, 2, 3, 4, 5]
    assert all(row["max_lag"] <= lag for row in metric_rows)
    # Engine and trainer agree if both used the same weights: on every step without lag, and on the first one.
    fresh = [row for row in metric_rows if row["max_lag"] == 0]
    assert len(fresh) == (5 if lag == 0 else len(fresh)) > 0
    assert all(row["mismatch_max"] < 1e-5 for row in fresh)
    # Older weights give other values: at this learning rate the difference is visible.
    assert all(row["mismatch_max"] > 1e-4 for row in metric_rows if row["lag"] == row["max_lag"] > 0)


@pytest.mark.nightly_cases("*0.6*")  # covered: the other case has a temperature too
@pytest.mark.parametrize("changes", [{"temperature": 0.6}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}], ids=str)
def test_trained_policy_is_the_one_that_sampled(folder: Path, changes: dict[str, Any]) -> None:
    """Compare without lag: engine and trainer agree on every token's log-probability at this temperature and mask."""
    config = settings(folder, f"policy-{len(changes)}", rollout={"max_lag": 0, **changes})
    in_a_fork(lambda: run(config))
    metric_rows = rows(config)
    assert len(metric_rows) == 5
    assert all(row["mismatch_max"] < 1e-5 for row in metric_rows)


def test_updates_every_second_step_alternate_the_lag(folder: Path) -> None:
    config = settings(folder, "every-2", rollout={"max_lag": 1}, sync={"every": 2}, steps=6)
    in_a_fork(lambda: run(config))
    metric_rows = rows(config)
    assert [row["version"] for row in metric_rows] == [0, 2, 2, 4, 4, 6]
    assert all(row["max_lag"] <= 1 for row in metric_rows)


@pytest.mark.core
def test_killed_and_resumed_run_is_bitwise_equal(folder: Path) -> None:
    def config(output: str) -> RlConfig:
        changes = {"max_lag": 1, "in_order": True}
        return settings(folder, output, rollout=changes, checkpoint={"every": 1, "asynchronous": False}, steps=7)

    reference, broken = config("reference"), config("broken")
    in_a_fork(lambda: run(reference, RecordedEngine))
    draw = random.Random(5)
    phases = ("rollout", "forward and backward", "weight sync", "save")
    for start in (3, 5):
        fault = faults.Fault("die", rank=0, phase=draw.choice(phases), step=start + draw.randint(0, 1))
        with faults.inject(fault):
            process = multiprocessing.get_context("fork").Process(target=run, args=(broken, RecordedEngine, 1, "auto"))
            process.start()
            process.join(DEADLINE_S)
        assert process.exitcode == -signal.SIGKILL
    result = in_a_fork(lambda: run(broken, RecordedEngine, resume="auto"))[0]
    assert result.steps == 7
    learned = [{key: row[key] for key in row.keys() - TIMINGS - SAMPLING_METRICS} for row in rows(reference)]
    assert [{key: row[key] for key in row.keys() - TIMINGS - SAMPLING_METRICS} for row in rows(broken)] == learned
    assert len({row["loss"] for row in learned}) == 7


def learned_groups(config: RlConfig, step: int) -> list[TrajectoryGroup]:
    """Return what a step learned from, as the run's records have it."""
    lines = rollouts(config)
    learned = [line for line in lines if line["step"] == step and line["outcome"] == "learned"]
    groups: dict[int, list[Trajectory]] = {}
    for line in learned:
        trajectory = Trajectory(
            tuple(line["prompt_tokens"]),
            tuple(line["tokens"]),
            tuple(line["logprobs"]),
            line["reward"],
            line["finish_reason"],
            *line["versions"],
        )
        groups.setdefault(line["prompt_number"], []).append(trajectory)
    return [TrajectoryGroup(number, tuple(trajectories)) for number, trajectories in groups.items()]


def test_a_preset_reaches_the_step_and_a_resumed_run_keeps_it(folder: Path) -> None:
    """Compute the first loss from the run's records, its model and DAPO's formula; test_learn.py has the other presets."""
    from transformers import AutoModelForCausalLM

    formula = Formula(high=1.4, cache=1.0, length=5)

    def config(output: str, steps: int) -> RlConfig:
        rollout = {"in_order": True, "records": {"tokens": True}}
        objective = {"preset": "dapo", "clip_high": 0.4, "measure_every": 0}
        return settings(folder, output, steps=steps, rollout=rollout, objective=objective, checkpoint={"every": 1})

    uninterrupted, stopped, resumed = config("uninterrupted", 4), config("resumed", 2), config("resumed", 4)
    in_a_fork(lambda: run(uninterrupted, RecordedEngine))
    in_a_fork(lambda: run(stopped, RecordedEngine))
    in_a_fork(lambda: run(resumed, RecordedEngine, resume="auto"))
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    groups = learned_groups(uninterrupted, 1)
    loss, _ = reference(model, groups, formula)
    assert rows(uninterrupted)[0]["loss"] == pytest.approx(loss, abs=2e-6)
    assert [row["loss"] for row in rows(resumed)] == [row["loss"] for row in rows(uninterrupted)]
    for output in (uninterrupted.output, resumed.output):
        stored = yaml.safe_load((output / "config.yaml").read_text(encoding="utf-8"))
        assert RlConfig(**stored).objective == uninterrupted.objective
        assert stored["objective"] == uninterrupted.objective.model_dump(mode="json")
    # The records show what the objective has added, and the advantages that were learned.
    lines = rollouts(uninterrupted)
    learned = [line for line in lines if line["step"] == 1 and line["outcome"] == "learned"]
    assert [line["advantage"] for line in learned] == pytest.approx(
        torch.cat(expected_advantages(groups, formula)).tolist(), abs=1e-6
    )
    penalties = [{"overlong": -float(line["sampled_tokens"] == 5)} for line in learned]
    assert [line["rewards"] for line in learned] == [pytest.approx(parts) for parts in penalties]


def test_updates_by_changes_learn_the_same_and_report_their_bytes(folder: Path) -> None:
    def learned(output: str, **sync: Any) -> list[dict[str, Any]]:
        config = settings(folder, output, steps=3, sync=sync)
        in_a_fork(lambda: run(config, RecordedEngine))
        return rows(config)

    complete, changes = learned("complete"), learned("changes", mode="delta", full_every=2)
    assert [row["loss"] for row in changes] == [row["loss"] for row in complete]
    assert all(row["sync_share"] == 1.0 for row in complete)
    # fp32: nearly every number changes, so that messages are complete, with 16 bytes in front of each.
    assert all(1.0 < row["sync_share"] < 1.1 for row in (changes[0], changes[1]))
    assert changes[2]["sync_share"] == 1.0
    assert changes[2]["sync_bytes"] == complete[2]["sync_bytes"] > 0


# Covered: the last step saved by the case in which it is not; before the first step by a run that keeps the earlier one.
@pytest.mark.nightly_cases("1-6", "0-0")
@pytest.mark.parametrize(("every", "answers"), [(0, 6), (1, 6), (0, 0)])
def test_sigterm_while_waiting_saves_and_resumes(
    folder: Path, every: int, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop with the last step saved, with it unsaved, and before the first step."""
    config = settings(folder, f"stopped-{every}-{answers}", steps=4, checkpoint={"every": every})
    monkeypatch.setattr("megascend.apps.rl.rollouts.SLICE_S", 0.2)

    class Interrupting(RecordedEngine):
        answer_count = 0

        async def generate(self, *arguments: Any, **options: Any) -> list[Completion]:
            self.answer_count += 1
            if self.answer_count > answers:  # never answers again
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(DEADLINE_S)
            return await super().generate(*arguments, **options)

    stopped = in_a_fork(lambda: run(config, Interrupting))[0]
    assert stopped.stopped == "SIGTERM"
    assert (stopped.steps > 0) == (answers > 0)
    assert stopped.steps < 4
    resumed = in_a_fork(lambda: run(config, RecordedEngine, resume="auto"))[0]
    assert (resumed.steps, resumed.stopped) == (4, None)
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4]


# Covered: after step 2; the loop's places at both ends by train/test_stopped_measurement.py.
@pytest.mark.nightly_cases("before step 1", "after the last step")
@pytest.mark.parametrize("measured", [0, 1, 2], ids=["before step 1", "after step 2", "after the last step"])
def test_sigterm_during_an_evaluation_saves_and_the_resumed_run_repeats_it(folder: Path, measured: int) -> None:
    evaluation = {"prompts": folder / "prompts.jsonl", "every": 2, "temperature": 0.0}
    changes = {"evaluation": evaluation, "steps": 4, "rollout": {"in_order": True, "max_lag": 0}}
    config = settings(folder, f"evaluation-{measured}", **changes)
    reference = settings(folder, f"evaluation-{measured}-reference", **changes)

    class Interrupting(RecordedEngine):
        evaluated = 0

        async def generate(self, prompt: Any, sampling: Any, *arguments: Any) -> list[Completion]:
            if sampling.temperature == 0:
                self.evaluated += 1
                if self.evaluated == 7 * measured + 3:  # of seven prompts
                    os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.sleep(DEADLINE_S)
            return await super().generate(prompt, sampling, *arguments)

    stopped = in_a_fork(lambda: run(config, Interrupting))[0]
    assert (stopped.steps, stopped.stopped) == (2 * measured, "SIGTERM")
    assert measured == 0 or rows(config)[-1]["eval_reward"] is None
    resumed = in_a_fork(lambda: run(config, RecordedEngine, resume="auto"))[0]
    complete = in_a_fork(lambda: run(reference, RecordedEngine))[0]
    assert (resumed.steps, resumed.stopped) == (4, None)
    assert (resumed.totals.reward_before, resumed.totals.reward_after) == (
        complete.totals.reward_before,
        complete.totals.reward_after,
    )
    for key in ("step", "loss", "eval_reward"):
        assert [row[key] for row in rows(config)] == [row[key] for row in rows(reference)]
    assert [row["eval_reward"] is None for row in rows(config)] == [True, False, True, False]


def test_errors_of_engines_and_rewards_end_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascend.apps.rl.rollout.collector.BACKOFF_S", 0.01)

    def problem(config: RlConfig, kind: type[LocalEngine], expected: type[Exception]) -> str:
        def act() -> str:
            with pytest.raises(expected) as caught:
                run(config, kind)
            return str(caught.value)

        return in_a_fork(act)[0]

    assert problem(settings(folder, "engine"), FailingEngine, EngineError) == "engine 0 is out of order"
    broken = settings(folder, "reward", rollout={"reward": f"{folder / 'reward.py'}:broken"})
    expected = (
        r"prompts.jsonl:\d: the reward function reward.py:broken raised KeyError: 'no such thing'; the response was"
    )
    assert re.search(expected, problem(broken, RecordedEngine, DataError))


def test_router_replay_of_a_model_without_experts_ends_the_run_at_its_start(folder: Path) -> None:
    # An address: only engines that return experts may be named. ``run`` brings its own.
    config = settings(folder, "replay", engines=["http://127.0.0.1:9"], rollout={"router_replay": True})

    def act() -> str:
        with pytest.raises(ConfigError) as caught:
            run(config)
        return str(caught.value)

    assert in_a_fork(act) == [
        "rollout.router_replay: true, but this model has no experts whose choice can be replayed; set it to false"
    ]


def test_fading_reward_signal_saves_and_raises(folder: Path) -> None:
    """Check the limit, without which the run would draw prompts forever: no batch of groups with a signal fills."""
    rollout = {"reward": f"{folder / 'reward.py'}:fading", "max_lag": 0, "max_groups_without_signal": 6}
    config = settings(folder, "fading", rollout=rollout, steps=50, checkpoint={"every": 40})

    def act() -> str:
        with pytest.raises(DataError) as caught:
            run(config, RecordedEngine)
        return str(caught.value)

    (message,) = in_a_fork(act)
    last_step = len(rows(config))
    assert 1 <= last_step < 10
    assert message.startswith(f"step {last_step + 1}: the last 6 groups have no learning signal")
    assert "reward.py:fading gave the 18 responses 0 to all of them" in message
    assert [path.name for path in (config.output / "checkpoints").glob("step-*")] == [f"step-{last_step:08}"]
    (error,) = (config.output / "errors").rglob("*.json")
    assert "no learning signal" in error.read_text()


def test_hanging_reward_ends_evaluation_and_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megascend.apps.rl.rollouts.SLICE_S", 0.2)
    (folder / "stuck.py").write_text("import time\ndef stuck(response, example):\n    time.sleep(1000)\n")

    def problem(config: RlConfig) -> str:
        with pytest.raises(EngineTimeoutError) as caught:
            run(config, RecordedEngine)
        return str(caught.value)

    rollout = {"reward": f"{folder / 'stuck.py'}:stuck", "timeout_s": 1}
    expected = r": the reward function stuck.py:stuck has not returned for \d s for the prompt at .*prompts.jsonl:\d"
    (step,) = in_a_fork(lambda: problem(settings(folder, "stuck", rollout=rollout)))
    assert re.match(f"step 1{expected}", step)
    evaluation = {"prompts": folder / "prompts.jsonl"}
    (evaluated,) = in_a_fork(lambda: problem(settings(folder, "stuck-eval", rollout=rollout, evaluation=evaluation)))
    assert re.match(f"evaluation{expected}", evaluated)


@pytest.mark.core
def test_two_tensor_parallel_ranks_learn_from_one_engine(folder: Path) -> None:
    config = settings(folder, "tensor", steps=3, parallel={"tensor": 2}, rollout={"max_lag": 0})
    first, second = run_distributed(lambda: run(config), 2, init=False, timeout_s=DEADLINE_S)
    assert first.steps == second.steps == 3
    assert all(row["mismatch_max"] < 1e-5 for row in rows(config))


def test_adapter_is_merged_for_the_engine(folder: Path) -> None:
    config = settings(folder, "lora", lora={"rank": 4}, rollout={"max_lag": 0}, steps=3)
    in_a_fork(lambda: run(config))
    metric_rows = rows(config)
    assert all(row["mismatch_max"] < 1e-5 for row in metric_rows)
    assert metric_rows[0]["grad_norm"] > 0
    events = [json.loads(line) for line in (config.output / "events.jsonl").read_text().splitlines()]
    (start,) = [event for event in events if event["event"] == "first_step"]
    phases = "Python, settings, torch, transformers, data, Megatron, model, self-check, preparing, first step"
    assert list(start["seconds"]) == phases.split(", ")
    assert all(value >= 0 for value in start["seconds"].values())


class KilledEngine(LocalEngine):
    async def generate(self, *_: Any, **__: Any) -> list[Completion]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


class StoppedEngine(LocalEngine):
    async def generate(self, *_: Any, **__: Any) -> list[Completion]:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(DEADLINE_S)
        return []


def test_run_that_fails_before_its_first_step_keeps_the_earlier_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megascend.apps.rl.rollout.collector.BACKOFF_S", 0.01)
    monkeypatch.setattr("megascend.apps.rl.rollouts.SLICE_S", 0.2)
    changes = {"steps": 1, "export": True, "checkpoint": {"every": 1, "asynchronous": False}}
    config = settings(folder, "earlier", **changes)
    in_a_fork(lambda: run(config, RecordedEngine))
    before = snapshot(config.output)
    assert {"metrics.jsonl", "hf/model.safetensors", "checkpoints/latest"} <= set(before)

    def unreachable(config: RlConfig) -> list[LocalEngine]:
        raise EngineError("127.0.0.1:9 refused the connection")

    def overwriting(kind: type[LocalEngine], **changed: Any) -> RunResult[Totals]:
        return train_rl(
            settings(folder, "earlier", **(changes | changed)),
            overwrite=True,
            engines=lambda config: [kind(config.model, name="engine", own_process=False)],
        )

    def fails(error: type[Exception], act: Callable[[], object]) -> None:
        def expecting() -> None:
            with pytest.raises(error):
                act()

        in_a_fork(expecting)
        assert snapshot(config.output) == before

    fails(EngineError, lambda: train_rl(config, overwrite=True, engines=unreachable))
    fails(EngineError, lambda: overwriting(FailingEngine))
    fails(DataError, lambda: overwriting(RecordedEngine, rollout={"reward": f"{folder / 'reward.py'}:broken"}))
    run_distributed(lambda: overwriting(KilledEngine), 1, init=False, timeout_s=DEADLINE_S, expect_lost={0})
    assert snapshot(config.output) == before
    stopped = in_a_fork(lambda: overwriting(StoppedEngine))[0]
    assert (stopped.stopped, stopped.steps) == ("SIGTERM", 0)
    assert snapshot(config.output) == before
    in_a_fork(lambda: overwriting(RecordedEngine, export=False))
    assert {path.name for path in config.output.iterdir()} == {
        "metrics.jsonl", "config.yaml", "events.jsonl", "checkpoints"
    }  # fmt: skip


def test_controller_engines_sample_and_receive_updates(folder, monkeypatch):
    key = generate_key()
    monkeypatch.setenv(ENVIRONMENT, key)
    served = [LocalEngine(folder / "model", name=f"engine {number}", own_process=False) for number in range(2)]
    with LoopThread("controller") as thread:

        async def start() -> ControllerServer:
            server = ControllerServer(Controller(served), Key(key))
            await server.start()
            return server

        async def owners() -> set[str | None]:
            return {engine["owner"] for engine in server.controller.status()["engines"].values()}

        server = thread.run(start())
        try:
            result = train_rl(settings(folder, "controller", steps=2, rollout={"controller": str(server.address)}))
            versions = [thread.run(engine.version()) for engine in served]
            assert thread.run(owners()) == {None}  # the run has released them
        finally:
            thread.run(server.close())
            for engine in served:
                thread.run(engine.close())
    assert result.steps == 2
    assert versions == [3, 3]


ECHO = """
class Echo:
    '''Two turns: the first letter of the first reply comes back, and repeating it is rewarded.'''

    def __init__(self, fails=0):
        self.fails, self.runs = fails, 0

    async def run(self, policy, example):
        self.runs += 1
        if self.runs <= self.fails:
            raise KeyError("no such tool")
        conversation = policy.conversation(example["prompt"])
        first = await conversation.reply()
        conversation.add(f" [{first[:1]}] ")
        second = await conversation.reply()
        vowels = sum(letter in "aeiou" for letter in second) / max(1, len(second))
        return conversation.trajectory(vowels + 0.1 * len(first), {"vowels": vowels, "length": len(first)})
"""


def with_environment(folder: Path, output: str, **changes: Any) -> RlConfig:
    (folder / "environment.py").write_text(ECHO)
    environment = {"name": f"{folder / 'environment.py'}:Echo"} | changes.pop("environment", {})
    rollout = {"reward": None, "environment": environment} | changes.pop("rollout", {})
    return settings(folder, output, rollout=rollout, **changes)


def test_environment_is_trained_on_and_recorded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = with_environment(
        folder,
        "environment",
        environment={"options": {"fails": 2}},
        rollout={"records": {"tokens": True, "show_every": 5}},
        trackers=["tensorboard"],
    )
    run(config, RecordedEngine)
    printed = capsys.readouterr().out
    metrics = rows(config)
    assert [row["turns"] for row in metrics] == [2.0] * 5
    assert sum(row["failed"] for row in metrics) == 2
    lines = rollouts(config)
    assert {line["step"] for line in lines} == set(range(1, 6))
    for row in metrics:
        learned = [line for line in lines if line["step"] == row["step"] and line["outcome"] == "learned"]
        assert row["reward_learned"] == pytest.approx(sum(line["reward"] for line in learned) / len(learned), rel=1e-5)
        assert row["tokens"] == sum(sum(line["sampled"]) for line in learned)
        assert row["lag"] == pytest.approx(sum(line["lag"] for line in learned) / len(learned))
        for name in ("vowels", "length"):
            mean = sum(line["rewards"][name] for line in learned) / len(learned)
            assert row["rewards"][name] == pytest.approx(mean, rel=1e-5)
    for line in lines:
        assert line["turns"] == 2
        assert line["reward"] == pytest.approx(line["rewards"]["vowels"] + 0.1 * line["rewards"]["length"])
        assert line["prompt"].startswith("say ")
        # The environment's text stands between the two replies, unlearned.
        first = line["sampled"].index(0)
        assert line["response"][first : first + 5] == f" [{line['response'][0]}] "
        assert [segment["sampled"] for segment in line["segments"]] == [True, False, True]
        assert "".join(segment["text"] for segment in line["segments"]) == line["response"]
        assert line["segments"][1]["text"] == f" [{line['response'][0]}] "

    learned = [line for line in lines if line["step"] == 5 and line["outcome"] == "learned"]
    group = [line for line in learned if line["prompt_number"] == learned[0]["prompt_number"]]
    best = max(group, key=lambda line: line["reward"])
    assert (
        f"best and worst rollout of prompt {best['prompt_number']} at step 5:\nreward {best['reward']:.4g} (vowels"
        in printed
    )
    assert (
        f"  > {best['prompt']}\n    {best['segments'][0]['text']}\n  > {best['segments'][1]['text'].strip()}\n"
        in printed
    )
    # All of the prompt's rollouts are in the trackers.
    events = EventAccumulator(str(config.output / "tensorboard"))
    events.Reload()
    [table] = events.Tensors("rollouts/text_summary")
    text = table.tensor_proto.string_val[0].decode()
    assert (table.step, text.count("response:")) == (5, len(group))
    assert events.Scalars("train/rewards/vowels")[-1].value == pytest.approx(metrics[-1]["rewards"]["vowels"], rel=1e-5)
    # The last line and the event have the share of the time that the trainer waited.
    idle = sum(row["wait_s"] for row in metrics) / metrics[-1]["seconds"]
    assert re.search(rf"5 steps in \d+ s \(trainer idle {idle:.0%}, [\d,]+ tokens/s\); see", printed)
    (end,) = [line for line in map(json.loads, (config.output / "events.jsonl").open()) if line["event"] == "finished"]
    assert end["idle"] == pytest.approx(idle, rel=1e-4)
    assert end["tokens_per_s"] == pytest.approx(
        sum(row["tokens"] for row in metrics) / metrics[-1]["seconds"], rel=1e-4
    )
    assert all(
        row["idle"] == pytest.approx(row["wait_s"] / (row["tokens"] / row["tokens_per_s"]), rel=1e-3) for row in metrics
    )


def test_parts_of_a_reward_and_evaluations_are_recorded_and_a_profile_is_written(folder: Path) -> None:
    config = settings(
        folder,
        "parts",
        rollout={"reward": f"{folder / 'reward.py'}:parts"},
        steps=3,
        profile={"after": 1},
        evaluation={"prompts": folder / "prompts.jsonl", "every": 2},
    )
    in_a_fork(lambda: run(config, RecordedEngine))
    lines = rollouts(config)
    metrics = rows(config)
    assert all(line["rewards"] == {"length": len(line["response"])} and line["reward"] <= 1 for line in lines)
    assert all("segments" not in line for line in lines)
    learned = [line["rewards"]["length"] for line in lines if (line["step"], line["outcome"]) == (3, "learned")]
    assert metrics[-1]["rewards"] == {"length": pytest.approx(sum(learned) / len(learned), rel=1e-5)}
    evaluated = [line for line in lines if line["outcome"] == "evaluated"]
    assert [line["step"] for line in evaluated] == [0] * 7 + [2] * 7 + [3] * 7
    assert {(line["lag"], line["advantage"]) for line in evaluated} == {(0, None)}
    for row in metrics[1:]:
        rewards = [line["reward"] for line in evaluated if line["step"] == row["step"]]
        assert row["eval_reward"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-5)
    top = (config.output / "profile" / "top-rank-0.txt").read_text()
    assert top.startswith("steps 1 to 3: 3 steps")
    assert "aten::" in top


def test_records_rotate_by_size_and_are_read_in_order(folder: Path) -> None:
    from megascend.apps.cli.rollouts import read_rollouts

    config = settings(folder, "rotation", rollout={"records": {"max_bytes": 4000}})
    run(config, RecordedEngine)
    sizes = [(config.output / name).stat().st_size for name in ("rollouts.1.jsonl", "rollouts.jsonl")]
    assert max(sizes) <= 4000
    steps = [row["step"] for row in read_rollouts(config.output)]
    assert steps == sorted(steps)
    assert steps[-1] == 5


def test_records_of_steps_that_are_done_again_are_removed_after_a_rotation(folder: Path) -> None:
    from megascend.apps.cli.rollouts import read_rollouts

    records, checkpoint = {"max_bytes": 6000}, {"every": 1, "keep_last": 9}
    config = settings(folder, "rotated", rollout={"records": records}, checkpoint=checkpoint)
    in_a_fork(lambda: run(config, RecordedEngine))
    rotated = (config.output / "rollouts.1.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(rotated[-1])["step"]
    path = config.output / "checkpoints" / f"step-{last - 1:08d}"
    in_a_fork(lambda: run(config.model_copy(update={"steps": last}), RecordedEngine, resume=str(path)))
    learned = [row["step"] for row in read_rollouts(config.output) if row["outcome"] == "learned"]
    assert learned == sorted(learned)
    assert learned.count(last) == 6  # two prompts of three responses


def test_dynamic_sampling_compares_rewards_without_the_length_penalty(folder: Path) -> None:
    rollout = {"reward": f"{folder / 'reward.py'}:settled", "in_order": True}
    config = settings(folder, "settled", steps=3, rollout=rollout, objective={"preset": "dapo"})
    in_a_fork(lambda: run(config, RecordedEngine))
    lines = rollouts(config)
    solved = [line for line in lines if int(line["prompt"][-2]) % 2 == 0]
    assert {(line["outcome"], line["reward"]) for line in solved} == {("equal", 1.0)}
    # Their responses differ in length, so that their penalties do.
    assert {line["rewards"]["overlong"] for line in solved} == {0.0, -1.0}
    assert sum(line["outcome"] == "learned" for line in lines) == 3 * 2 * 3


def test_dropped_groups_have_no_advantage_where_it_depends_on_the_step(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megascend.apps.cli.rollouts import read_rollouts, rollouts_command
    from megascend.apps.rl.rollout_log import RolloutLog

    def group(number: int, *rewards: float) -> TrajectoryGroup:
        return TrajectoryGroup(
            number, tuple(Trajectory((1,), (2,), (-1.0,), reward, "stop", 0, 0) for reward in rewards)
        )

    learned, stale = [group(0, 1.0, 1.0), group(1, 0.0, 1.0)], group(2, 0.0, 1.0)
    for advantages, expected in (
        ("reinforce++", [0.5, 0.5, -1.5, 0.5, None, None]),
        ("centered", [0.0, 0.0, -0.5, 0.5, -0.5, 0.5]),
    ):
        config = settings(folder, str(tmp_path / advantages), objective={"advantages": advantages})
        config.output.mkdir()
        log: Any = SimpleNamespace(writes=True)
        records = RolloutLog(config, str, log, 0)
        records.write(1, learned, [("stale", stale)])
        records.close()
        assert [row["advantage"] for row in read_rollouts(config.output)] == pytest.approx(expected, abs=1e-5)
    rollouts_command(tmp_path / "reinforce++", sort="advantage", ascending=True)  # type: ignore[arg-type]
    # Those without one are left out.
    assert re.findall(r"advantage (\S+)", capsys.readouterr().out) == ["-1.5", "+0.5", "+0.5", "+0.5"]


def test_dry_run_plays_an_episode_and_asks_engines(folder: Path) -> None:
    plan = dry(with_environment(folder, "dry", rollout={"max_tokens": 20}))
    assert (plan.trial.turns, plan.trial.source) == (2, f"{folder / 'prompts.jsonl'}:1")
    # "This is a canned response." is cut to 20 bytes: 5 vowels of the second reply, and the length of the first.
    assert plan.trial.rewards == {"vowels": pytest.approx(6 / 20), "length": 20}
    assert plan.prompt_lengths == (6, 6, 6)
    assert plan.engines == ["local: starts with the run"]
    assert plan.memory.total > 0
    with pytest.raises(
        Exception, match=r"prompts.jsonl:1: the environment Echo raised KeyError: 'no such tool' \(.*:\d+\)"
    ):
        dry(with_environment(folder, "dry", environment={"options": {"fails": 1}}))
    with pytest.raises(Exception, match=r"prompts.jsonl:1: the reward function reward.py:broken raised KeyError"):
        dry(settings(folder, "dry", rollout={"reward": f"{folder / 'reward.py'}:broken"}))


def test_dry_run_names_an_engine_that_does_not_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, generate_key())
    plan = dry(settings(folder, "dry", engines=["http://127.0.0.1:9"]))
    assert re.fullmatch(r"http://127.0.0.1:9: warning: .*vLLM.*127.0.0.1:9.*", plan.engines[0])
