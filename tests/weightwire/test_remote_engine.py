"""The engine contract as JSON: calls arrive unchanged at the remote engine, malformed calls are refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from weightwire.engine import Completion, InferenceEngine, Sampling, TopLogprobs
from weightwire.engine_calls import LoopThread, call_all
from weightwire.errors import UnsupportedCallError, WireError
from weightwire.fp8 import BlockFormat
from weightwire.manifest import Manifest, TensorSpec
from weightwire.offer import Offer, Seal
from weightwire.plan import Region
from weightwire.remote_engine import CALLS, RemoteEngine, read_call
from weightwire.transports.choice import Location

OFFER = Offer("u", "t", "127.0.0.1", 1, 1, 2, "gloo", 60.0, 60.0, Manifest(1, (TensorSpec("w", "float32", (2,)),)))
SEAL = Seal("u", 1, "0" * 64, ("0",))
SAMPLING = Sampling(8, 0.5, (3, 4), 11, top_p=0.5, top_k=4)
COMPLETION = Completion((5, 6), (-0.5, -0.25), "stop", 1, 2, allowed=((5, 7), (6,)))
CALLS_MADE: dict[str, tuple[tuple[Any, ...], Any]] = {
    "generate": (([1, 2], SAMPLING, 2, "a"), [COMPLETION]),
    "logprobs": (([1, 2], None), [-0.5]),
    "top_logprobs": (([1, 2], 2, "a"), TopLogprobs((-0.5,), ((4, 2),), ((-0.25, -0.5),))),
    "receivers": ((), 3),
    "locations": ((), [Location("cuda", "host", gpu="GPU-a", visible=("GPU-a",)), None]),
    "begin_update": ((OFFER,), None),
    "verify": ((SEAL, 60.0), None),
    "commit": (("u",), {"paused": 0.5, "exchange": 0.25}),
    "drop": (("u",), None),
    "needs": (((TensorSpec("w", "bfloat16", (4, 2)),),), [(Region(0, (0, 0), (2, 2)),), ()]),
    "quantised": ((), {"w": BlockFormat(128, 64, power_of_two=True)}),
    "version": (("adapter a",), 7),
    "load_adapter": (("a", "/folder", None), None),
    "pause": ((30.0,), None),
    "sleep": ((30.0,), None),
    "resume": ((), None),
}
"""Arguments and result of each method."""


class Recording:
    """Double that records calls of any name and returns the table's results."""

    def __init__(self) -> None:
        self.called: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        async def method(*arguments: Any) -> Any:
            self.called.append((name, arguments))
            return CALLS_MADE[name][1]

        return method


class OverJson(RemoteEngine):
    """Remote engine that calls an engine of this process through JSON text."""

    name = "remote"

    def __init__(self, engine: Any) -> None:
        self.engine, self.deadlines = engine, {}

    async def ask(self, call: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        self.deadlines[call] = timeout_s
        return json.loads(json.dumps(await read_call(call, json.loads(json.dumps(arguments)))(self.engine)))


@pytest.mark.parametrize("name", CALLS)
def test_call_and_result_survive_json(name: str) -> None:
    arguments, result = CALLS_MADE[name]
    recording = Recording()
    remote = OverJson(recording)
    assert asyncio.run(getattr(remote, name)(*arguments)) == result
    assert recording.called == [(name, arguments)]


def test_every_method_of_the_contract_is_a_remote_call() -> None:
    methods = {name for name, member in vars(InferenceEngine).items() if callable(member) and not name.startswith("_")}
    # revive is for the process that has started the engine.
    assert methods - {"paused", "close", "revive"} == set(CALLS)


def test_remote_deadlines_exceed_those_of_the_call() -> None:
    remote = OverJson(Recording())
    asyncio.run(remote.verify(SEAL, 100.0))
    asyncio.run(remote.commit("u"))
    assert remote.deadlines == {"verify": 160.0, "commit": 660.0}


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("stop", {}, "unknown call 'stop'; known: generate"),
        ("commit", {}, "commit: update is missing"),
        ("commit", {"update": 3}, "commit: update is 3; a text was expected"),
        ("commit", {"update": "u", "now": True}, "commit: unknown fields now"),
        ("begin_update", {"offer": {"update": "u"}}, "offer"),
        ("verify", {"seal": [], "timeout_s": 1.0}, "seal"),
        ("pause", {"lease_s": float("nan")}, "pause: lease_s is nan, not a number from 0"),
        ("pause", {"lease_s": True}, "pause: lease_s is True, not a number"),
        ("generate", {"prompt": [1]}, "generate: max_tokens is missing"),
        ("generate", {"prompt": [], "max_tokens": 1}, "generate: prompt has 0 token ids, not 1 to"),
        ("generate", {"prompt": [-1], "max_tokens": 1}, "generate: prompt is not a list of token ids"),
        ("generate", {"prompt": [1], "max_tokens": 0}, "generate: max_tokens is 0, not an integer from 1"),
        (
            "generate",
            {"prompt": [1], "max_tokens": 1, "n": 1025},
            "generate: n is 1025, not an integer from 1 to 1024",
        ),
        (
            "generate",
            {"prompt": [1], "max_tokens": 1, "temperature": -1},
            "generate: temperature is -1, not a number from 0",
        ),
        (
            "generate",
            {"prompt": [1], "max_tokens": 1, "stop_token_ids": [1] * 65},
            "stop_token_ids has 65 token ids, not 0 to 64",
        ),
    ],
)
def test_a_malformed_call_is_refused_before_it_is_made(call: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        read_call(call, arguments)


class UpdatesOnly(InferenceEngine):
    """Engine that implements only the abstract methods."""

    name = "minimal"

    async def receivers(self) -> int:
        return 2

    async def begin_update(self, offer: Offer) -> None: ...

    async def verify(self, seal: Seal, timeout_s: float) -> None: ...

    async def commit(self, update: str) -> None: ...

    async def drop(self, update: str) -> None: ...


def test_update_only_engine_raises_unsupported_call_error() -> None:
    engine = UpdatesOnly()
    assert asyncio.run(engine.locations()) == [None, None]
    for call, message in (
        (engine.generate([1], SAMPLING), "minimal does not sample"),
        (engine.logprobs([1]), "minimal does not compute log-prob"),
        (engine.top_logprobs([1], 2), "minimal does not return its likeliest tokens"),
        (engine.version(), "minimal does not report"),
        (engine.load_adapter("a", "b"), "minimal does not load adapters"),
        (engine.pause(1.0), "minimal cannot be paused"),
        (engine.resume(), "minimal cannot be paused"),
    ):
        with pytest.raises(UnsupportedCallError, match=message):
            asyncio.run(call)
    with pytest.raises(TypeError, match="abstract"):
        InferenceEngine()  # type: ignore[abstract]


def test_call_all_ends_at_its_deadline_and_names_failed_engines() -> None:
    engines = []
    for name in ("answers", "hangs", "fails"):
        engine = UpdatesOnly()
        engine.name = name
        engines.append(engine)

    async def call(engine: InferenceEngine) -> str:
        if engine.name == "fails":
            raise WireError("no")
        await asyncio.sleep(0 if engine.name == "answers" else 3600)
        return engine.name

    with LoopThread("calls") as thread:
        results, failed = thread.run(call_all(engines, call, 0.2))
    assert results == {"answers": "answers"}
    assert {name: (type(error), str(error)) for name, error in failed.items()} == {
        "hangs": (TimeoutError, "it did not answer within 0.2 s"),
        "fails": (WireError, "no"),
    }
    with pytest.raises(RuntimeError, match="event loop of calls is closed"):
        thread.run(call(engines[0]))
