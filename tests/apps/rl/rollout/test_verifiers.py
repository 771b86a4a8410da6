"""Environments of the verifiers format: exact tokens of games and tools, failures, learning from one, and one from PyPI."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.rl.rollout.test_environments import STRIPS_REASONING, ScriptedEngine
from megascend.apps.cli.random_checkpoint import ModelSize, byte_tokenizer, write_checkpoint
from megascend.apps.rl.rollout import verifiers
from megascend.apps.rl.rollout.environments import EnvironmentEpisodes, PromptRenderer
from megascend.apps.rl.rollout.group import Trajectory
from megascend.config.rl import EnvironmentSettings
from megascend.errors import ConfigError, DataError
from support.rl_runs import in_a_fork, rows, run, settings
from weightwire.engine import Completion, RoutedExperts, Sampling

# Without importing it, which takes seconds in every process that collects these tests.
INSTALLED = find_spec("verifiers") is not None
pytestmark = [
    pytest.mark.usefixtures("packages"),
    pytest.mark.skipif(not INSTALLED, reason="pip install 'megascend[verifiers]', Python 3.11 or later"),
]

PACKAGES = Path(__file__).with_name("verifiers_packages")
PROGRAM = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""verifiers' chat program, in a process of its own."""
INLINE = {"harness": {"id": "inline-chat"}, "runtime": {"type": "subprocess"}}
WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools[0].function.name + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the packages importable, here and in the processes that verifiers starts."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))  # uv


class Expert(ScriptedEngine):
    """Scripted engine whose weights change with each request, and that returns experts: the number of the request."""

    async def generate(self, tokens: Sequence[int], sampling: Sampling, n: int) -> list[Completion]:
        [completion] = await super().generate(tokens, sampling, n)
        self.weights += 1
        count = len(tokens) + len(completion.tokens) - 1
        experts = RoutedExperts.of(np.full((count, 2, 1), len(self.contexts), "uint8"))
        return [replace(completion, routed_experts=experts)]


def episodes(
    environment: Any, tokenizer: Any, timeout_s: int = 120, max_length: int = 4000, max_failed: float = 0.2
) -> EnvironmentEpisodes:
    settings = EnvironmentSettings(name="e", timeout_s=timeout_s, concurrency=4, max_failed=max_failed)
    renderer = PromptRenderer(tokenizer)
    return EnvironmentEpisodes(environment, renderer, settings, max_length, lambda prompt: f"task {prompt['idx']}")


def play(environment: Any, engine: Any, tokenizer: Any, index: int = 0, **limits: Any) -> list[Trajectory]:
    """Run one episode of a task."""
    played = episodes(environment, tokenizer, **limits)
    try:
        sampling = Sampling(100, seed=3, routed_experts=isinstance(engine, Expert))
        return asyncio.run(played.run(engine, {"idx": index}, sampling, 1))
    finally:
        played.close()


def check_exact(trajectory: Trajectory, engine: ScriptedEngine, replies: Sequence[str], tokenizer: Any) -> None:
    """Compare a trajectory of one history with what the engine was asked and what it answered, token by token."""
    answers = [tokenizer(reply, add_special_tokens=False)["input_ids"] for reply in replies]
    assert list(trajectory.prompt_tokens) == engine.contexts[0]
    assert [*trajectory.prompt_tokens, *trajectory.tokens] == [*engine.contexts[-1], *answers[-1]]
    position, tokens, marks, logprobs = len(engine.contexts[0]), [], [], []
    for context, answer in zip(engine.contexts, answers, strict=True):
        between = context[position:]
        tokens += [*between, *answer]
        marks += [False] * len(between) + [True] * len(answer)
        logprobs += [0.0] * len(between) + [-0.25 * (index + 1) for index in range(len(answer))]
        position = len(context) + len(answer)
        assert context == [*engine.contexts[0], *tokens[: len(context) - len(engine.contexts[0])]]
    assert (trajectory.tokens, trajectory.mask) == (tuple(tokens), tuple(marks))
    assert trajectory.logprobs == tuple(logprobs)
    assert trajectory.turns == len(replies)


