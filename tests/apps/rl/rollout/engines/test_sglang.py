"""The SGLang adapter with a double of SGLang's HTTP interface: no wheel of SGLang is compatible with this torch.

The double has the routes that the adapter calls, and state: it loads safetensors files, "generates" from the loaded weights,
does not answer while paused, and fails on demand. The behaviour of a real SGLang is not tested here.
"""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascend.apps.rl.rollout.engines.sglang import SglangEngine
from megascend.errors import ConfigError, EngineError, EngineLostError
from weightwire.engine import Sampling
from weightwire.errors import CommitError, DigestError, NotServingError, UpdateError
from weightwire.group import Listener, join
from weightwire.manifest import Manifest
from weightwire.offer import Offer, Seal
from weightwire.sender import Sender, spec_of
from weightwire.transports import Setup, make_transport


class Double(ThreadingHTTPServer):
    """SGLang's state as the adapter sees it. A log-probability identifies the loaded weights."""

    daemon_threads = True

    def __init__(self, model: Path) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.weights = load_file(model / "model.safetensors")
        self.running = threading.Event()
        self.running.set()
        self.failing: set[str] = set()
        self.calls: list[str] = []
        self.seeds: list[int | None] = []

    @property
    def value(self) -> float:
        return float(self.weights["weight"].sum())


