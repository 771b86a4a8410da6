"""Measure pushes to a real vLLM that generates all the while, beside vLLM's own ways of getting new weights.

    python scripts/bench.py engine --vllm-python .venv-vllm/bin/python                      # on a CPU: a tiny model
    python scripts/bench.py engine --vllm-python PYTHON --shapes qwen3-1.7b qwen3-4b qwen3-8b
    python scripts/bench.py engine --vllm-python PYTHON --shapes qwen3-30b-a3b --layers 12 --json figures.json

Models have the shapes of Qwen3's and random weights, bfloat16 on GPUs. The trainer's tensors are on the first GPU, vLLM on the
second one; with one GPU they share it. A table has one row for each push after the second (the first one reloads, and learns to
copy in place):

- whole: from the call of the push until the new version is active; begin, transfer, verify and commit are its phases;
- pause: the time for which vLLM sampled nothing;
- tokens: tokens that vLLM sampled from the beginning of the push for ``--window`` seconds, relative to windows without a push.
  Running responses recompute their KV cache after a push, which is part of it.

The last rows are vLLM's own: its NCCL weight transfer (0.24 and 0.25, two GPUs) and the reload of a written checkpoint, with the
generation paused.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import shutil
import socket
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

from megascend.apps.rl.rollout.engines.placement import device_options, place_engines, visible_gpus
from megascend.apps.rl.rollout.engines.vllm import VllmEngine
from megascend.apps.rl.rollout.engines.vllm_process import MODULE, VllmProcess, engine_environment, vllm_device
from megascend.errors import MegascendError
from megascend.sync.delivery import Delivery
from weightwire.engine import Sampling
from weightwire.engine_calls import LoopThread
from weightwire.keys import read_key, write_key
from weightwire.sender import spec_of
from weightwire.vllm.contract import SWAP_KERNEL
from weightwire.vllm.guard import BEARER

START_S = 600.0
NCCL_LIMIT_S = 120.0
"""Of all updates by vLLM's own NCCL transfer; then its program prints where it waits, and ends."""
CONTEXT = 2048
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(zip(NAMES, (256, 768, 4, 4, 4096), strict=True)) | {"head_dim": 64, "num_key_value_heads": 2},
    "tiny-moe": dict(zip(NAMES, (256, 512, 2, 4, 4096), strict=True))
    | {
        "head_dim": 64,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    "qwen3-1.7b": dict(zip(NAMES, (2048, 6144, 28, 16, 151936), strict=True)) | {"tie_word_embeddings": True},
    "qwen3-4b": dict(zip(NAMES, (2560, 9728, 36, 32, 151936), strict=True)) | {"tie_word_embeddings": True},
    "qwen3-8b": dict(zip(NAMES, (4096, 12288, 36, 32, 151936), strict=True)),
    "qwen3-30b-a3b": dict(zip(NAMES, (2048, 6144, 48, 32, 151936), strict=True))
    | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
"""Configurations of Qwen3's models, as far as they differ from :func:`configuration`."""
NCCL_SINCE, NCCL_UNTIL = (0, 24), (0, 25)


def configuration(shape: str, layers: int | None) -> dict[str, Any]:
    """Return the content of config.json for a shape."""
    changes = SHAPES[shape]
    experts = "num_experts" in changes
    fields = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if experts else "qwen3",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **changes,
    }
    if experts:
        fields |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    if layers is not None:
        fields["num_hidden_layers"] = layers
    return fields


