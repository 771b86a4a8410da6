"""A run whose trainer, controller, engines and environment's tools are killed at random learns what an undisturbed one learns.

Four kinds of real processes are killed with SIGKILL while prompts are in flight, and started again. Responses depend on prompt
and seed only, like recordings, and their order is fixed, so that every figure can be compared exactly.

MEGASCEND_KILLS: number of kills of each kind (default 2; the nightly test: 50).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megascend.app.rl.train import train_rl
from megascend.bootstrap import bootstrap
from megascend.config.rl import RlConfig
from megascend.rollout.controller.client import ControllerEngine
from megascend.rollout.controller.controller import Controller
from megascend.rollout.controller.server import ControllerServer
from support.forked_programs import run_forked
from support.rl_runs import RecordedEngine, folder, rows, settings  # noqa: F401
from weightwire.engine import Completion, Sampling
from weightwire.keys import Key, generate_key

KINDS = ("trainer", "controller", "engine", "environment")
ENGINES = 2
DEADLINE_S = 120
STEPS_A_KILL = 8
ENVIRONMENT = '''
import asyncio, os, subprocess, sys, threading

TOOL = "import sys\\nfor line in sys.stdin:\\n    print(sum(map(ord, line.strip())) % 97, flush=True)\\n"

class Tool:
    """A tool in a process of its own, which is started again when it has died."""

    def __init__(self, pid_file):
        self.pid_file, self.lock, self.process = pid_file, threading.Lock(), None

    def __call__(self, text):
        with self.lock:
            for _ in range(50):
                try:
                    if self.process is None:
                        pipe = subprocess.PIPE
                        self.process = subprocess.Popen(
                            [sys.executable, "-IS", "-c", TOOL], stdin=pipe, stdout=pipe, text=True
                        )
                        with open(self.pid_file + ".new", "w") as file:
                            file.write(str(self.process.pid))
                        os.replace(self.pid_file + ".new", self.pid_file)
                    self.process.stdin.write(text + "\\n")
                    self.process.stdin.flush()
                    return int(self.process.stdout.readline())
                except (OSError, ValueError):
                    self.process.wait()
                    self.process = None
            raise RuntimeError("the tool does not answer")

class Sums:
    def __init__(self, pid_file):
        self.tool = Tool(pid_file)

    async def run(self, policy, example):
        conversation = policy.conversation(example["prompt"])
        first = await conversation.reply()
        result = await asyncio.to_thread(self.tool, first)
        conversation.add(f" {result} ")
        second = await conversation.reply()
        return conversation.trajectory((result + sum(map(ord, second))) % 89)
'''


class SlowRecording(RecordedEngine):
    """Recorded responses that take a moment, so that some are always on their way."""

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1, adapter: str | None = None
    ) -> list[Completion]:
        await asyncio.sleep(0.02)
        return await super().generate(list(prompt), sampling, n, adapter)


def serve(engines: Callable[[], list[Any]], key: str, publish: Path) -> None:
    """Serve engines until this process is killed."""

    async def run() -> None:
        async with ControllerServer(Controller(engines()), Key(key), publish=publish):
            await asyncio.Event().wait()

    asyncio.run(run())


class World:
    """The processes of a run, each forked from this one; they are started again until the run has ended."""

    def __init__(self, folder: Path, config: RlConfig) -> None:  # noqa: F811
        self.folder, self.config, self.key = folder, config, generate_key()
        self.kills: Counter[str] = Counter()
        self.problems: list[str] = []
        self._processes: dict[str, Any] = {}
        for name in [*(f"engine {number}" for number in range(ENGINES)), "controller", "trainer"]:
            self.start(name)

    def start(self, name: str) -> None:
        process = multiprocessing.get_context("fork").Process(target=self._main, args=(name,), name=name)
        process.start()
        self._processes[name] = process

    def _main(self, name: str) -> None:
        # Not the test's handlers, and no output between its dots.
        with open(self.folder / f"{name}.log", "ab") as output:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
        if name == "trainer":
            train_rl(self.config, resume="auto", engines=self._engines)
        elif name == "controller":
            # Leases of a second: the processes that pending them are dead.
            serve(
                lambda: [self._client(engine, f"engine {engine}.json") for engine in range(ENGINES)],
                self.key,
                self._file("controller.json"),
            )
        else:
            model = self.config.model
            serve(lambda: [SlowRecording(model, name=name, own_process=False)], self.key, self._file(f"{name}.json"))

    def _file(self, name: str) -> Path:
        return self.folder / name

    def _client(self, number: int, publish: str) -> ControllerEngine:
        client = ControllerEngine(
            self._file(publish),
            Key(self.key),
            owner=f"owner of {number}",
            engines=[f"engine {number}"],
            lease_s=1,
            wait_s=10,
            timeout_s=2,
        )
        client.name = f"engine {number}"
        return client

    def _engines(self, config: RlConfig) -> list[ControllerEngine]:
        return [self._client(number, "controller.json") for number in range(ENGINES)]

    def kill(self, kind: str, draw: random.Random) -> None:
        """Kill a process, and start it again a moment later."""
        if kind == "environment":
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int(self._file("tool.pid").read_text()), signal.SIGKILL)
                self.kills[kind] += 1
            return
        name = kind if kind != "engine" else f"engine {draw.randrange(ENGINES)}"
        process = self._processes[name]
        if not process.is_alive():
            self.problems.append(f"{name} had ended with {process.exitcode}")
        process.kill()
        process.join(DEADLINE_S)
        self.kills[kind] += 1
        time.sleep(draw.uniform(0, 0.3))
        self.start(name)

    def steps(self) -> int:
        with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
            return json.loads((self.config.output / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    def wait(self) -> None:
        self._processes["trainer"].join(DEADLINE_S)
        if self._processes["trainer"].exitcode != 0:
            self.problems.append(f"the trainer has ended with {self._processes['trainer'].exitcode}")

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()


def configured(folder: Path, output: str, kills: int) -> RlConfig:  # noqa: F811
    (folder / "environment.py").write_text(ENVIRONMENT)
    environment = {"name": f"{folder / 'environment.py'}:Sums", "options": {"pid_file": str(folder / "tool.pid")}}
    rollout = {
        "reward": None,
        "environment": environment,
        "in_order": True,
        "records": {"tokens": True, "show_every": 0},
    }
    checkpoint = {"every": 1, "keep_last": 2}
    return settings(
        folder, output, steps=STEPS_A_KILL * kills, rollout=rollout, checkpoint=checkpoint, sync={"timeout_s": 10}
    )


def learned(config: RlConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return figures and trajectories without what depends on time: who sampled what, how far ahead, and how long it took."""
    timed = {"seconds", "tokens_per_s", "idle", "wait_s", "sync_s", "pause_s", "sync_bytes", "sync_share"}
    unordered = {"reward", "equal", "stale", "prompts", "lag", "max_lag", "length", "turns"}
    figures = [{name: value for name, value in row.items() if name not in timed | unordered} for row in rows(config)]
    lines = [json.loads(line) for line in (config.output / "rollouts.jsonl").read_text().splitlines()]
    fields = (
        "step",
        "outcome",
        "prompt_number",
        "reward",
        "advantage",
        "prompt_tokens",
        "tokens",
        "sampled",
        "logprobs",
    )
    return figures, [{name: line[name] for name in fields} for line in lines if line["outcome"] == "learned"]