class Routes(BaseHTTPRequestHandler):
    server: Double

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls.append(self.path)
        status, answer = getattr(self, self.path[1:])(fields)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None: ...

    def generate(self, fields: dict[str, Any]) -> tuple[int, Any]:
        assert self.server.running.wait(30)
        if isinstance(fields["input_ids"][0], list):  # a batch
            requests = zip(fields["input_ids"], fields["sampling_params"], strict=True)
            parts = [self.generate({**fields, "input_ids": ids, "sampling_params": one}) for ids, one in requests]
            return 200, [answer for _, answer in parts]
        value, params = self.server.value, fields["sampling_params"]
        self.server.seeds.append(params.get("sampling_seed"))
        meta = {
            "finish_reason": {"type": "length", "length": params["max_new_tokens"]},
            "output_token_logprobs": [[value, 5, None]] * params["max_new_tokens"],
            "input_token_logprobs": [[None, fields["input_ids"][0], None]]
            + [[value, token, None] for token in fields["input_ids"][1:]],
        }
        if count := fields.get("top_logprobs_num"):
            # Of each position: 10, 11 ... likeliest first.
            top = [[value - index, 10 + index, None] for index in range(count)]
            meta["input_top_logprobs"] = [None] + [top] * (
                len(fields["input_ids"]) - 1 - ("top" in self.server.failing)
            )
        response = {"meta_info": meta}
        return 200, response if params.get("n", 1) == 1 else [response] * params["n"]

    def pause_generation(self, fields: dict[str, Any]) -> tuple[int, Any]:
        assert fields["mode"] == "retract"
        self.server.running.clear()
        if "pause" in self.server.failing:
            return 500, {"error": "paused, and failed afterwards"}
        return 200, {"status": "ok"}

    def continue_generation(self, fields: dict[str, Any]) -> tuple[int, Any]:
        self.server.running.set()
        return 200, {"status": "ok"}

    def update_weights_from_disk(self, fields: dict[str, Any]) -> tuple[int, Any]:
        assert not self.server.running.is_set()
        path = Path(fields["model_path"])
        kind = "new" if path.name == "version-2" else "old"
        if kind in self.server.failing:
            self.server.weights = {"weight": torch.full((4,), torch.nan)}  # half of them
            return 400, {"success": False, "message": f"cannot load {path.name}"}
        assert (path / "config.json").is_file()
        self.server.weights = load_file(path / "model.safetensors")
        return 200, {"success": True, "message": "Succeeded to update model weights."}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def double(model: Path) -> Iterator[Double]:
    server = Double(model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def engine(double: Double, model: Path, tmp_path: Path) -> SglangEngine:
    return SglangEngine(f"http://127.0.0.1:{double.server_port}", model=model, directory=tmp_path / "versions")


async def push(engine: SglangEngine, version: int, value: float, flip: bool = False) -> None:
    tensor, listener = torch.full((4,), value), Listener()
    manifest = Manifest(version, (spec_of("weight", tensor),))
    name = listener.new_group(["trainer", engine.name])
    offer = Offer(name, "test", listener.host, listener.port, 1, await engine.receivers(), "gloo", 20.0, 60.0, manifest)
    await engine.begin_update(offer)

    def send() -> Seal:
        group = join(listener.host, listener.port, name, 0, 20.0)
        transport = make_transport("gloo", Setup(group, manifest, torch.device("cpu"), 20.0))
        try:
            sender = Sender(manifest, group, transport, device=torch.device("cpu"), timeout_s=20.0)
            return sender.send([("weight", tensor)])
        finally:
            transport.close()
            group.close()

    seal = await asyncio.to_thread(send)
    if flip:
        seal = Seal(seal.update, seal.version, seal.manifest, ("0" * 16,))
    await engine.verify(seal, 20.0)
    await engine.commit(name)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_update_is_loaded_while_paused_and_version_is_reported(engine, double, tmp_path):
    async def act():
        assert await engine.logprobs([1, 2, 3]) == [4.0, 4.0]
        await push(engine, 1, 2.0)
        await push(engine, 2, 3.0)
        return await engine.generate([1, 2], Sampling(max_tokens=3), n=2), await engine.version()

    completions, version = run(act())
    assert version == 2
    for completion in completions:
        assert (completion.tokens, completion.logprobs) == ((5, 5, 5), (12.0,) * 3)
        assert (completion.finish_reason, completion.first_version, completion.last_version) == ("length", 2, 2)
    assert double.running.is_set()
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["version-2"]


def test_responses_to_one_prompt_have_seeds_of_their_own(engine, double):
    completions = run(engine.generate([1, 2], Sampling(max_tokens=3, seed=2**31 - 2), n=4))
    assert [completion.tokens for completion in completions] == [(5, 5, 5)] * 4
    # SGLang draws all n responses of a request with its one seed, of 31 bits.
    assert double.seeds == [2**31 - 2, 2**31 - 1, 0, 1]
    run(engine.generate([1, 2], Sampling(max_tokens=3), n=4))
    assert double.seeds[4:] == [None]


def test_failed_load_restores_the_previous_weights(engine, double):
    async def act():
        await push(engine, 1, 2.0)
        double.failing = {"new"}
        with pytest.raises(CommitError, match=r"cannot load version-2.*The weights from before it are active"):
            await push(engine, 2, 3.0)
        assert await engine.logprobs([1, 2]) == [8.0]
        assert await engine.version() == 1
        double.failing = set()
        await push(engine, 2, 3.0)
        assert await engine.logprobs([1, 2]) == [12.0]

    run(act())


def test_failed_restore_keeps_the_engine_paused_until_a_commit_succeeds(engine, double):
    async def act():
        await push(engine, 1, 2.0)
        double.failing = {"new", "old"}
        with pytest.raises(NotServingError, match="stays paused"):
            await push(engine, 2, 3.0)
        assert not double.running.is_set()
        with pytest.raises(NotServingError):
            await engine.logprobs([1, 2])
        double.failing = set()
        await push(engine, 2, 3.0)
        assert double.running.is_set()
        assert await engine.logprobs([1, 2]) == [12.0]

    run(act())


def test_a_failed_pause_leaves_the_old_weights_and_the_version_free(engine, double, tmp_path):
    async def act():
        await push(engine, 1, 2.0)
        double.failing = {"pause"}
        with pytest.raises(EngineError, match="failed afterwards"):
            await push(engine, 2, 3.0)
        assert double.running.is_set()
        assert await engine.logprobs([1, 2]) == [8.0]
        assert [path.name for path in (tmp_path / "versions").iterdir()] == ["version-1"]
        double.failing = set()
        await push(engine, 2, 3.0)
        assert await engine.logprobs([1, 2]) == [12.0]

    run(act())


def test_a_version_that_cannot_be_written_leaves_the_old_weights(engine, double, tmp_path, monkeypatch):
    """Fill the disk after half of a version."""

    def full(tensors: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    async def act():
        await push(engine, 1, 2.0)
        with monkeypatch.context() as patches:
            patches.setattr("safetensors.torch.save_file", full)
            with pytest.raises(CommitError, match="No space left on device") as caught:
                await push(engine, 2, 3.0)
        assert not isinstance(caught.value, NotServingError)
        assert await engine.logprobs([1, 2]) == [8.0]
        assert [path.name for path in (tmp_path / "versions").iterdir()] == ["version-1"]
        await push(engine, 2, 3.0)
        assert await engine.logprobs([1, 2]) == [12.0]

    run(act())


def test_unverified_update_is_not_loaded(engine, double):
    async def act():
        with pytest.raises(DigestError):
            await push(engine, 1, 2.0, flip=True)

    run(act())
    assert "/update_weights_from_disk" not in double.calls
    assert "/pause_generation" not in double.calls


def test_pauses_end_with_their_lease_and_with_close(engine, double):
    async def act():
        await engine.pause(0.3)
        assert not double.running.is_set()
        assert await engine.logprobs([1, 2]) == [4.0]  # answered when the lease has lapsed
        await engine.pause(600)
        await engine.close()
        assert double.running.is_set()

    run(act())


def test_errors_name_the_engine(engine, double, model, tmp_path):
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        SglangEngine("localhost", model=model, directory=tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint"):
        SglangEngine("http://127.0.0.1:1", model=tmp_path, directory=tmp_path)
    with pytest.raises(EngineLostError, match=r"SGLang at 127\.0\.0\.1:1: /generate"):
        run(SglangEngine("http://127.0.0.1:1", model=model, directory=tmp_path).logprobs([1, 2]))

    async def wrong():
        double.failing = {"old"}
        await engine.pause(600)
        try:
            await engine._load(model, 0)
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=r"status 400.*cannot load model"):
        run(wrong())


def test_likeliest_tokens_of_every_position_are_returned(double):
    teacher = SglangEngine(f"http://127.0.0.1:{double.server_port}")
    top = run(teacher.top_logprobs([1, 2, 3], 2))
    assert (top.logprobs, top.ids, top.top_logprobs) == ((4.0, 4.0), ((10, 11),) * 2, ((4.0, 3.0),) * 2)
    assert run(teacher.top_logprobs([1, 2], 0)).ids == ((),)
    double.failing = {"top"}
    with pytest.raises(EngineError, match=r"log-probabilities of 2 tokens and 1 rows of likeliest ones for 3 tokens"):
        run(teacher.top_logprobs([1, 2, 3], 2))


def test_server_without_directories_takes_no_updates(double, model):
    with pytest.raises(UpdateError, match="updates need model and directory"):
        run(push(SglangEngine(f"http://127.0.0.1:{double.server_port}"), 1, 2.0))
    with pytest.raises(ConfigError, match="updates need both model and directory"):
        SglangEngine(f"http://127.0.0.1:{double.server_port}", model=model)