@pytest.mark.parametrize("template", [None, STRIPS_REASONING], ids=["ChatML", "template that rewrites reasoning"])
def test_game_of_several_turns_is_trained_on_what_was_sampled(template: str | None) -> None:
    tokenizer = byte_tokenizer(4096)
    if template is not None:
        tokenizer.chat_template = template
    environment = verifiers.load("guess-game", {"taskset": {"count": 3}, "player": INLINE})
    assert [example["idx"] for example in environment.examples] == [0, 1, 2]
    replies = ("<think>hm</think> 7 <|im_end|>", "\xff8 9<|im_end|>", "1<|im_end|>")
    engine = Expert(*replies, tokenizer=tokenizer)
    [trajectory] = play(environment, engine, tokenizer, 1)
    check_exact(trajectory, engine, replies, tokenizer)
    between = "\n<|im_start|>user\nNo, again!<|im_end|>\n<|im_start|>assistant\n"
    text = tokenizer.decode(trajectory.tokens)
    assert text == between.join(replies)
    assert (trajectory.reward, trajectory.rewards) == (2.5, {"right": 2.0, "brief": 0.5, "turns": 3.0})
    assert (trajectory.first_version, trajectory.last_version, trajectory.engine) == (0, 2, "scripted")
    assert trajectory.finish_reason == "stop"
    assert trajectory.routed_experts is not None
    experts = trajectory.routed_experts.numbers()[:, 0, 0].tolist()
    lengths = [len(context) for context in engine.contexts]
    assert len(experts) == len(trajectory.prompt_tokens) + len(trajectory.tokens) - 1
    # The last token of a response has its row from the next request, the first one that computed it.
    answers = [len(tokenizer(reply, add_special_tokens=False)["input_ids"]) for reply in replies]
    first, second = (length + answer - 1 for length, answer in zip(lengths[:2], answers[:2], strict=True))
    assert experts == [1] * first + [2] * (second - first) + [3] * (len(experts) - second)


