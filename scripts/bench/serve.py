"""Measure `megascend serve` under load: throughput and latency with many tenants, mixed and one by one.

    python scripts/bench.py serve                                   # a tiny random model on the CPU, fp32
    python scripts/bench.py serve --model DIR --platform cuda --precision bf16 --json FILE

Two servers run at a time, one with defaults and one that mixes nothing (`batch_tokens: 1`: every batch has one model). They are
loaded alternately by `--tenants` tenants, each with its own session, model and LoRA rank, all in one process that sends the
tinker package's messages: a real client for each tenant would saturate the machine. A tenant sends
a forward_backward and an optim_step together, as clients do, fetches both, and starts again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

KEY = "tml-bench-0123456789abcdef"
PROTOBUF = "application/x-protobuf"
KINDS: dict[str, list[str]] = {"mixed": [], "one by one": ["batch_tokens=1", "window_ms=0"]}


@contextmanager
def server(options: argparse.Namespace, model: Path, folder: Path, settings: list[str]) -> Iterator[str]:
    """Yield the address of a server, once it is ready."""
    count = max([8, *options.tenants])
    settings = [
        f"max_models={count}", f"limits.models={count}", f"limits.sessions={2 * count + 16}",
        f"platform={options.platform}", "log=none", *options.set, *settings,
    ]  # fmt: skip
    command = [sys.executable, "-m", "megascend.apps.cli.main", "serve", "--model", model, "--port", "0"]
    command += ["--precision", options.precision, "--storage", folder]
    command += [part for setting in settings for part in ("--set", setting)]
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"MEGASCEND_API_KEYS": KEY}
        )
        try:
            while not (match := re.search(r"at (http://\S+)", log.read_text())):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended:\n{log.read_text()}")
                time.sleep(0.2)
            yield match[1]
        finally:
            if process.poll() is not None:
                print(f"the server ended:\n{log.read_text()[-4000:]}", file=sys.stderr)
            process.send_signal(signal.SIGTERM)
            process.wait(60)


class Connections:
    """HTTP/1.1 to a server on connections that are kept: httpx's pool takes longer for 128 tenants than the server does."""

    def __init__(self, url: str) -> None:
        self._host, self._port = url.removeprefix("http://").split(":")
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str, bytes]:
        """Return status, content type and body of a response."""
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection(self._host, int(self._port))
        fields = {"host": self._host, "x-api-key": KEY, "content-length": str(len(body)), **headers}
        lines = [f"{method} /api/v1/{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        response_headers = dict(line.split(": ", 1) for line in head.strip().split("\r\n")[1:])
        content = await reader.readexactly(int(response_headers.get("content-length", 0)))
        self._free.append((reader, writer))
        return int(head.split()[1]), response_headers.get("content-type", ""), content

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()


class Tenant:
    """One session with one model.

    Args:
        number: decides its rank, learning rate and data.
    """

    def __init__(self, http: Connections, model: str, number: int, options: argparse.Namespace) -> None:
        self._http, self._model = http, model
        self._rank, self._rate = options.ranks[number % len(options.ranks)], 1e-4 * (1 + number % 7)
        tokens, vocabulary = options.tokens, options.vocabulary
        chance = random.Random(number)
        ids = [chance.randrange(vocabulary) for _ in range(tokens + 1)]
        inputs = {"target_tokens": ids[1:], "weights": [1.0] * tokens}
        self._data = [types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)]

    async def begin(self) -> None:
        self._session = (await self._post("create_session", {"tags": []}))["session_id"]
        body = {
            "session_id": self._session,
            "model_seq_id": 0,
            "base_model": self._model,
            "lora_config": {"rank": self._rank},
        }
        self._name = (await self._fetch((await self._post("create_model", body))["request_id"]))["model_id"]
        self._number = 0

    async def step(self) -> float:
        """Run a forward_backward and a step; return the seconds until both have completed."""
        inside = types.ForwardBackwardInput(data=self._data, loss_fn="cross_entropy")
        request = types.ForwardBackwardRequest(
            forward_backward_input=inside, model_id=self._name, seq_id=self._number + 1
        )
        body = forward_backward_request_to_proto(request).SerializeToString()
        start = time.perf_counter()
        train = self._post("forward_backward", body)
        adam = {"model_id": self._name, "seq_id": self._number + 2, "adam_params": {"learning_rate": self._rate}}
        accepted = await asyncio.gather(train, self._post("optim_step", adam))
        loss, step = await asyncio.gather(*(self._fetch(reply["request_id"]) for reply in accepted))
        self._number += 2
        assert "loss:sum" in loss.metrics, loss
        assert "metrics" in step, step
        return time.perf_counter() - start

    async def end(self) -> None:
        await self._fetch((await self._post("unload_model", {"model_id": self._name}))["request_id"])
        await self._http.request("POST", f"sessions/{self._session}/finish")

    async def _post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": PROTOBUF if isinstance(body, bytes) else "application/json", **headers}
        status = 408
        while status in (408, 429):
            status, kind, response = await self._http.request("POST", path, content, **headers)
            await asyncio.sleep(0.05 if status == 429 else 0)
        assert status == 200, (path, status, response)
        return deserialize_forward_backward_output(response) if kind == PROTOBUF else json.loads(response)

    async def _fetch(self, name: str) -> Any:
        result = await self._post("retrieve_future", {"request_id": name}, accept=PROTOBUF)
        assert not isinstance(result, dict) or "error" not in result, result
        return result


