"""Runs whose engines die at any point of sampling and updates, and come back with their first weights."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.rl.learner import Totals
from megascend.apps.rl.rollout.engines.local import LocalEngine
from megascend.apps.rl.train import train_rl
from megascend.apps.train.learner import RunResult
from megascend.config.rl import RlConfig
from megascend.errors import EngineError, EngineLostError, EngineTimeoutError, WeightSyncError
from megascend.testing import run_distributed
from support.rl_runs import DEADLINE_S, rollouts, rows, settings
from weightwire.engine import Completion
from weightwire.engine_calls import LoopThread
from weightwire.errors import ManifestError

pytestmark = [pytest.mark.usefixtures("megatron_imported"), pytest.mark.waiting]
EXACT = 1e-5
"""Largest difference of log-probabilities between an engine and the trainer if both have the same weights."""


class MortalEngine(LocalEngine):
    """Engine in this process that dies at the n-th call of a kind, and has its first weights when it is started again.

    Args:
        death: name of the call, its number from 1, and whether it dies ``before`` or ``after`` the call has had its effect, or
            is started again ``unnoticed``, before the call.
        seconds: for which it cannot be started again.
    """

    def __init__(
        self, *arguments: Any, death: tuple[str, int, str] = ("", 0, ""), seconds: float = 0.3, **options: Any
    ):
        super().__init__(*arguments, own_process=False, **options)
        self.death, self.seconds = death, seconds
        self.calls: list[str] = []
        self.deaths: list[float] = []
        self.dead = threading.Event()

    async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        self.calls.append(call)
        due = (call, self.calls.count(call)) == self.death[:2]
        if due and self.death[2] == "before":
            await self.die()
        if due and self.death[2] == "unnoticed":
            self._host = self._make_host()
        if self.dead.is_set():
            raise EngineLostError(f"{self.name} is dead")
        lives, answer = len(self.deaths), asyncio.ensure_future(super().ask(call, arguments, timeout_s))
        # An answer is lost with the process.
        while not answer.done() and lives == len(self.deaths):
            await asyncio.wait({answer}, timeout=0.01)
        if due and self.death[2] == "after":
            await self.die()
        if lives < len(self.deaths):
            answer.cancel()
            raise EngineLostError(f"{self.name} is dead")
        return answer.result()

    async def die(self) -> None:
        self.dead.set()
        self.deaths.append(asyncio.get_running_loop().time())
        await self._host.close()

    async def revive(self) -> bool:
        if not self.dead.is_set() or asyncio.get_running_loop().time() < self.deaths[-1] + self.seconds:
            return False
        self.calls.append("revive")
        self._host = self._make_host()
        self.dead.clear()
        return True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("availability", "engine_pool"):
        monkeypatch.setattr(f"megascend.apps.rl.rollout.{module}.FIRST_S", 0.2)
        monkeypatch.setattr(f"megascend.apps.rl.rollout.{module}.LONGEST_S", 0.4)


def kill(engine: LocalEngine) -> None:
    host: Any = engine._host
    os.kill(host.process.pid, signal.SIGKILL)


def run(config: RlConfig, *engines: MortalEngine) -> RunResult[Totals]:
    return train_rl(config, engines=lambda config: engines)


def slow_reward(folder: Path) -> str:
    """Write a reward function that makes a step take about half a second, so that disturbances happen during the run."""
    path = folder / "slow.py"
    path.write_text("import time\ndef slow(response, example):\n    time.sleep(0.08)\n    return len(response)\n")
    return f"{path}:slow"


IN_CI = [
    ("full", ("generate", 3, "after")),
    ("full", ("commit", 2, "after")),
    ("delta", ("verify", 2, "before")),
]
MOMENTS = [
    (mode, (call, number, side))
    for mode in ("full", "delta")
    # Of updates by changes only the plan needs the locations.
    for call, number in (("generate", 3), ("locations", 1 if mode == "delta" else 2), ("begin_update", 1))
    + (("begin_update", 2), ("verify", 2), ("commit", 1), ("commit", 2))
    for side in ("before", "after")
]
DEATHS = [
    *(pytest.param(mode, death, id=f"{mode}-{death}") for mode, death in IN_CI),
    *(
        pytest.param(mode, death, id=f"{mode}-{death}", marks=pytest.mark.nightly)
        for mode, death in MOMENTS
        if (mode, death) not in IN_CI
    ),
]


@pytest.mark.parametrize(("mode", "death"), DEATHS)
def test_run_goes_on_without_an_engine_and_gives_it_weights_when_it_is_back(
    folder: Path,
    mode: str,
    death: tuple[str, int, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Compare log-probabilities: without lag, those of engine and trainer are equal only if their weights are."""
    output = f"lost-{mode}-{'-'.join(map(str, death))}"
    rollout = {"max_lag": 0, "prompts_per_step": 3}
    config = settings(folder, output, steps=12, rollout=rollout, sync={"mode": mode, "timeout_s": 20})
    mortal = MortalEngine(folder / "model", name="mortal", death=death)

    class Waiting(MortalEngine):
        """Engine that answers no more than half of the run's prompts until the other one is back: the run could end before."""

        async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
            until = time.monotonic() + DEADLINE_S
            while call == "generate" and self.calls.count(call) >= 18 and time.monotonic() < until:
                if any(message.startswith("mortal answers again") for message in caplog.messages):
                    break
                await asyncio.sleep(0.02)
            return await super().ask(call, arguments, timeout_s)

    sound = Waiting(folder / "model", name="sound", seed=1)
    with caplog.at_level(logging.WARNING):
        assert run(config, mortal, sound).steps == 12
    assert [row["version"] for row in rows(config)] == list(range(1, 13))
    assert all(row["max_lag"] == 0 for row in rows(config))
    assert max(row["mismatch_max"] for row in rows(config)) < EXACT
    assert len([message for message in caplog.messages if message.startswith("mortal is lost")]) == 1
    assert mortal.calls.count("revive") == 1
    # Weights before the first prompt: a commit lies between its start and its next responses.
    after = mortal.calls[mortal.calls.index("revive") :]
    assert after.index("commit") < after.index("generate")
    learned = [line for line in rollouts(config) if line["outcome"] == "learned"]
    assert {line["engine"] for line in learned} == {"mortal", "sound"}
    if mode == "delta":
        # The engine that is back has no base: complete weights for a while, then changes again.
        assert sum(row["sync_share"] not in (None, 1.0) for row in rows(config)) > 6


