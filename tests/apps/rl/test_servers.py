"""vLLM servers that a run starts: their GPUs, options and environment, and their sleep beside a trainer. Servers are doubles."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megascend.apps.data.samples import SampleLimits
from megascend.apps.rl import servers as module
from megascend.apps.rl.engines import make_engines
from megascend.apps.rl.rollout.engines.placement import place_engines
from megascend.apps.rl.servers import check_servers, share_beside_trainer, start_servers
from megascend.config.rl import RlConfig
from megascend.errors import ConfigError, EngineError, EngineLostError
from megascend.runtime.distributed.launch import Launch

LIMITS = SampleLimits(96)


class Process:
    """Double of a vLLM server's process."""

    def __init__(self, python: Path, model: Path, **settings: Any) -> None:
        self.settings, self.closed, self.waited = settings, False, False
        self.ended, self.restarts = False, 0
        self.address = f"http://127.0.0.1:{8000 + len(STARTED)}"
        STARTED.append(self)

    def wait_until_listening(self, timeout_s: float) -> None:
        self.waited = True

    def restart(self) -> None:
        self.ended, self.restarts = False, self.restarts + 1
        self.address = "http://127.0.0.1:9000"

    def close(self) -> None:
        self.closed = True


class Client(module.StartedVllm):
    """Client of a server that lists its calls in place of sending them."""

    def __init__(self, process: Any, **settings: Any) -> None:
        super().__init__(process, **settings)
        self.calls: list[str] = []
        self.renewed = threading.Event()

    async def sleep(self, lease_s: float) -> None:
        if self.ended:
            raise EngineLostError("it has ended")
        self.calls.append("sleep")
        if self.calls.count("sleep") > 2:
            self.renewed.set()

    async def resume(self) -> None:
        self.calls.append("resume")


