"""Measure pushes to a real vLLM that generates all the while, beside vLLM's reload of a checkpoint.

    python scripts/bench.py engine --vllm-python .venv-vllm/bin/python                      # on a CPU: a tiny model
    python scripts/bench.py engine --vllm-python PYTHON --models 1.7b 4b 8b
    python scripts/bench.py engine --vllm-python PYTHON --models 30b-a3b --layers 12 --json figures.json

Models have the shapes of Qwen3's and random weights, bfloat16 on GPUs. The trainer's tensors are on the first GPU, vLLM on the
second one; with one GPU they share it. A table has one row for each push after the second (the first one reloads, and learns to
copy in place):

- whole: from the call of the push until the new version is active; begin, transfer, verify and commit are its phases;
- pause: the time for which vLLM sampled nothing;
- tokens: tokens that vLLM sampled from the beginning of the push for ``--window`` seconds, relative to windows without a push.
  Running responses recompute their KV cache after a push, which is part of it.

The last rows are vLLM's own way, the reload of a written checkpoint with the generation paused.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from bench.models import SHAPES, write_checkpoint
from bench.runner import versions, write
from megascend.apps.rl.rollout.engines.placement import device_options, place_engines, visible_gpus
from megascend.apps.rl.rollout.engines.vllm import VllmEngine
from megascend.apps.rl.rollout.engines.vllm_process import VllmProcess, engine_environment, vllm_device
from megascend.sync.delivery import Delivery
from megascend.sync.push import push_tensors
from weightwire.engine import Sampling
from weightwire.engine_calls import LoopThread
from weightwire.keys import read_key, write_key
from weightwire.vllm.contract import SWAP_KERNEL
from weightwire.vllm.guard import BEARER

START_S = 600.0
CONTEXT = 2048


def make_model(name: str, layers: int | None, directory: Path, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a random checkpoint; return its shape, and its weights on the trainer's device."""
    from safetensors.torch import load_file

    shape = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    write_checkpoint(shape, directory, precision="bf16" if device == "cuda" else "fp32")
    return shape, load_file(directory / "model.safetensors", device="cuda:0" if device == "cuda" else "cpu")


class Load:
    """Requests that keep vLLM busy, and a count of the tokens that it has sampled."""

    def __init__(self, engine: VllmEngine, address: str, vocabulary: int, arguments: argparse.Namespace) -> None:
        self._engine, self._address, self._vocabulary = engine, address, vocabulary
        self._arguments, self._loop = arguments, LoopThread("bench-load")
        self._draw = random.Random(0)
        self._client = httpx.Client(trust_env=False, timeout=60)

    def __enter__(self) -> Load:
        self._tasks = [self._loop.submit(self._run(number)) for number in range(self._arguments.requests)]
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()
        self._client.close()

    async def _run(self, number: int) -> None:
        seed = 0
        while True:
            seed += 1
            prompt = [self._draw.randrange(3, self._vocabulary) for _ in range(self._arguments.prompt)]
            sampling = Sampling(self._arguments.tokens, seed=1000 * number + seed)
            await self._engine.generate(prompt, sampling)

    def check(self) -> None:
        """Raise the error of a request that has failed."""
        for task in self._tasks:
            if task.done():
                task.result()

    def tokens(self) -> float:
        """Return the number of tokens that vLLM has sampled since its start."""
        text = self._client.get(f"{self._address}/metrics").text
        values = re.findall(r"^vllm:generation_tokens_total\{[^}]*\} ([0-9.e+]+)$", text, re.MULTILINE)
        return sum(map(float, values))

    def rate(self, seconds: float) -> float:
        """Return the tokens sampled per second within the next ``seconds``."""
        start, before = time.perf_counter(), self.tokens()
        time.sleep(max(0.0, seconds - (time.perf_counter() - start)))
        return (self.tokens() - before) / (time.perf_counter() - start)


def push(
    delivery: Delivery, engine: VllmEngine, weights: dict[str, Tensor], version: int, load: Load, window_s: float
) -> dict[str, float]:
    """Push once; return seconds by phase and part, and the tokens per second within the window."""
    before, start = load.tokens(), time.perf_counter()
    update = push_tensors(delivery, [engine], version, weights)
    seconds = {"whole": sum(update.seconds.values())} | update.seconds
    during = load.tokens()
    seconds["rate during"] = (during - before) / (time.perf_counter() - start)
    time.sleep(max(0.0, window_s - (time.perf_counter() - start)))
    seconds["rate"] = (load.tokens() - before) / (time.perf_counter() - start)
    load.check()
    return seconds | update.parts


