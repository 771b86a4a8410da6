"""A run whose trainer, controller, engines and environment's tools are killed at random learns what an undisturbed one learns.

Four kinds of real processes are killed with SIGKILL while prompts are in flight, and started again. Responses depend on prompt
and seed only, like recordings, and their order is fixed, so that every figure can be compared exactly.

MEGASCEND_KILLS: number of kills of each kind (default 1; the nightly test: 50).

Of a trainer of several ranks, one is killed at random: the others must end by name. In the nightly test it is the command itself,
with its launcher and its own engine processes, none of which may be left behind.
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

from megascend.apps.rl.rollout.controller.client import ControllerEngine
from megascend.apps.rl.rollout.controller.controller import Controller
from megascend.apps.rl.rollout.controller.server import ControllerServer
from megascend.apps.rl.train import train_rl
from megascend.config import Parallel
from megascend.config.rl import RlConfig
from megascend.runtime.bootstrap import bootstrap
from support.forked_programs import run_forked
from support.rl_runs import RecordedEngine, folder, rows, settings  # noqa: F401
from support.waiting import free_port
from weightwire.engine import Completion, Sampling
from weightwire.keys import Key, generate_key

KINDS = ("trainer", "controller", "engine", "environment")
ENGINES = 2
DEADLINE_S = 120
STEPS_A_KILL = 8
TIMEOUT_S = 30
"""Deadline of the ranks' collectives."""
ENDED_S = TIMEOUT_S + 15
"""Seconds within which the others must have ended: docs/reliability.md promises the deadline and a few seconds, in which the hang
monitor of a rank whose wait raises nothing looks at its peers."""
LAYOUTS = {"": Parallel(), "DP2": Parallel(), "TP2": Parallel(tensor=2)}
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


def fork(target: Callable[..., Any], *arguments: Any, name: str = "") -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments, name=name)
    process.start()
    return process


def as_rank(rank: int, size: int, port: int, train: Callable[[], Any]) -> None:
    """Call ``train()`` as one rank of a launcher."""
    if size > 1:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(value) for name, value in variables.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class World:
    """The processes of a run, each forked from this one; they are started again until the run has ended.

    Args:
        ranks: processes of the trainer.
    """

    def __init__(self, folder: Path, config: RlConfig, ranks: int = 1) -> None:  # noqa: F811
        self.folder, self.config, self.key = folder, config, generate_key()
        self.kills: Counter[str] = Counter()
        self.problems: list[str] = []
        self._processes: dict[str, Any] = {}
        self._trainers = ["trainer"] if ranks == 1 else [f"trainer {rank}" for rank in range(ranks)]
        self._port = 0
        for name in [*(f"engine {number}" for number in range(ENGINES)), "controller"]:
            self.start(name)
        self._start_trainers()

    def _start_trainers(self) -> None:
        self._port = free_port()
        for name in self._trainers:
            self.start(name)

    def start(self, name: str) -> None:
        self._processes[name] = fork(self._main, name, name=name)

    def _main(self, name: str) -> None:
        # Not the test's handlers, and no output between its dots.
        with open(self.folder / f"{name}.log", "ab") as output:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
        if name in self._trainers:
            rank = self._trainers.index(name)

            def train() -> None:
                train_rl(self.config, resume="auto", engines=self._engines)

            as_rank(rank, len(self._trainers), self._port, train)
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
        if kind == "trainer" and len(self._trainers) > 1:
            self._kill_rank(draw)
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

    def _kill_rank(self, draw: random.Random) -> None:
        """Kill a rank of several, see that the others end by name and leave nothing behind, and start all of them again."""
        names = draw.sample(self._trainers, len(self._trainers))
        killed, survivors = self._processes[names[0]], [self._processes[name] for name in names[1:]]
        tool = int(self._file("tool.pid").read_text())
        logs = {path: path.stat().st_size for path in self.folder.glob("trainer *.log")}
        killed.kill()
        killed.join(DEADLINE_S)
        self.kills["trainer"] += 1
        for name, process in zip(names[1:], survivors, strict=True):
            process.join(ENDED_S)
            if process.exitcode in (None, 0):
                self.problems.append(f"{name} has ended with {process.exitcode} within {ENDED_S} s")
        rank = self._trainers.index(names[0])
        if not wait_until(lambda: not is_running(tool), 20):
            self.problems.append(f"the tool of the environment is left, process {tool}")
        output = "".join(path.read_bytes()[size:].decode() for path, size in logs.items())
        # Rank 0 of ranks without a launcher serves their records.
        if ("rank 1 is gone: its process has ended" if rank else "is gone") not in output.lower():
            self.problems.append(f"rank {rank} is not named: {output[-3000:]}")
        self._start_trainers()

    def steps(self) -> int:
        return last_step(self.config)

    def wait(self) -> None:
        for name in self._trainers:
            self._processes[name].join(DEADLINE_S)
            if self._processes[name].exitcode != 0:
                self.problems.append(f"{name} has ended with {self._processes[name].exitcode}")

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()