STARTED: list[Process] = []


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    STARTED.clear()
    monkeypatch.setattr(module, "VllmProcess", Process)
    monkeypatch.setattr(module, "StartedVllm", Client)
    monkeypatch.setattr(module, "vllm_device", lambda python: "cuda")
    monkeypatch.setattr(module, "_gpus", lambda: ["a", "b", "c", "d"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d")


def config_of(tmp_path: Path, **settings: Any) -> RlConfig:
    rollout = {"prompts": "p", "reward": "m:f"}
    return RlConfig(model=tmp_path / "m", output=tmp_path / "o", steps=1, rollout=rollout, **settings)


def test_engines_get_free_gpus_and_end_with_the_run(tmp_path) -> None:
    config = config_of(tmp_path, engines=("vllm", "http://host:1", "vllm"), vllm={"options": ("--seed=1",)})
    with ExitStack() as stack:
        servers = start_servers(config, Launch(local_size=2), LIMITS, stack)
        assert [process.settings["environment"] for process in STARTED] == [
            {"CUDA_VISIBLE_DEVICES": "c"},
            {"CUDA_VISIBLE_DEVICES": "d"},
        ]
        for process in STARTED:
            options = ["--dtype=bfloat16", "--max-model-len=96", "--gpu-memory-utilization=0.7", "--seed=1"]
            assert process.settings["options"] == options
            assert process.settings["key_file"].stat().st_mode & 0o777 == 0o600
        assert STARTED[1].settings["log"] == tmp_path / "o.vllm-2.log"
        assert not any(process.waited for process in STARTED), "the trainer loads its model meanwhile"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "a,b,c,d"
        assert servers is not None
        assert servers.client(2).name == "vLLM at 127.0.0.1:8001"
        assert servers.client(2) is servers.client(2)
        folder = STARTED[0].settings["key_file"].parent
    assert all(process.closed for process in STARTED)
    assert not folder.exists()


def test_named_gpus_are_set_on_every_rank_after_the_servers_start(tmp_path) -> None:
    placement = {"trainer": [3, 2], "engines": [[0, 1]], "memory": 0.8}
    config = config_of(tmp_path, engines=("vllm",), placement=placement)
    with ExitStack() as stack:
        assert start_servers(config, Launch(rank=1, local_rank=1, world_size=2, local_size=2), LIMITS, stack) is None
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "d,c"
    assert not STARTED
    os.environ["CUDA_VISIBLE_DEVICES"] = "a,b,c,d"
    with ExitStack() as stack:
        start_servers(config, Launch(world_size=2, local_size=2), LIMITS, stack)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "d,c"
    (process,) = STARTED
    assert process.settings["environment"] == {"CUDA_VISIBLE_DEVICES": "a,b"}
    assert process.settings["options"][2:] == ["--gpu-memory-utilization=0.8", "--tensor-parallel-size=2"]


def test_impossible_placement_starts_nothing(tmp_path) -> None:
    config = config_of(tmp_path, engines=("vllm",), placement={"engines": [[7]]})
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"placement\.engines\[0\] names GPU 7; visible are 4"):
        start_servers(config, Launch(), LIMITS, stack)
    assert not STARTED


@pytest.mark.parametrize("sleep", [False, True])
def test_engine_on_the_trainers_gpu_starts_first_and_may_sleep(tmp_path, monkeypatch, sleep) -> None:
    monkeypatch.setattr(module, "_gpus", lambda: ["a"])
    monkeypatch.setattr(module, "SLEEP_S", 0.03)
    config = config_of(tmp_path, engines=("vllm",), placement={"sleep": sleep})
    with ExitStack() as stack:
        servers = start_servers(config, Launch(), LIMITS, stack)
        (process,) = STARTED
        assert process.waited, "vLLM measures the free memory while it starts"
        assert ("--enable-sleep-mode" in process.settings["options"]) == sleep
        assert servers is not None
        (engine,) = make_engines(config, servers)
        client: Any = engine
        if sleep:
            assert client.renewed.wait(30)  # until the first push
        servers.wake()
        calls = list(client.calls)
        assert calls == [*["sleep"] * (len(calls) - 1), "resume"] if sleep else calls == []
        servers.sleep()
        servers.wake()
        servers.wake()  # a no-op
        later = client.calls[len(calls) :]
        assert (later[:1], later[-1:]) == ((["sleep"], ["resume"]) if sleep else ([], []))


@pytest.mark.parametrize("sleep", [False, True])
def test_server_that_has_ended_is_started_again_but_not_while_the_trainer_uses_its_gpu(
    tmp_path, monkeypatch, sleep
) -> None:
    monkeypatch.setattr("megascend.apps.rl.rollout.engines.guarded.RESTARTS", 1)
    monkeypatch.setattr(module, "_gpus", lambda: ["a"])
    with ExitStack() as stack:
        servers = start_servers(
            config_of(tmp_path, engines=("vllm",), placement={"sleep": sleep}), Launch(), LIMITS, stack
        )
        assert servers is not None
        servers.wake()
        (process,) = STARTED
        client: Any = servers.client(0)
        assert not asyncio.run(client.revive())
        process.ended, process.waited = True, False
        servers.sleep()
        assert asyncio.run(client.revive()) == (not sleep)
        servers.wake()
        assert (process.restarts, process.waited) == (1, True)
        assert client._server.name == "vLLM at 127.0.0.1:9000"
        assert client.name == "vLLM at 127.0.0.1:8000"
        # The second end within an hour is too much; the run goes on without this server.
        process.ended = True
        servers.sleep()
        servers.wake()
        if not sleep:
            with pytest.raises(EngineError, match="8000 has ended, after 1 restarts within 3600 s"):
                asyncio.run(client.revive())
        assert process.restarts == 1


def test_missing_interpreter_is_refused_without_a_start(tmp_path) -> None:
    config = config_of(tmp_path, engines=("vllm",), vllm={"python": tmp_path / "python"})
    with pytest.raises(ConfigError, match=r"engines: vllm: no interpreter at .*; or set vllm\.python"):
        check_servers(config)
    check_servers(config_of(tmp_path, engines=("local",)))


def test_share_beside_the_trainer_is_that_of_all_engines_on_its_gpu() -> None:
    assert share_beside_trainer(place_engines(["0"], 1, 2), sleep=False) == pytest.approx(0.35)
    assert share_beside_trainer(place_engines(["0"], 1, 2), sleep=True) == 0
    assert share_beside_trainer(place_engines(["0", "1"], 1, 1), sleep=False) == 0
    mixed = place_engines(["0", "1", "2"], 2, 2, engine_gpus=[[1], [1, 2]], memory=0.3)
    assert share_beside_trainer(mixed, sleep=False) == pytest.approx(0.6)
    assert share_beside_trainer([], sleep=False) == 0