def tensors(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random weights under Hugging Face's names, in the order of an export."""
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (query, hidden),
            f"{prefix}self_attn.k_proj.weight": (key, hidden),
            f"{prefix}self_attn.v_proj.weight": (key, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, query),
            f"{prefix}self_attn.q_norm.weight": (head,),
            f"{prefix}self_attn.k_norm.weight": (head,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
        if "num_experts" in config:
            shapes[f"{prefix}mlp.gate.weight"] = (config["num_experts"], hidden)
            parts, ffn = [f"mlp.experts.{number}." for number in range(config["num_experts"])], "moe_intermediate_size"
        else:
            parts, ffn = ["mlp."], "intermediate_size"
        for part in parts:
            shapes[f"{prefix}{part}gate_proj.weight"] = shapes[f"{prefix}{part}up_proj.weight"] = (config[ffn], hidden)
            shapes[f"{prefix}{part}down_proj.weight"] = (hidden, config[ffn])
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.empty(shape, device=device, dtype=dtype)
        if len(shape) == 1:
            weights[name].fill_(1.0)
        else:
            weights[name].normal_(0.0, 0.02, generator=generator)
    return weights


def write_checkpoint(directory: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write config.json and one safetensors file."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")


class Load:
    """Requests that keep vLLM busy, and a count of the tokens that it has sampled."""

    def __init__(self, engine: VllmEngine, address: str, config: dict[str, Any], arguments: argparse.Namespace) -> None:
        self._engine, self._address, self._vocabulary = engine, address, config["vocab_size"]
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
    update = delivery.push([engine], version, weights)
    seconds = {"whole": sum(update.seconds.values())} | update.seconds
    during = load.tokens()
    seconds["rate during"] = (during - before) / (time.perf_counter() - start)
    time.sleep(max(0.0, window_s - (time.perf_counter() - start)))
    seconds["rate"] = (load.tokens() - before) / (time.perf_counter() - start)
    load.check()
    return seconds | update.parts


class Server:
    """A vLLM with the model in ``directory``."""

    def __init__(
        self, directory: Path, work: Path, arguments: argparse.Namespace, device: str, plain: bool = False
    ) -> None:
        options = [*device_options(device), f"--max-model-len={CONTEXT}", "--skip-tokenizer-init"]
        options += [f"--tensor-parallel-size={arguments.tensor}", "--max-num-seqs=256"]
        environment = dict(item.split("=", 1) for item in arguments.variable)
        environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if device == "cuda":
            gpus = visible_gpus(os.environ, torch.cuda.device_count())
            (placement,) = place_engines(gpus, 1, 1)
            options += placement.options()
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus[-arguments.tensor :])}
        self.log = work / ("vllm-plain.log" if plain else "vllm.log")
        self._key = None if plain else work / "key"
        if self._key is not None:
            self._key.unlink(missing_ok=True)
            write_key(self._key)
        if plain:
            options += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
        self.process = VllmProcess(
            arguments.vllm_python,
            directory,
            key_file=self._key,
            log=self.log,
            options=[*options, *arguments.vllm_option],  # last, where they override
            environment=environment,
            module="vllm.entrypoints.openai.api_server" if plain else MODULE,
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
        assert self._key is not None
        return VllmEngine(self.process.address, key=read_key(self._key), owner="bench")

    def post(self, path: str, body: Any = None) -> None:
        """Call one of vLLM's own routes."""
        token = {} if self._key is None else {"Authorization": f"Bearer {read_key(self._key).bearer_token(BEARER)}"}
        with httpx.Client(trust_env=False, timeout=300, headers=token) as client:
            answer = client.post(f"{self.process.address}{path}", json=body or {})
            answer.raise_for_status()


NCCL_TRAINER = """
import faulthandler, json, os, sys, threading, time, traceback, urllib.request
import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
address, port, specs, times, workers, limit = json.loads(sys.stdin.read())
faulthandler.dump_traceback_later(limit, exit=True)
torch.cuda.set_device(0)
weights = [(n, torch.zeros(s, dtype=getattr(torch, d), device="cuda")) for n, d, s in specs]
def post(path, body=None):
    request = urllib.request.Request(address + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json"})
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300).read()
def call(path, body):
    try:
        post(path, body)
    except Exception:  # the transfer beside it would wait for ever
        traceback.print_exc(); os._exit(1)
def beside(path, body, work):
    thread = threading.Thread(target=call, args=(path, body)); thread.start(); result = work(); thread.join(); return result
info = {"master_address": "127.0.0.1", "master_port": port, "world_size": 1 + workers}
group = beside("/init_weight_transfer_engine", {"init_info": {**info, "rank_offset": 1}},
               lambda: NCCLWeightTransferEngine.trainer_init(info))
update = {"names": [n for n, _, _ in specs], "dtype_names": [d for _, d, _ in specs], "shapes": [s for _, _, s in specs],
          "packed": True}
def send():
    NCCLWeightTransferEngine.trainer_send_weights(iter(weights), {"group": group, "packed": True}); torch.cuda.synchronize()
seconds = []
for _ in range(times):
    start = time.perf_counter()
    post("/pause?mode=keep"); post("/start_weight_update")
    beside("/update_weights", {"update_info": update}, send)
    post("/finish_weight_update"); post("/resume")
    seconds.append(time.perf_counter() - start)
print("SECONDS", json.dumps(seconds), flush=True)
"""
"""Program in vLLM's environment that sends weights by vLLM's own NCCL engine, with generation paused as vLLM's examples do."""


def own_nccl(
    server: Server, arguments: argparse.Namespace, specs: list[tuple[str, str, tuple[int, ...]]]
) -> list[float]:
    """Return the seconds of updates by vLLM's own NCCL weight transfer.

    Args:
        specs: name, dtype and shape of each tensor.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    completed = subprocess.run(
        [str(arguments.vllm_python), "-c", NCCL_TRAINER],
        input=json.dumps([server.process.address, port, specs, arguments.times + 1, arguments.tensor, NCCL_LIMIT_S]),
        env=engine_environment(arguments.vllm_python),
        capture_output=True,
        text=True,
        timeout=NCCL_LIMIT_S + 60,
        encoding="utf-8",
        check=False,
    )
    lines = [line for line in completed.stdout.splitlines() if line.startswith("SECONDS")]
    if not lines:
        raise RuntimeError(f"vLLM's NCCL transfer: {completed.stderr[-1500:]}")
    return json.loads(lines[-1].split(" ", 1)[1])[1:]


def vllm_release(python: Path) -> tuple[int, int]:
    """Return the version of an interpreter's vLLM."""
    code = "from weightwire.vllm.contract import vllm_version; print(*vllm_version())"
    environment = engine_environment(python)
    output = subprocess.run([str(python), "-c", code], env=environment, capture_output=True, text=True, check=True)
    major, minor = output.stdout.split()[-2:]
    return int(major), int(minor)


def measure(shape: str, arguments: argparse.Namespace, device: str, work: Path) -> dict[str, Any]:
    """Measure one shape; return its figures."""
    config = configuration(shape, arguments.layers)
    own_device = torch.device("cuda:0" if device == "cuda" else "cpu")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weights = tensors(config, own_device, dtype)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    specs = [(spec.name, spec.dtype, spec.shape) for spec in map(spec_of, weights, weights.values())]
    directory = work / shape
    write_checkpoint(directory, config, weights)
    if device == "cuda":
        torch.cuda.empty_cache()  # vLLM measures free memory
    figures: dict[str, Any] = {"shape": shape, "layers": config["num_hidden_layers"], "bytes": nbytes, "device": device}
    figures["swap"] = "kernel" if f"{SWAP_KERNEL}=1" in arguments.variable else "copies"
    figures["window_s"] = arguments.window
    print(f"== {shape}, {config['num_hidden_layers']} layers, {nbytes / 1e9:.2f} GB", flush=True)
    if not {"push", "reload"} <= set(arguments.skip):
        measure_busy_engine(figures, weights, directory, work, arguments)
    if "nccl" in arguments.skip:
        reason = "--skip nccl"
    elif device != "cuda" or torch.cuda.device_count() < 1 + arguments.tensor:
        reason = "it needs a GPU for the trainer and others for vLLM"
    elif not NCCL_SINCE <= arguments.release <= NCCL_UNTIL:
        reason = f"the program is for vLLM 0.24 and 0.25, not {arguments.release}"
    else:
        reason = ""
        del weights
        torch.cuda.empty_cache()
        try:
            with Server(directory, work, arguments, device, plain=True) as server:
                figures["own nccl"] = own_nccl(server, arguments, specs)
            for seconds in figures["own nccl"]:
                print_own("vLLM's NCCL", nbytes, seconds, seconds)
        except (MegascendError, RuntimeError, subprocess.TimeoutExpired) as error:
            reason = str(error)  # the other figures are worth their keep
    if reason:
        print(f"vLLM's own NCCL transfer is not measured: {reason}", flush=True)
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
    device = weights["model.norm.weight"].device
    with Server(directory, work, arguments, figures["device"]) as server:
        engine = server.client()
        with (
            Load(engine, server.process.address, configuration(figures["shape"], arguments.layers), arguments) as load,
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
                    write_checkpoint(directory, configuration(figures["shape"], arguments.layers), weights)
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


def machine(release: tuple[int, int]) -> dict[str, Any]:
    """Return the name of the device and the versions, for figures that are stored."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"
    return {"device": device, "versions": {"torch": torch.__version__, "vllm": ".".join(map(str, release))}}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True, help="interpreter of vLLM's environment")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, help="default: qwen3-1.7b on GPUs, tiny on a CPU")
    parser.add_argument("--layers", type=int, help="number of layers instead of the model's")
    parser.add_argument("--times", type=int, default=5, help="pushes that are measured (default: 5)")
    parser.add_argument("--requests", type=int, default=32, help="responses that are sampled at a time (default: 32)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (default: 64)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a response (default: 512)")
    parser.add_argument("--window", type=float, default=2.0, help="seconds of a window (default: 2)")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds of load before the first push (default: 5)")
    parser.add_argument("--tensor", type=int, default=1, help="GPUs of vLLM, the last ones (default: 1)")
    parser.add_argument("--transport", default="auto", help="weight transport (default: auto)")
    parser.add_argument("--skip", nargs="*", default=[], choices=("push", "nccl", "reload"), help="ways not to measure")
    parser.add_argument(
        "--vllm-option", action="append", default=[], help="of vLLM's; repeated: --vllm-option=--seed=1"
    )
    parser.add_argument("--variable", action="append", default=[], metavar="NAME=VALUE", help="of vLLM's; repeated")
    parser.add_argument("--work", type=Path, help="directory for models and logs (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    return parser.parse_args()


def main() -> None:
    """Measure every shape, print tables, write JSON."""
    arguments = parse_arguments()
    device = vllm_device(arguments.vllm_python)
    arguments.release = vllm_release(arguments.vllm_python)
    shapes = arguments.shapes or ["qwen3-1.7b" if device == "cuda" else "tiny"]
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for shape in shapes:
            try:
                results.append(measure(shape, arguments, device, work))
            except Exception as error:  # noqa: BLE001  the other shapes are measured all the same
                print(f"{shape}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                results.append({"shape": shape, "failed": f"{type(error).__name__}: {error}"})
                continue
            finally:
                if arguments.json:
                    stored = machine(arguments.release) | {"shapes": results}
                    arguments.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if any("failed" in result for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