@pytest.mark.nightly_cases("generate")  # covered: an engine that reports its version and takes no weights
@pytest.mark.parametrize("call", ["generate", pytest.param("begin_update", marks=pytest.mark.nightly)])
def test_run_goes_on_without_an_engine_that_hangs(
    folder: Path,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Stop an engine for six seconds, longer than all deadlines; it still has its old weights then."""
    monkeypatch.setattr("megascend.apps.rl.rollout.engine_pool.VERDICT_S", 0.5)

    class Hanging(MortalEngine):
        until = 0.0

        async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
            if not self.until and (call, self.calls.count(call) + 1) == self.death[:2]:
                self.until = time.monotonic() + 6
            while time.monotonic() < self.until:
                await asyncio.sleep(0.05)
            return await super().ask(call, arguments, timeout_s)

        async def generate(self, *arguments: Any, **options: Any) -> list[Completion]:
            try:
                return await asyncio.wait_for(super().generate(*arguments, **options), 2)
            except asyncio.TimeoutError as error:
                raise EngineTimeoutError("hanging: no answer to generate within 2 s") from error

    rollout = {"max_lag": 0, "reward": slow_reward(folder), "drop_equal": False}
    config = settings(folder, f"hangs-{call}", steps=28, rollout=rollout, sync={"timeout_s": 2})
    hanging = Hanging(folder / "model", name="hanging", death=(call, 3, "hangs"))
    with caplog.at_level(logging.WARNING):
        assert run(config, hanging, MortalEngine(folder / "model", name="sound", seed=1)).steps == 28
    assert max(row["mismatch_max"] for row in rows(config)) < EXACT
    assert sum(message.startswith("hanging is lost") for message in caplog.messages) == 1
    assert [line["engine"] for line in rollouts(config) if line["step"] > 24].count("hanging") > 0
    # Updates do not wait for it again and again.
    assert sum(row["sync_s"] > 0.4 for row in rows(config)) <= 5
    gap = {line["step"] for line in rollouts(config)} - {
        line["step"] for line in rollouts(config) if line["engine"] == "hanging"
    }
    assert len(gap) > 1  # how many depends on the speed of the machine


class Faulty(MortalEngine):
    """Engine that reports its version, and from an update on hangs at a call, or answers it with nonsense and without effect.

    Args:
        fault: name of the call, its first number that fails, and ``hangs`` or ``nonsense``.
        times: number of calls that fail.
    """

    def __init__(self, *arguments: Any, fault: tuple[str, int, str], times: int = 1000, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fault, self.times = fault, times

    async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        name, first, kind = self.fault
        if call != name or not first <= self.calls.count(call) + 1 < first + self.times:
            return await super().ask(call, arguments, timeout_s)
        self.calls.append(call)
        if kind == "hangs":
            await asyncio.sleep(DEADLINE_S)
        return {"version": "newest", "locations": 3, "commit": ["soon"]}


def test_engine_that_takes_weights_again_is_used_again(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("megascend.apps.rl.rollout.engine_pool.PATIENCE", 0)
    config = settings(folder, "faulty-twice", steps=16, rollout={"max_lag": 0}, sync={"timeout_s": 2})
    faulty = Faulty(folder / "model", name="faulty", fault=("commit", 2, "hangs"), times=2)
    with caplog.at_level(logging.WARNING):
        assert run(config, faulty, MortalEngine(folder / "model", name="sound", seed=1)).steps == 16
    assert max(row["mismatch_max"] for row in rows(config)) < EXACT
    assert sum(message.startswith("faulty is lost") for message in caplog.messages) == 1
    assert "faulty" in {line["engine"] for line in rollouts(config) if line["step"] > 12}


def test_run_whose_only_engine_takes_no_weights_ends_by_name(folder: Path) -> None:
    config = settings(folder, "faulty-alone", rollout={"engines_lost_s": 2}, sync={"timeout_s": 2})
    faulty = Faulty(folder / "model", name="faulty", fault=("commit", 2, "hangs"))
    start = time.monotonic()
    with pytest.raises(EngineLostError) as raised:
        run(config, faulty)
    assert time.monotonic() - start < 60
    message = str(raised.value)
    assert message.startswith("no rollout engine could be used for 2 s (rollout.engines_lost_s): faulty: ")
    assert "took no weights, twice (sync.timeout_s: 2): version" in message
    assert "was not committed everywhere: faulty: it did not answer within 2 s" in message


@pytest.mark.nightly_cases("begin_update", "verify")  # covered: commit of an update that is lost with the engine
@pytest.mark.parametrize("call", ["generate", "begin_update", "verify", "commit"])
def test_engine_restarted_unnoticed_gives_no_sample_of_its_first_weights(folder: Path, call: str) -> None:
    config = settings(folder, f"unnoticed-{call}", steps=6, rollout={"max_lag": 0}, sync={"timeout_s": 20})
    mortal = MortalEngine(folder / "model", name="mortal", death=(call, 3, "unnoticed"))
    assert run(config, mortal, MortalEngine(folder / "model", name="sound", seed=1)).steps == 6
    assert max(row["mismatch_max"] for row in rows(config)) < EXACT
    # One update is repeated, or it gets one more. A lost offer of complete weights is one that it can take, if it is not asked
    # for its version meanwhile.
    assert mortal.calls.count("begin_update") in ((7, 8) if call == "begin_update" else (8,))


def test_run_without_any_engine_waits_for_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, call in enumerate(("generate", "commit")):
        evaluation = {"prompts": folder / "prompts.jsonl", "every": 2}
        config = settings(folder, f"alone-{number}", steps=5, rollout={"max_lag": 0}, evaluation=evaluation)
        engine = MortalEngine(folder / "model", name="alone", death=(call, 9 if call == "generate" else 3, "after"))
        with caplog.at_level(logging.WARNING):
            assert run(config, engine).steps == 5
        assert max(row["mismatch_max"] for row in rows(config)) < EXACT
    assert sum("alone is lost, and is asked again" in message for message in caplog.messages) == 2
    assert sum("alone answers again, with weights of version 0" in message for message in caplog.messages) == 2


@pytest.mark.nightly_cases("commit-3")  # covered: generate
@pytest.mark.parametrize(("call", "count"), [("generate", 9), ("commit", 3), ("version", 1)])
def test_run_ends_when_no_engine_comes_back(folder: Path, call: str, count: int) -> None:
    config = settings(folder, f"gone-{call}", rollout={"engines_lost_s": 1}, checkpoint={"every": 50})
    engines = [
        MortalEngine(folder / "model", name=f"engine {index}", death=(call, count, "before"), seconds=DEADLINE_S)
        for index in range(2)
    ]
    with pytest.raises(EngineLostError) as raised:
        run(config, *engines)
    assert re.fullmatch(
        r"no rollout engine could be used for 1 s \(rollout.engines_lost_s\): engine 0: engine 0 is dead; engine 1: engine 1 "
        r"is dead; start them again and resume the run \(--resume auto\)",
        str(raised.value),
    )
    # The steps until then are kept.
    assert (config.output / "checkpoints").exists() == (call != "version")


def test_engine_that_refuses_weights_ends_the_run_and_one_that_returns_with_others_does_not(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(MortalEngine):
        from_update = 2

        async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
            if call == "begin_update" and self.calls.count(call) + 1 >= self.from_update:
                self.calls.append(call)
                raise ManifestError("another model")
            return await super().ask(call, arguments, timeout_s)

    config = settings(folder, "refused", sync={"timeout_s": 20})
    with pytest.raises(WeightSyncError, match="refusing: ManifestError: another model"):
        run(config, Refusing(folder / "model", name="refusing"), MortalEngine(folder / "model", name="sound"))
    assert not (config.output / "metrics.jsonl").exists()
    config = settings(folder, "stays-out", steps=12, sync={"timeout_s": 20})
    refusing = Refusing(folder / "model", name="refusing", death=("generate", 1, "before"), seconds=0.1)
    with caplog.at_level(logging.WARNING):
        assert run(config, refusing, MortalEngine(folder / "model", name="sound")).steps == 12
    assert any("another model" in message for message in caplog.messages)
    assert "commit" not in refusing.calls[refusing.calls.index("revive") :]


def test_all_ranks_go_on_without_an_engine(folder: Path) -> None:
    config = settings(
        folder,
        "ranks",
        steps=6,
        parallel={"tensor": 2},
        rollout={"max_lag": 0},
        sync={"mode": "delta", "timeout_s": 20},
    )

    def on_rank() -> RunResult[Totals]:
        # Two at once; the third sees the run through.
        deaths = (("commit", 3, "before"), ("verify", 3, "after"), ("", 0, ""))
        return train_rl(
            config,
            engines=lambda config: [
                MortalEngine(folder / "model", name=f"engine {index}", seed=index, death=death)
                for index, death in enumerate(deaths)
            ],
        )

    first, second = run_distributed(on_rank, 2, init=False, timeout_s=DEADLINE_S)
    assert first.steps == second.steps == 6
    assert max(row["mismatch_max"] for row in rows(config)) < EXACT


@pytest.mark.nightly
def test_killed_local_engine_is_started_again_a_bounded_number_of_times(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Killed(LocalEngine):
        kills: tuple[int, ...] = ()
        calls = 0

        async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
            if call == "generate":
                self.calls += 1
                if self.calls in self.kills:
                    kill(self)
            return await super().ask(call, arguments, timeout_s)

    def killed(*kills: int) -> Killed:
        engine = Killed(folder / "model", name="killed")
        engine.kills = kills
        return engine

    config = settings(folder, "killed", steps=4, rollout={"max_lag": 0})
    assert train_rl(config, engines=lambda config: [killed(4)]).steps == 4
    assert max(row["mismatch_max"] for row in rows(config)) < EXACT
    monkeypatch.setattr("megascend.apps.rl.rollout.engines.guarded.RESTARTS", 1)
    with LoopThread("calls") as thread:
        engine = killed()
        assert thread.run(engine.version()) == 0
        assert not thread.run(engine.revive())
        engine._restarts.note("once before")
        kill(engine)
        with pytest.raises(EngineLostError, match="has ended with exit code -9"):
            thread.run(engine.version())
        with pytest.raises(EngineError, match=r"has ended with exit code -9, after 1 restarts within 3600 s"):
            thread.run(engine.revive())
        thread.run(engine.close())


@pytest.mark.nightly_cases("2")  # covered: 6
@pytest.mark.parametrize("foreign", [0, 2, 6, 30])
def test_engine_that_joins_later_with_weights_of_another_run_is_not_used(
    folder: Path, foreign: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Check all versions that it can have: the number of this run's current weights is one of them."""

    class Late(MortalEngine):
        foreign = 0

        async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
            if call == "version" and self.calls.count("version") < 2:
                self.calls.append(call)
                raise EngineLostError("late is not there yet")
            answer = await super().ask(call, arguments, timeout_s)
            return {"version": self.foreign} if call == "version" else answer

    config = settings(folder, f"foreign-{foreign}", steps=10, rollout={"max_lag": 0}, sync={"timeout_s": 20})
    late, sound = Late(folder / "model", name="late"), MortalEngine(folder / "model", name="sound", seed=1)
    late.foreign = foreign
    with caplog.at_level(logging.WARNING):
        assert run(config, late, sound).steps == 10
    assert max(row["mismatch_max"] for row in rows(config)) < EXACT
    # With an older version it gets this run's weights; with any other one, nothing.
    used = "generate" in late.calls
    assert used == ("commit" in late.calls)
    assert (used, foreign) not in ((False, 0), (True, 30))
    refusals = [message for message in caplog.messages if f"has weights of version {foreign} from elsewhere" in message]
    # One that was refused at that version gets this run's weights once the run is beyond it.
    assert used or refusals