class Server:
    """A vLLM with the model in ``directory``."""

    def __init__(self, directory: Path, work: Path, arguments: argparse.Namespace, device: str) -> None:
        options = [*device_options(device), f"--max-model-len={CONTEXT}", "--skip-tokenizer-init"]
        options += [f"--tensor-parallel-size={arguments.tensor}", "--max-num-seqs=256"]
        environment = dict(item.split("=", 1) for item in arguments.variable)
        environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if device == "cuda":
            gpus = visible_gpus(os.environ, torch.cuda.device_count())
            (placement,) = place_engines(gpus, 1, 1)
            options += placement.options()
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus[-arguments.tensor :])}
        self._key = work / "key"
        self._key.unlink(missing_ok=True)
        write_key(self._key)
        self.process = VllmProcess(
            arguments.vllm_python,
            directory,
            key_file=self._key,
            log=work / "vllm.log",
            options=[*options, *arguments.vllm_option],  # last, where they override
            environment=environment,
        )

    def __enter__(self) -> Server:
        try:
            self.process.wait_until_listening(START_S)
        except BaseException:
            self.process.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()

    def client(self) -> VllmEngine:
        """Build a client."""
        return VllmEngine(self.process.address, key=read_key(self._key), owner="bench")

    def post(self, path: str, body: Any = None) -> None:
        """Call one of vLLM's own routes."""
        token = {"Authorization": f"Bearer {read_key(self._key).bearer_token(BEARER)}"}
        with httpx.Client(trust_env=False, timeout=300, headers=token) as client:
            answer = client.post(f"{self.process.address}{path}", json=body or {})
            answer.raise_for_status()


def vllm_release(python: Path) -> str:
    """Return the version of an interpreter's vLLM."""
    code = "from weightwire.vllm.contract import vllm_version; print(*vllm_version(), sep='.')"
    environment = engine_environment(python)
    output = subprocess.run([str(python), "-c", code], env=environment, capture_output=True, text=True, check=True)
    return output.stdout.split()[-1]


def measure(name: str, arguments: argparse.Namespace, device: str, work: Path) -> dict[str, Any]:
    """Measure one model; return its figures."""
    directory = work / name
    shape, weights = make_model(name, arguments.layers, directory, device)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    layers, arguments.vocabulary = shape["num_hidden_layers"], shape["vocab_size"]
    if device == "cuda":
        torch.cuda.empty_cache()  # vLLM measures free memory
    figures: dict[str, Any] = {"shape": name, "layers": layers, "bytes": nbytes, "device": device}
    figures["swap"] = "kernel" if f"{SWAP_KERNEL}=1" in arguments.variable else "copies"
    figures["window_s"] = arguments.window
    print(f"== {name}, {layers} layers, {nbytes / 1e9:.2f} GB", flush=True)
    if not {"push", "reload"} <= set(arguments.skip):
        measure_busy_engine(figures, weights, directory, work, arguments)
    shutil.rmtree(directory)
    return figures


def measure_busy_engine(
    figures: dict[str, Any],
    weights: dict[str, Tensor],
    directory: Path,
    work: Path,
    arguments: argparse.Namespace,
) -> None:
    """Add to ``figures`` what pushes and reloads cost an engine that generates."""
    from safetensors.torch import save_file

    device = weights["model.norm.weight"].device
    with Server(directory, work, arguments, figures["device"]) as server:
        engine = server.client()
        with (
            Load(engine, server.process.address, arguments.vocabulary, arguments) as load,
            contextlib.closing(Delivery(transport=arguments.transport, device=device, timeout_s=120.0)) as delivery,
        ):
            time.sleep(arguments.warm_up)
            if "push" not in arguments.skip:
                rounds, undisturbed = [], []
                for version in range(1, arguments.times + 3):
                    undisturbed.append(load.rate(arguments.window))
                    for tensor in weights.values():
                        tensor.mul_(1.001)
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    rounds.append(push(delivery, engine, weights, version, load, arguments.window))
                    time.sleep(arguments.window)
                figures["first"], figures["rounds"] = rounds[0], rounds[2:]
                figures["undisturbed"] = statistics.median(undisturbed[1:])
                figures["reload_reason"] = asyncio.run(engine.info())["reload_reason"]
                report_pushes(figures)
            if "reload" not in arguments.skip:
                figures["disk"] = []
                for _ in range(arguments.times):
                    start = time.perf_counter()
                    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
                    saved = time.perf_counter()
                    server.post("/pause?mode=keep")
                    server.post("/collective_rpc", {"method": "reload_weights"})
                    server.post("/resume")
                    end = time.perf_counter()
                    figures["disk"].append({"whole": end - start, "pause": end - saved})
                    print_own("file, reload", figures["bytes"], end - start, end - saved)
            load.check()
        asyncio.run(engine.close())


