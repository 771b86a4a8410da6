"""Environments: exact tokens of several turns, failed episodes, engines that fail below an environment."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from apps.rl.rollout.test_collector import DEADLINE_S, Engine, Prompts, Seeded
from megascend.apps.cli.random_checkpoint import byte_tokenizer
from megascend.apps.rl.rollout import collector
from megascend.apps.rl.rollout.buffer import RolloutBuffer
from megascend.apps.rl.rollout.collector import RolloutCollector, Task
from megascend.apps.rl.rollout.environments import (
    EnvironmentEpisodes,
    FullContextError,
    Policy,
    PromptRenderer,
    joined_experts,
    load_environment,
)
from megascend.apps.rl.rollout.group import Trajectory, TrajectoryGroup
from megascend.apps.rl.rollouts import SharedRollouts
from megascend.config.rl import EnvironmentSettings
from megascend.errors import ConfigError, DataError, EngineError
from megascend.models.checkpoint_files.tokenizer import following_tokens
from weightwire.engine import Completion, RoutedExperts, Sampling
from weightwire.errors import UnsupportedCallError

SETTINGS = EnvironmentSettings(name="e", timeout_s=20, concurrency=64)
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
STRIPS_REASONING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% elif m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' + m.content }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ScriptedEngine(Engine):
    """Engine double that replies with given texts in turn, one token a byte, and records what it was asked."""

    def __init__(self, *replies: str, tokenizer: Any) -> None:
        super().__init__("scripted")
        self.replies, self.tokenizer, self.contexts = list(replies), tokenizer, []
        self.samplings: list[Sampling] = []
        self.truncates = True

    async def generate(self, tokens: Sequence[int], sampling: Sampling, n: int) -> list[Completion]:
        self.contexts.append(list(tokens))
        self.samplings.append(sampling)
        reply = self.tokenizer(self.replies.pop(0), add_special_tokens=False)["input_ids"]
        cut = reply[: sampling.max_tokens]
        reason = "stop" if len(cut) == len(reply) else "length"
        logprobs = tuple(-0.25 * (index + 1) for index in range(len(cut)))
        allowed = tuple((token, 300) for token in cut) if sampling.truncates and self.truncates else None
        return [Completion(tuple(cut), logprobs, reason, self.weights, self.weights, allowed=allowed)]


def play(
    environment: Any,
    engine: Any,
    tokenizer: Any,
    max_length: int = 400,
    max_tokens: int = 100,
    sampling: Sampling | None = None,
) -> list[Trajectory]:
    """Run one episode of an environment."""
    episodes = EnvironmentEpisodes(environment, PromptRenderer(tokenizer), SETTINGS, max_length)
    try:
        return asyncio.run(episodes.run(engine, {"prompt": 0}, sampling or Sampling(max_tokens, seed=3), 1))
    finally:
        episodes.close()


def test_trajectory_has_the_tokens_that_were_allowed_and_the_temperature() -> None:
    tokenizer, sampling = byte_tokenizer(4096), Sampling(100, temperature=0.5, top_k=2)
    engine = ScriptedEngine("one<|im_end|>", "4<|im_end|>", tokenizer=tokenizer)
    [trajectory] = play(TwoTurns(), engine, tokenizer, sampling=sampling)
    assert trajectory.allowed == tuple(
        (token, 300) if mark else () for token, mark in zip(trajectory.tokens, trajectory.mask, strict=True)
    )
    assert trajectory.temperature == 0.5
    engine = ScriptedEngine("one<|im_end|>", tokenizer=tokenizer)
    engine.truncates = False
    with pytest.raises(UnsupportedCallError, match="scripted does not return which tokens top_p and top_k allowed"):
        play(TwoTurns(), engine, tokenizer, sampling=sampling)


class TwoTurns:
    """Environment that answers the first reply with a tool's message."""

    async def run(self, policy: Policy, example: Mapping[str, Any]) -> Trajectory:
        conversation = policy.conversation(QUESTION)
        await conversation.reply()
        conversation.add([{"role": "tool", "content": "4"}])
        second = await conversation.reply()
        return conversation.trajectory(float(second == "4"), {"exact": 1.0})