def configured(folder: Path, output: str, kills: int, layout: str = "") -> RlConfig:  # noqa: F811
    (folder / "environment.py").write_text(ENVIRONMENT)
    environment = {"name": f"{folder / 'environment.py'}:Sums", "options": {"pid_file": str(folder / "tool.pid")}}
    rollout = {
        "reward": None,
        "environment": environment,
        "in_order": True,
        "records": {"tokens": True, "show_every": 0},
    }
    checkpoint = {"every": 1, "keep_last": 2}
    changes = {"parallel": LAYOUTS[layout], "timeout_s": TIMEOUT_S} if layout else {}
    return settings(
        folder,
        output,
        steps=STEPS_A_KILL * kills,
        rollout=rollout,
        checkpoint=checkpoint,
        sync={"timeout_s": 10},
        **changes,
    )


def last_step(config: RlConfig) -> int:
    with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
        return json.loads((config.output / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    return 0


def may_be_killed(config: RlConfig, ranks: int) -> bool:
    """Check that ranks know each other, and have something to resume from. One alone may be killed before that."""
    return ranks == 1 or any((config.output / "checkpoints").glob("step-*/megascend.json"))


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


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
    run_disturbed(folder, int(os.environ.get("MEGASCEND_KILLS", "1")))


@pytest.mark.nightly
def test_fifty_kills_of_each_process_change_nothing_that_is_learned(folder: Path) -> None:  # noqa: F811
    run_disturbed(folder, 50)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["DP2", "TP2"])
def test_killed_rank_of_several_ends_the_run_by_name_and_changes_nothing_that_is_learned(
    folder: Path,  # noqa: F811
    layout: str,
) -> None:
    run_disturbed(folder, 10, layout)


def run_disturbed(folder: Path, kills: int, layout: str = "") -> None:  # noqa: F811
    """Call :func:`disturb` in a process without threads: all others are forks of it."""
    completed = run_forked(Path(__file__), folder, kills, layout, timeout_s=3 * DEADLINE_S + 60 * kills)
    assert completed.returncode == 0, completed.stderr[-4000:]


def disturb(folder: Path, kills: int, layout: str = "") -> None:  # noqa: F811
    """Kill processes of all kinds or, of a trainer with a layout of two ranks, one of these at a time."""
    reference, disturbed = (
        configured(folder, f"{name}-{layout}-{kills}", kills, layout) for name in ("reference", "disturbed")
    )
    ranks, port = 2 if layout else 1, free_port()
    kinds = ("trainer",) if layout else KINDS

    def undisturbed() -> None:
        train_rl(reference, engines=lambda config: [SlowRecording(config.model, name="engine 0", own_process=False)])

    processes = [fork(as_rank, rank, ranks, port, undisturbed) for rank in range(ranks)]
    for process in processes:
        process.join(DEADLINE_S + 10 * kills)
        assert process.exitcode == 0
    draw = random.Random(7)
    order = [kind for kind in kinds for _ in range(kills)]
    draw.shuffle(order)
    world = World(folder, disturbed, ranks)
    try:
        last = -1
        for kind in order:
            # Each after some progress since the last one, or nothing else would ever happen.
            end = time.monotonic() + DEADLINE_S
            while (world.steps() <= last or not may_be_killed(disturbed, ranks)) and time.monotonic() < end:
                time.sleep(0.02)
            last = world.steps()
            assert last < disturbed.steps, f"the run ended after {world.kills}"
            time.sleep(draw.uniform(0, 0.3))
            world.kill(kind, draw)
            if ranks > 1:  # steps until the kill show nothing of the next start
                last = world.steps()
        world.wait()
    finally:
        world.close()
    assert not world.problems, world.problems
    assert min(world.kills[kind] for kind in kinds) >= kills - 1
    expected, actual = learned(reference), learned(disturbed)
    assert actual[1] == expected[1]
    assert actual[0] == expected[0]
    assert len({row["loss"] for row in actual[0]}) == disturbed.steps
    check_counts(disturbed, actual[1])


# --- one rank of several ---


if __name__ == "__main__":
    bootstrap("cpu").load_megatron()
    disturb(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