def metrics(url: str) -> str:
    """Return the server's metrics in Prometheus format."""
    return httpx.get(f"{url}/metrics").raise_for_status().text


def counted(url: str) -> tuple[float, float]:
    """Return the number of forward_backwards so far, and the sum over them of models in their batch."""
    text = metrics(url)
    matches = [re.search(rf"^megascend_models_in_batch_{name} (\S+)", text, re.MULTILINE) for name in ("count", "sum")]
    return tuple(float(match[1]) if match else 0.0 for match in matches)  # type: ignore[return-value]


async def load(url: str, model: str, count: int, options: argparse.Namespace) -> dict[str, float]:
    """Measure ``count`` tenants on a server for ``options.seconds``, after one warm-up step of each."""
    with contextlib.closing(Connections(url)) as http:
        tenants = [Tenant(http, model, number, options) for number in range(count)]
        await asyncio.gather(*(tenant.begin() for tenant in tenants))
        await asyncio.gather(*(tenant.step() for tenant in tenants))
        before, start, seconds = counted(url), time.perf_counter(), list[float]()

        async def steps(tenant: Tenant) -> None:
            while time.perf_counter() - start < options.seconds:
                seconds.append(await tenant.step())

        await asyncio.gather(*(steps(tenant) for tenant in tenants))
        wall, after = time.perf_counter() - start, counted(url)
        await asyncio.gather(*(tenant.end() for tenant in tenants))
    places = sorted(seconds)
    return {
        "requests_per_second": 2 * len(seconds) / wall,
        "p50_ms": 1e3 * statistics.median(places),
        "p99_ms": 1e3 * places[min(len(places) - 1, int(0.99 * len(places)))],
        "models_in_batch": (after[1] - before[1]) / max(1.0, after[0] - before[0]),
        "device_peak_gib": peak_gib(url),
    }


def peak_gib(url: str) -> float:
    """Return the server's peak device memory in GiB; 0 if the device does not report it."""
    match = re.search(r"^megascend_device_memory_peak_bytes (\S+)", metrics(url), re.MULTILINE)
    return float(match[1]) / 2**30 if match else 0.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="default: a random one of 64 hidden units and 2 layers")
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--tenants", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16, 32, 64], help="of the tenants, by turns")
    parser.add_argument("--tokens", type=int, default=64, help="of a request")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of both servers")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = options.model or folder / "tiny"
        if options.model is None:
            from megascend.testing import write_tiny_checkpoint

            write_tiny_checkpoint(model, "qwen3", num_hidden_layers=2)
        options.vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        figures = measure(options, model.absolute(), folder)
    return figures, not figures["failures"]


def measure(options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """Load both servers by turns."""
    loads: dict[str, dict[str, dict[str, float]]] = {}
    failures = list[str]()
    with (
        server(options, model, folder / "mixed", KINDS["mixed"]) as mixed,
        server(options, model, folder / "apart", KINDS["one by one"]) as unmixed,
    ):
        for count in options.tenants:
            for kind, url in zip(KINDS, (mixed, unmixed), strict=True):
                try:
                    result = asyncio.run(load(url, str(model), count, options))
                except (AssertionError, OSError, EOFError) as error:  # memory for both servers, say
                    failures.append(f"{count} tenants, {kind}: {error!r}")
                    print(f"FAILED: {failures[-1]}", flush=True)
                    continue
                loads.setdefault(str(count), {})[kind] = result
                print(f"{count:4d} tenants, {kind}: {', '.join(f'{k} {v:.1f}' for k, v in result.items())}", flush=True)
    return {
        "failures": failures,
        "loads": loads,
        "tokens": options.tokens,
        "ranks": options.ranks,
    }