@pytest.mark.parametrize("template", [None, STRIPS_REASONING], ids=["ChatML", "template that rewrites reasoning"])
def test_conversation_keeps_sampled_tokens_and_adds_what_the_template_writes(template: str | None) -> None:
    tokenizer = byte_tokenizer(4096)
    if template is not None:
        tokenizer.chat_template = template
    first, second = "<think>hm</think> <calc>2+2</calc> <|im_end|>", "4<|im_end|>"
    engine = ScriptedEngine(first, second, tokenizer=tokenizer)
    [trajectory] = play(TwoTurns(), engine, tokenizer)
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    if template is None:
        assert tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True) == prompt
    assert tokenizer.decode(engine.contexts[0]) == prompt
    assert tokenizer.decode(engine.contexts[1]) == prompt + first + between
    assert tokenizer.decode([*trajectory.prompt_tokens, *trajectory.tokens]) == prompt + first + between + second
    sampled = [token for token, mark in zip(trajectory.tokens, trajectory.mask, strict=True) if mark]
    assert tokenizer.decode(sampled) == first + second
    # The second context is the first with its reply, token for token.
    assert engine.contexts[1][: len(engine.contexts[0])] == engine.contexts[0]
    logprobs = [value for value, mark in zip(trajectory.logprobs, trajectory.mask, strict=True) if mark]
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (first, second)]
    assert logprobs == [-0.25 * (index + 1) for length in lengths for index in range(length)]
    assert not any(value for value, mark in zip(trajectory.logprobs, trajectory.mask, strict=True) if not mark)
    assert (trajectory.turns, trajectory.reward, trajectory.rewards) == (2, 1.0, {"exact": 1.0})
    seeds = [sampling.seed for sampling in engine.samplings]
    assert len(set(seeds)) == 2


def test_conversation_is_full_at_the_longest_trajectory() -> None:
    class Talk:
        async def run(self, policy: Policy, example: Mapping[str, Any]) -> Trajectory:
            conversation = policy.conversation("abc")
            while not conversation.full:
                await conversation.reply()
                conversation.add("--")
            with pytest.raises(FullContextError, match="at most 12"):
                await conversation.reply()
            return conversation.trajectory(0.0)

    tokenizer = byte_tokenizer(4096)
    engine = ScriptedEngine("xy", "xy", "xy", tokenizer=tokenizer)
    [trajectory] = play(Talk(), engine, tokenizer, max_length=12)
    # What was added after the last reply is left out.
    assert tokenizer.decode(trajectory.tokens) == "xy--xy--x"
    assert trajectory.finish_reason == "length"


class Sometimes:
    """Environment that raises, or never ends, for prompts of a kind."""

    def __init__(self, period: int = 3, hangs: bool = False) -> None:
        self.period, self.hangs, self.runs, self.cancelled = period, hangs, 0, 0

    async def run(self, policy: Policy, example: Mapping[str, Any]) -> Trajectory:
        self.runs += 1
        number = self.runs
        conversation = policy.conversation("go")
        await conversation.reply()
        if number % self.period == 0:
            if not self.hangs:
                raise KeyError("no such tool")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return conversation.trajectory(float(number))


@contextmanager
def collecting(
    environment: Any, *engines: Any, max_failed: float = 0.5, timeout_s: int = 20
) -> Iterator[RolloutCollector]:
    tokenizer = byte_tokenizer(4096)
    settings = SETTINGS.model_copy(update={"timeout_s": timeout_s, "max_failed": max_failed})
    renderer = PromptRenderer(tokenizer)
    episodes = EnvironmentEpisodes(environment, renderer, settings, 400, lambda p: f"p.jsonl:{p['prompt']}")
    task = Task(episodes, lambda tokens: tokenizer.decode(list(tokens)), Sampling(4, seed=1), group_size=4)
    rollouts = RolloutCollector(engines, Prompts(), RolloutBuffer(4, 0), task)
    try:
        rollouts.updated(0)
        rollouts.start(step=0, offset=0)
        yield rollouts
    finally:
        rollouts.close()