def check_counts(config: RlConfig, trajectories: list[dict[str, Any]]) -> None:
    """Check that each prompt was learned from once or dropped once, and that the last checkpoint says the same."""
    rollout, steps = config.rollout, config.steps
    times = Counter(line["prompt_number"] for line in trajectories)
    assert len(times) == steps * rollout.prompts_per_step
    assert set(times.values()) == {rollout.group_size}
    manifest = json.loads((config.output / "checkpoints" / f"step-{steps:08}" / "megascend.json").read_text())
    state = manifest["progress"]["rollouts"]["buffer"]
    counts = state["counts"]
    assert counts["learned"] == steps * rollout.prompts_per_step
    pending = [*(waiting["number"] for waiting in state["waiting"]), *(group["number"] for group in state["ready"])]
    assert len(set(pending)) == len(pending)
    assert not set(pending) & times.keys()
    outcomes = ("learned", "equal", "discarded", "stale")
    assert counts["dispatched"] == len(pending) + sum(counts[outcome] for outcome in outcomes)
    assert (counts["stale"], counts["discarded"], counts["failed"], counts["timed_out"]) == (0, 0, 0, 0)
    assert counts["responses"] == (counts["dispatched"] - len(state["waiting"])) * rollout.group_size


def test_killed_processes_change_nothing_that_is_learned(folder: Path) -> None:  # noqa: F811
    run_disturbed(folder, int(os.environ.get("MEGASCEND_KILLS", "2")))


@pytest.mark.nightly
def test_fifty_kills_of_each_process_change_nothing_that_is_learned(folder: Path) -> None:  # noqa: F811
    run_disturbed(folder, 50)


def run_disturbed(folder: Path, kills: int) -> None:  # noqa: F811
    """Call :func:`disturb` in a process without threads: all others are forks of it."""
    completed = run_forked(Path(__file__), folder, kills, timeout_s=3 * DEADLINE_S + 60 * kills)
    assert completed.returncode == 0, completed.stderr[-4000:]


def disturb(folder: Path, kills: int) -> None:  # noqa: F811
    reference, disturbed = (configured(folder, f"{name}-{kills}", kills) for name in ("reference", "disturbed"))
    process = multiprocessing.get_context("fork").Process(
        target=train_rl,
        args=(reference,),
        kwargs={"engines": lambda config: [SlowRecording(config.model, name="engine 0", own_process=False)]},
    )
    process.start()
    process.join(DEADLINE_S + 10 * kills)
    assert process.exitcode == 0
    draw = random.Random(7)
    order = [kind for kind in KINDS for _ in range(kills)]
    draw.shuffle(order)
    world = World(folder, disturbed)
    try:
        last = -1
        for kind in order:
            # Each after some progress since the last one, or nothing else would ever happen.
            end = time.monotonic() + DEADLINE_S
            while world.steps() <= last and time.monotonic() < end:
                time.sleep(0.02)
            last = world.steps()
            assert last < disturbed.steps, f"the run ended after {world.kills}"
            time.sleep(draw.uniform(0, 0.3))
            world.kill(kind, draw)
        world.wait()
    finally:
        world.close()
    assert world.problems == []
    assert min(world.kills[kind] for kind in KINDS) >= kills - 1
    expected, actual = learned(reference), learned(disturbed)
    assert actual[1] == expected[1]
    assert actual[0] == expected[0]
    assert len({row["loss"] for row in actual[0]}) == disturbed.steps
    check_counts(disturbed, actual[1])


if __name__ == "__main__":
    bootstrap("cpu").load_megatron()
    disturb(Path(sys.argv[1]), int(sys.argv[2]))