def report_pushes(figures: dict[str, Any]) -> None:
    """Print the table of the pushes of one shape."""
    rounds, undisturbed = figures["rounds"], figures["undisturbed"]
    parts = sorted({name for row in rounds for name in row if "." in name})
    print(
        f"first push (reload): {figures['first']['whole']:.3f} s; reload_reason: {figures['reload_reason'] or 'none'}"
    )
    print("| way | whole s | begin | transfer | verify | commit | pause ms | GB/s | tokens during | tokens in window |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rounds:
        method = next(
            (name.removeprefix("commit.") for name in row if name in ("commit.exchange", "commit.reload")), "?"
        )
        print(
            f"| {method} | {row['whole']:.3f} | {row['begin']:.3f} | {row['transfer']:.3f} | {row['verify']:.3f} "
            f"| {row['commit']:.3f} | {1e3 * row.get('commit.paused', float('nan')):.0f} "
            f"| {figures['bytes'] / row['whole'] / 1e9:.1f} | {row['rate during'] / undisturbed:.2f} "
            f"| {row['rate'] / undisturbed:.2f} |"
        )
    medians = {name: statistics.median(row[name] for row in rounds if name in row) for name in parts}
    print(f"undisturbed: {undisturbed:.0f} tokens/s")
    print(
        "parts, ms (median): " + ", ".join(f"{name} {1e3 * value:.1f}" for name, value in medians.items()), flush=True
    )


def print_own(way: str, nbytes: int, seconds: float, pause: float) -> None:
    """Print a row of one of vLLM's own ways, in the table's columns."""
    print(f"| {way} | {seconds:.3f} | | | | | {1e3 * pause:.0f} | {nbytes / seconds / 1e9:.1f} | | |", flush=True)


def add_vllm(parser: argparse.ArgumentParser) -> None:
    """Add the options of vLLM and of the requests that keep it busy."""
    parser.add_argument("--vllm-python", type=Path, required=True, help="interpreter of vLLM's environment")
    parser.add_argument("--layers", type=int, help="number of layers instead of the model's")
    parser.add_argument("--times", type=int, default=5, help="pushes that are measured (default: 5)")
    parser.add_argument("--requests", type=int, default=32, help="responses that are sampled at a time (default: 32)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (default: 64)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a response (default: 512)")
    parser.add_argument("--window", type=float, default=2.0, help="seconds of a window (default: 2)")
    parser.add_argument("--tensor", type=int, default=1, help="GPUs of vLLM, the last ones (default: 1)")
    parser.add_argument(
        "--vllm-option", action="append", default=[], help="of vLLM's; repeated: --vllm-option=--seed=1"
    )
    parser.add_argument("--variable", action="append", default=[], metavar="NAME=VALUE", help="of vLLM's; repeated")
    parser.add_argument("--work", type=Path, help="directory for models and logs (default: a temporary one)")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_vllm(parser)
    parser.add_argument("--models", nargs="*", choices=SHAPES, help="default: 1.7b on GPUs, tiny on a CPU")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds of load before the first push (default: 5)")
    parser.add_argument("--transport", default="auto", help="weight transport (default: auto)")
    parser.add_argument("--skip", nargs="*", default=[], choices=("push", "reload"), help="ways not to measure")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Measure every model; figures are written after each, as a rented machine may disappear."""
    device = vllm_device(arguments.vllm_python)
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    figures: dict[str, Any] = {"device": name, "vllm": vllm_release(arguments.vllm_python), "shapes": []}
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for model in arguments.models or ["1.7b" if device == "cuda" else "tiny"]:
            try:
                figures["shapes"].append(measure(model, arguments, device, work))
            except Exception as error:  # noqa: BLE001  the other models are measured all the same
                print(f"{model}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                figures["shapes"].append({"shape": model, "failed": f"{type(error).__name__}: {error}"})
            if arguments.json:
                write(arguments.json, {"versions": versions(), **figures})
    return figures, all("failed" not in row for row in figures["shapes"])