@pytest.mark.parametrize("hangs", [False, True], ids=["raises", "hangs"])
def test_failed_episodes_are_counted_and_left_out(hangs: bool, caplog: pytest.LogCaptureFixture) -> None:
    environment = Sometimes(hangs=hangs)
    with (
        caplog.at_level(logging.WARNING),
        collecting(environment, Engine("one"), timeout_s=1 if hangs else 20) as rollouts,
    ):
        groups = rollouts.take(0, DEADLINE_S)
        counts = rollouts.counts()
    assert groups is not None
    assert len(groups) == 4
    missing = 16 - sum(len(group.trajectories) for group in groups)
    assert missing >= 4
    assert (counts.timed_out, counts.failed) == ((counts.timed_out, 0) if hangs else (0, counts.failed))
    assert counts.timed_out + counts.failed >= missing
    assert environment.cancelled == (counts.timed_out if hangs else 0)
    expected = "did not end within 1 s" if hangs else "raised KeyError: 'no such tool'"
    assert expected in caplog.messages[0]
    assert "for the prompt at p.jsonl:" in caplog.messages[0]
    assert hangs or "test_environments.py:" in caplog.messages[0]


def test_too_many_failed_episodes_end_the_run() -> None:
    engine = Engine("one")
    with (
        collecting(Sometimes(period=2), engine, max_failed=0.4) as rollouts,
        pytest.raises(DataError, match=r"of the last \d+ episodes failed, more than the share 0.4 .*no such tool"),
    ):
        learn_from(rollouts, engine, 20)


def learn_from(rollouts: RolloutCollector, engine: Engine, steps: int) -> None:
    """Take groups of a number of steps."""
    for step in range(steps):
        engine.weights = step
        rollouts.updated(step)
        rollouts.take(step, DEADLINE_S)


def test_engine_error_that_an_environment_catches_is_retried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "BACKOFF_S", 0.01)

    class Swallows:
        async def run(self, policy: Policy, example: Mapping[str, Any]) -> Trajectory | None:
            conversation = policy.conversation("go")
            try:
                await conversation.reply()
            except Exception:  # noqa: BLE001  what careless environments do
                return None
            return conversation.trajectory(float(id(conversation)))

    failing, sound = Engine("one", fails=EngineError), Engine("two")
    with collecting(Swallows(), failing, sound) as rollouts:
        groups = rollouts.take(0, DEADLINE_S)
        counts = rollouts.counts()
    assert groups is not None
    assert {trajectory.engine for group in groups for trajectory in group.trajectories} == {"two"}
    assert (counts.failed, counts.discarded) == (0, 0)
    with (
        collecting(Swallows(), Engine("one", fails=EngineError)) as rollouts,
        pytest.raises(EngineError, match="one has failed"),
    ):
        rollouts.take(0, DEADLINE_S)


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, ConnectionResetError])
def test_environment_that_ends_at_random_loses_no_prompt(error: type[BaseException]) -> None:
    class Ends(Sometimes):
        ended = 0

        async def run(self, policy: Policy, example: Mapping[str, Any]) -> Trajectory:
            trajectory = await super().run(policy, example)
            if draw.random() < 0.2:
                self.ended += 1
                raise error
            return trajectory

    draw, environment, engine = random.Random(3), Ends(period=10**6), Engine("one")
    groups = []
    with collecting(environment, engine) as rollouts:
        for step in range(10):
            engine.weights = step
            rollouts.updated(step)
            batch = rollouts.take(step, DEADLINE_S)
            assert batch is not None
            groups += batch
        counts = rollouts.counts()
    assert len({group.number for group in groups}) == 40
    # All that were dispatched are learned from, dropped, or still on their way; each of their episodes counts once.
    assert 0 < counts.failed <= environment.ended
    assert sum(len(group.trajectories) for group in groups) <= environment.runs - counts.failed
    assert counts.dispatched - counts.learned - counts.discarded - counts.equal <= 4