@pytest.mark.slow
def test_tool_is_called_and_its_answer_is_context() -> None:
    tokenizer = byte_tokenizer(4096)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = WITH_TOOLS
    options = {"agent": PROGRAM, "renderer": {"tool_parser": "qwen3"}}
    call = '<tool_call>\n{"name": "adder_add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    engine = ScriptedEngine(call, "5<|im_end|>", tokenizer=tokenizer)
    [trajectory] = play(verifiers.load("adder", options), engine, tokenizer)
    check_exact(trajectory, engine, (call, "5<|im_end|>"), tokenizer)
    assert tokenizer.decode(trajectory.prompt_tokens) == (
        "<|im_start|>system\nadder_add<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(trajectory.tokens) == f"{call}{answer}5<|im_end|>"
    assert (trajectory.reward, trajectory.rewards) == (1.5, {"right": 1.0, "tool_use": 0.5})


def test_histories_become_trajectories_and_a_response_is_learned_once() -> None:
    tokenizer = byte_tokenizer(4096)
    options = {"harness": {"id": "inline-chat", "histories": True}, "runtime": {"type": "subprocess"}}
    environment = verifiers.load("letters", {"agent": options, "select": {"limit": 1}})
    replies = [f"{text}<|im_end|>" for text in ("ab", "cd", "efg", "h")]
    engine = ScriptedEngine(*replies, tokenizer=tokenizer)
    first, second, third = play(environment, engine, tokenizer)
    contexts = engine.contexts
    engine.contexts = contexts[:2]
    check_exact(first, engine, replies[:2], tokenizer)
    for trajectory, context, reply in ((second, contexts[2], replies[2]), (third, contexts[3], replies[3])):
        # The reply that it has in common with the first one, or that was changed, is context.
        assert (list(trajectory.prompt_tokens), tokenizer.decode(trajectory.tokens)) == (context, reply)
        assert (all(trajectory.mask), trajectory.turns) == (True, 1)
        assert trajectory.logprobs == tuple(-0.25 * (index + 1) for index in range(len(trajectory.tokens)))
    assert "AB<|im_end|>\n<|im_start|>user\nMore?" in tokenizer.decode(third.prompt_tokens)
    # The last reply is that of the last request.
    assert {trajectory.reward for trajectory in (first, second, third)} == {1.0}


@pytest.mark.parametrize("fixed", [False, True], ids=["both trained", "one fixed"])
def test_each_agent_has_its_trajectory_and_reward(fixed: bool) -> None:
    tokenizer = byte_tokenizer(4096)
    options = {"writer": INLINE, "critic": INLINE, "fixed_critic": fixed}
    engine = ScriptedEngine("A poem.<|im_end|>", "yes<|im_end|>", tokenizer=tokenizer)
    trajectories = play(verifiers.load("two-agents", options), engine, tokenizer)
    texts = [tokenizer.decode(trajectory.tokens) for trajectory in trajectories]
    assert texts == ["A poem.<|im_end|>"] + ["yes<|im_end|>"] * (not fixed)
    assert [trajectory.rewards for trajectory in trajectories] == [{"good": 1.0}] + [{"brief": 0.5}] * (not fixed)
    assert [list(trajectory.prompt_tokens) for trajectory in trajectories] == engine.contexts[: 2 - fixed]
    assert "A poem.?" in tokenizer.decode(engine.contexts[1])


class Silent(ScriptedEngine):
    """Engine that never answers."""

    cancelled = 0

    async def generate(self, tokens: Sequence[int], sampling: Sampling, n: int) -> list[Completion]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return []


def letters(fault: str = "", **options: Any) -> Any:
    options = {"agent": INLINE, "select": {"limit": 2}, "taskset": {"task": {"fault": fault}}} | options
    return verifiers.load("letters", options)


def test_environment_that_raises_is_counted_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer(4096)
    played = episodes(letters(fault="raises"), tokenizer, max_failed=1.0)
    with caplog.at_level(logging.WARNING):
        engine = ScriptedEngine("a", "b", tokenizer=tokenizer)
        assert asyncio.run(played.run(engine, {"idx": 1}, Sampling(5), 2)) == []
    played.close()
    assert (played.failed, played.timed_out, played.completed) == (2, 0, 2)
    assert "TaskError: task Letters scoring: KeyError: 'no such answer'" in played.last_failure
    assert "letters.py:" in played.last_failure
    assert "task 1" in played.last_failure


@pytest.mark.parametrize("silent", [False, True], ids=["reward", "engine"])
def test_environment_that_hangs_is_cancelled_with_its_requests(silent: bool) -> None:
    tokenizer = byte_tokenizer(4096)
    environment = letters() if silent else letters(fault="hangs")
    played = episodes(environment, tokenizer, timeout_s=3)
    engine = (Silent if silent else ScriptedEngine)("a", tokenizer=tokenizer)

    async def episode() -> list[Trajectory]:
        trajectories = await played.run(engine, {"idx": 0}, Sampling(5), 1)
        for _ in range(100):  # the cancellation travels from the harness to the engine
            if not silent or engine.cancelled:
                break
            await asyncio.sleep(0.05)
        return trajectories

    assert asyncio.run(episode()) == []
    played.close()
    assert (played.failed, played.timed_out) == (0, 1)
    if silent:
        assert engine.cancelled == 1
    # The same environment plays again, on another event loop.
    [trajectory] = play(letters() if not silent else environment, ScriptedEngine("ab", tokenizer=tokenizer), tokenizer)
    assert trajectory.reward == 1.0


def test_requests_that_would_change_the_distribution_fail_by_name(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer(4096)
    for agent, message in (
        ({"sampling": {"temperature": 0.3}}, "the agent's sampling.temperature is 0.3, and the run samples with 1.0"),
        ({"sampling": {"top_p": 0.9}}, "sampling settings of the agent that are not supported: top_p"),
        ({"model": "a judge"}, "an agent has the model 'a judge' and no client"),
    ):
        environment = letters(agent=INLINE | agent)
        engine = ScriptedEngine("a", tokenizer=tokenizer)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "megascend"):
            assert play(environment, engine, tokenizer) == []
        assert message in caplog.text
        assert engine.contexts == []
    # A shorter response changes none.
    engine = ScriptedEngine("abc", tokenizer=tokenizer)
    [trajectory] = play(letters(agent={**INLINE, "sampling": {"max_tokens": 2}}), engine, tokenizer)
    assert (trajectory.finish_reason, len(trajectory.tokens), engine.samplings[0].max_tokens) == ("length", 2, 2)


@pytest.mark.parametrize(
    ("package", "options", "message"),
    [
        ("no-such-package", {}, "no-such-package' not found"),
        (
            "earlier-format",
            {},
            "environments written for versions before 0.4 (SingleTurnEnv, ToolEnv, MultiTurnEnv) are not",
        ),
        ("earlier-class", {}, "'MultiTurnEnv'; environments written for versions before 0.4 "),
        ("earlier-class", {}, "its turns as a class with async run(policy, example)"),
        ("letters", {"agent": INLINE}, "tasks without end; set options.select"),
        ("guess-game", {"playr": INLINE}, "playr"),
        ("guess-game", {"renderer": {"name": "none such"}}, "none such"),
    ],
)
def test_unusable_packages_raise_config_errors(package: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.environment: ") as raised:
        verifiers.load(package, options)
    assert message in str(raised.value)


def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, earlier in (("0.1.14", True), ("0.3.1", True), ("0.5.0", False)):
        monkeypatch.setattr(verifiers, "version", lambda name, installed=installed: installed)
        with pytest.raises(
            ConfigError, match=rf"verifiers {installed} is not supported, install verifiers{verifiers.SUPPORTED}"
        ) as error:
            verifiers.load("guess-game", {})
        assert ("written for versions before 0.4" in str(error.value)) == earlier


def test_tasks_that_do_not_exist_are_refused() -> None:
    environment = verifiers.load("guess-game", {"player": INLINE, "select": {"include": {"idx": [1]}}})
    assert [example["idx"] for example in environment.examples] == [1]
    assert environment._task({"idx": 3}).data.number == 3
    for example in ({"idx": 4}, {"prompt": "x"}, {"idx": -1}):
        with pytest.raises(DataError, match=r"has no task 4|is \{'idx': N\}"):
            environment._task(example)


@pytest.mark.nightly_cases("12")  # covered: 2, but for the reward that grows
@pytest.mark.parametrize("steps", [2, 12])
@pytest.mark.usefixtures("megatron_imported")
def test_model_learns_from_a_package_without_a_prompt_file(steps: int, tmp_path: Path) -> None:
    size = ModelSize(hidden=32, layers=1, heads=2, kv_heads=2, context=128)
    write_checkpoint(tmp_path / "model", size, 0)
    (tmp_path / "held_out.jsonl").write_text('{"idx": 40}\n{"idx": 41}\n', encoding="utf-8")
    options = {"agent": INLINE, "select": {"limit": 12}}
    config = settings(
        tmp_path,
        "letters",
        steps=steps,
        optimizer={"lr": 0.03},
        evaluation={"prompts": tmp_path / "held_out.jsonl", "every": 12, "samples": 8, "temperature": 1.0},
        rollout={
            "prompts": None,
            "reward": None,
            "environment": {"name": "verifiers:letters", "options": options},
            "prompts_per_step": 4,
            "group_size": 4,
            "max_tokens": 8,
            "max_lag": 0,  # each step learns from the weights before it, whatever the machine does beside
        },
    )
    result = in_a_fork(lambda: run(config))[0]
    assert result.steps == steps
    metrics = rows(config)
    # Engine and trainer agree on what the engine sampled, with weights of the same version.
    assert metrics[0]["mismatch_max"] < 1e-5
    if steps == 12:
        assert result.totals.reward_after > result.totals.reward_before + 0.3
    lines = [json.loads(line) for line in (config.output / "rollouts.jsonl").read_text().splitlines()]
    assert all(line["rewards"] == {"letters": line["reward"]} for line in lines)
    learned = [line for line in lines if line["outcome"] != "evaluated"]
    assert {line["prompt"] for line in learned} <= {
        f"<|im_start|>user\n{number}?<|im_end|>\n<|im_start|>assistant\n" for number in range(12)
    }


HANGMAN = {"taskset": {"game": "Hangman-v0"}, "select": {"limit": 3}, "player": INLINE}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Write a word list in place of the one that the games would download; its reader keeps it for the process."""
    pytest.importorskip("textarena", reason="pip install 'verifiers[ta]'")
    import nltk

    folder = tmp_path_factory.mktemp("nltk")
    (folder / "corpora" / "words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / "corpora" / "words" / name).write_text("eee", encoding="utf-8")
    nltk.data.path.insert(0, str(folder))


@pytest.fixture
def hangman(words: None) -> Any:
    return verifiers.load("textarena", HANGMAN)


def test_hangman_of_textarena_runs_unmodified(hangman: Any) -> None:
    tokenizer = byte_tokenizer(4096)
    replies = ("[a]<|im_end|>", "Perhaps [E]<|im_end|>")
    engine = ScriptedEngine(*replies, tokenizer=tokenizer)
    [trajectory] = play(hangman, engine, tokenizer)
    check_exact(trajectory, engine, replies, tokenizer)
    assert (trajectory.reward, trajectory.rewards) == (1.0, {"game_reward": 1.0})
    assert "You are playing Hangman" in tokenizer.decode(trajectory.prompt_tokens)
    board = "\n<|im_start|>user\nC00 C01 C02\n  _   _   _<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(trajectory.tokens) == board.join(replies)