def test_blocking_environment_does_not_hold_up_the_engines() -> None:
    release = threading.Event()

    class Blocks:
        async def run(self, policy: Policy, example: Mapping[str, Any]) -> Trajectory:
            release.wait(DEADLINE_S)
            conversation = policy.conversation("go")
            await conversation.reply()
            return conversation.trajectory(float(id(conversation)))

    with collecting(Blocks(), Engine("one")) as rollouts:
        assert rollouts.take(0, 0.2) is None  # the collector's own loop answers
        assert "Blocks has not ended for 0 s for the prompt at p.jsonl:" in rollouts.describe_wait()
        release.set()
        assert rollouts.take(0, DEADLINE_S) is not None


def test_wrong_results_are_failures_that_say_what_was_returned(caplog: pytest.LogCaptureFixture) -> None:
    class Returns:
        def __init__(self, value: Any) -> None:
            self.value = value

        async def run(self, policy: Policy, example: Mapping[str, Any]) -> Any:
            conversation = policy.conversation("go")
            await conversation.reply()
            if isinstance(self.value, dict):
                return conversation.trajectory(1.0, self.value)
            return conversation.trajectory(self.value) if isinstance(self.value, float) else self.value

    tokenizer = byte_tokenizer(4096)
    for value, expected in (
        (None, "returned None, not a Trajectory"),
        (3, "returned 3, not a Trajectory"),
        (float("nan"), "returned the reward nan"),
        ({"right": "yes"}, "returned the part 'right' 'yes', not a finite number"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert play(Returns(value), ScriptedEngine("a", tokenizer=tokenizer), tokenizer) == []
        assert expected in caplog.text
    engine = ScriptedEngine("a", tokenizer=tokenizer)
    [trajectory] = play(Returns({"right": np.bool_(True)}), engine, tokenizer)
    assert json.dumps(trajectory.rewards) == '{"right": 1.0}'


def test_experts_of_a_token_are_those_of_the_request_that_sampled_it() -> None:
    def experts(rows: int, value: int) -> RoutedExperts:
        return RoutedExperts.of(np.full((rows, 2, 1), value, "uint8"))

    joined = joined_experts([experts(4, 1), experts(9, 2), experts(11, 3)])
    assert joined is not None
    assert joined.numbers()[:, 0, 0].tolist() == [1] * 4 + [2] * 5 + [3] * 2
    assert joined_experts([experts(4, 1), None]) is None


def test_unusable_environments_raise_config_errors(tmp_path: Path) -> None:
    code = tmp_path / "my_environment.py"
    code.write_text(
        "class Game:\n"
        "    def __init__(self, size=3):\n"
        "        if size < 1:\n            raise ValueError('size must be positive')\n"
        "        self.size = size\n"
        "    async def run(self, policy, example): ...\n"
        "class Plain:\n    def run(self, policy, example): ...\n"
        "def make(size):\n    return Game(size)\n"
        "game = Game()\nLIMIT = 3\n",
        encoding="utf-8",
    )
    assert load_environment(f"{code}:Game", {"size": 5}).size == 5  # type: ignore[attr-defined]
    assert load_environment(f"{code}:make", {"size": 4}).size == 4  # type: ignore[attr-defined]
    assert load_environment(f"{code}:game", {}).size == 3  # type: ignore[attr-defined]
    for name, options, message in (
        ("Plain", {}, "no method 'async def run"),
        ("LIMIT", {}, "no function or class 'LIMIT'; it has Game, Plain, make"),
        ("game", {"size": 2}, "is an object and takes no options: size"),
        ("Game", {"sides": 2}, "raised TypeError"),
        ("Game", {"size": 0}, r"size must be positive \(.*my_environment.py:4\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_environment(f"{code}:{name}", options)


def test_responses_of_all_turns_and_episodes_have_seeds_of_their_own() -> None:
    class Talk:
        async def run(self, policy: Policy, example: Mapping[str, Any]) -> Trajectory:
            conversation = policy.conversation("go")
            for _ in range(30):
                await conversation.reply(1)
            return conversation.trajectory(float(id(conversation)))  # a group of equal rewards would be dropped

    engine = Seeded()
    with collecting(Talk(), engine) as rollouts:
        assert rollouts.take(0, DEADLINE_S) is not None
        rollouts.evaluate([{"prompt": 0}, {"prompt": 1}], 1.0, 3).result(DEADLINE_S)
    assert len(engine.seeds) == len(set(engine.seeds)) >= (16 + 6) * 30


@pytest.mark.parametrize(("reward", "mean"), [(1.0, 0.25), (-2.0, -2.0)])
def test_failed_episodes_of_an_evaluation_are_no_successes(reward: float, mean: float) -> None:
    class Crashes:
        async def run(self, policy: Policy, example: Mapping[str, Any]) -> list[Trajectory] | Trajectory:
            conversation = policy.conversation("go")
            await conversation.reply()
            if example["prompt"]:
                raise KeyError("no such tool")
            return conversation.trajectory(reward)

    for samples in (1, 4):
        with collecting(Crashes(), Engine("one"), max_failed=1.0) as rollouts:
            groups = SimpleNamespace(timeout_s=60.0, monitor=SimpleNamespace(phase=lambda name: nullcontext()))
            backend: Any = SimpleNamespace(groups=groups, from_rank_0=lambda act: act(), any_rank=lambda *flags: flags)
            shared = SharedRollouts(backend, rollouts, 60.0)
            prompts = [{"prompt": number} for number in range(4)]
            assert shared.evaluate(prompts, 1.0, samples) == (mean, 3 * samples)


@pytest.mark.parametrize("kind", ["Prepend", "first", "always", "none"])
@pytest.mark.parametrize("end", ["</s>", "</s> "], ids=["end", "end that swallows spaces"])
def test_added_texts_have_the_tokens_of_the_whole(kind: str, end: str) -> None:
    """Compare with one call of the tokenizer; kinds: Llama 2 and Phi-3, Mistral, older ones, and those that add no space."""
    characters = [chr(code) for code in range(33, 127)]
    vocabulary = {text: index for index, text in enumerate(["<unk>", "<s>", "▁", "▁y", "ok", "\n", *characters])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "y"), ("o", "k")], unk_token="<unk>"))
    if kind == "Prepend":
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "none":
        raw.normalizer = normalizers.Replace(" ", "▁")
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    raw.add_special_tokens([AddedToken("<s>"), AddedToken("</s>", rstrip=end != "</s>")])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '</s>\n' }}{% else %}"
        "{{ '[' + m.role + ']' + m.content + '[end]' }}{% endif %}{% endfor %}"
    )
    renderer = PromptRenderer(tokenizer)

    def whole(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for text in ("yes", " yes", "42;", "\n", "\nok", "a", "aa", "(", ""):
        assert whole("Q: 17=") + renderer.text(text) == whole("Q: 17=" + text), text
    earlier, added = [{"role": "user", "content": "hi"}], [{"role": "user", "content": " yes"}]
    messages = [*earlier, {"role": "assistant", "content": "ok"}, *added]
    opening, complete = (tokenizer.apply_chat_template(part, tokenize=False) for part in (earlier, messages))
    for reply, last in (("ok</s>", "</s>"), ("ok", "")):
        tokens = whole(opening + reply)
        assert tokens + renderer.continuation(earlier, added, last) == whole(complete), reply


def test_tokens_that_stop_responses_are_those_of_the_middle_of_a_text() -> None:
    raw = Tokenizer(models.BPE(vocab={"<unk>": 0, "▁": 1, ".": 2, "▁.": 3}, merges=[("▁", ".")], unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert following_tokens(".", PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")) == [2]


def test_trajectory_of_numpy_and_torch_can_be_saved() -> None:
    ids: Any = np.array([3, 4])
    logprobs: Any = torch.tensor([-0.5, 0.0])
    sampled: Any = np.array([True, False])
    trajectory = Trajectory(tuple(ids), ids, tuple(logprobs), 1.0, "stop", 0, 0, sampled=sampled)
    group = TrajectoryGroup(1, (trajectory,))
    assert TrajectoryGroup.from_json(json.loads(json.dumps(group.to_json()))) == group
    for wrong in ({"tokens": (1.5, 2)}, {"logprobs": (None, 0.0)}, {"logprobs": (float("nan"), 0.0)}):
        with pytest.raises(DataError):
            replace(trajectory, **wrong)
