"""Measure pushes from the ranks of a Megatron trainer to a real vLLM that generates: by rank 0, sharded, and by changes.

    R="python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/bench.py trainer_push"
    $R --vllm-python PYTHON --parallel expert=2                                             # on a CPU
    $R --vllm-python PYTHON --model 30b-a3b --layers 6 --parallel expert=2 --tensor 2       # four GPUs
    $R ... --tensor 2 --vllm-option=--gpu-memory-utilization=0.3                                   # two GPUs, shared

The trainer uses the first GPUs, vLLM the last ``--tensor``. The model has random weights; the trainer takes a step at ``--lr`` on
random tokens before every push. Every step of the run and every phase of a push is logged when it begins, with the seconds since
the start. The table has a row for each push after the second of its mode; its columns are those of
bench.py engine, and "share", the bytes that the workers received relative to complete weights. After the last push of each mode,
log-probabilities of vLLM and of the trainer are compared; on GPUs both compute in bf16.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import megascend
from bench.engine import Load, Server, add_vllm, make_model, vllm_release
from bench.models import SHAPES
from megascend.apps.rl.rollout.engines.vllm_process import vllm_device
from megascend.runtime.distributed.objects import agree, broadcast_object

MODES: dict[str, dict[str, Any]] = {
    "rank 0": {"sharded": False},
    "sharded": {"sharded": True},
    "changes": {"mode": "delta", "full_every": 1000},
}
log = logging.getLogger("trainer_push")
PROBE = [(7 * index + index * index // 3) % 2000 + 3 for index in range(64)]


def train(backend: megascend.Backend, seed: int, vocabulary: int, length: int) -> None:
    """Take a step on random sequences, one for each data parallel rank."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, vocabulary, (2 * backend.topology.data, length), generator=generator).tolist()
    backend.forward_backward(backend.shard([megascend.Sample.causal(row) for row in rows]))
    backend.optimizer_step()


def difference(backend: megascend.Backend, engine: Any) -> float | None:
    """Return the mean |log p of vLLM - log p of the trainer| of :data:`PROBE` on rank 0."""
    result = backend.forward(backend.shard([megascend.Sample.causal(PROBE)] * backend.topology.data))
    if engine is None:
        return None
    values = asyncio.run(engine.logprobs(PROBE))
    trainer = result.logprobs[0].tolist()
    return statistics.fmean(abs(a - b) for a, b in zip(values, trainer[-len(values) :], strict=True))


def measure(
    backend: megascend.Backend, engine: Any, load: Load | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Push in every mode; return the figures on rank 0."""
    version, seed, figures = 0, 0, {}
    for mode in arguments.modes:
        rounds = []
        with megascend.WeightSync(backend, [engine] if engine else [], **MODES[mode]) as sync:
            for _ in range(arguments.times + 2):
                seed += 1
                train(backend, seed, arguments.vocabulary, arguments.length)
                undisturbed = broadcast_object(load and load.rate(arguments.window), "world", backend.groups)
                if backend.groups.device.type == "cuda":
                    torch.cuda.synchronize()
                version += 1
                log.info("mode %s: push of version %d", mode, version)
                before, start = load.tokens() if load else 0, time.perf_counter()
                pushed = sync.push(version)
                row = {"whole": time.perf_counter() - start, **pushed.seconds, **pushed.parts}
                if load:
                    row["rate during"] = (load.tokens() - before) / (time.perf_counter() - start)
                    load.check()
                rounds.append(row | {"undisturbed": undisturbed, "share": pushed.share, "nbytes": pushed.nbytes})
        figures[mode] = {
            "transport": pushed.transport,
            "why not sharded": pushed.why_not_sharded,
            "rounds": rounds[2:],
            "first": rounds[0],
            "difference": difference(backend, engine),
        }
        if load:
            report(mode, figures[mode], arguments.nbytes)
    return figures


def show_progress() -> None:
    """Log the steps of the run and the phases of pushes to stderr, with the seconds since the start."""
    logging.basicConfig(format="%(relativeCreated)9d ms %(name)s: %(message)s")
    log.setLevel(logging.INFO)
    logging.getLogger("megascend.sync").setLevel(logging.DEBUG)


def report(mode: str, values: dict[str, Any], nbytes: int) -> None:
    """Print the table of one mode."""
    print(
        "| mode | whole s | describe | begin | transfer | verify | commit | pause ms | GB/s | share | tokens during |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in values["rounds"]:
        method = "exchange" if "commit.exchange" in row else "reload"
        phases = " | ".join(f"{row[name]:.3f}" for name in ("describe", "begin", "transfer", "verify", "commit"))
        pause = 1e3 * row.get("commit.paused", float("nan"))
        # A vLLM that compiles kernels for a first shape samples nothing for seconds.
        rate = row["rate during"] / row["undisturbed"] if row["undisturbed"] else float("nan")
        print(
            f"| {mode}, {values['transport']}, {method} | {row['whole']:.3f} | {phases} | {pause:.0f} "
            f"| {nbytes / row['whole'] / 1e9:.1f} | {row['share']:.3f} | {rate:.2f} |"
        )
    note = values["why not sharded"] or "sharded"
    print(f"{mode}: first {values['first']['whole']:.3f} s; mean |d log p| {values['difference']:.1e}; {note}")
    parts = sorted({name for row in values["rounds"] for name in row if "." in name})
    middle = {name: statistics.median(row[name] for row in values["rounds"] if name in row) for name in parts}
    print("  parts, ms: " + ", ".join(f"{name} {1e3 * value:.1f}" for name, value in middle.items()), flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_vllm(parser)
    parser.add_argument("--model", choices=SHAPES, default="tiny-moe")
    parser.add_argument(
        "--parallel", nargs="*", default=[], metavar="NAME=SIZE", help="of the trainer: expert=2, tensor=2"
    )
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence that is trained (default: 512)")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    device, main_rank = vllm_device(arguments.vllm_python), os.environ.get("RANK", "0") == "0"
    if main_rank:
        show_progress()
    megascend.bootstrap(device)
    arguments.vocabulary = SHAPES[arguments.model]["vocab_size"]
    work = arguments.work or Path(tempfile.gettempdir()) / f"bench-{os.environ['MASTER_PORT']}"
    server = load = engine = None
    with contextlib.ExitStack() as stack:
        if main_rank:
            log.info("writing a checkpoint of %s", arguments.model)
            _, weights = make_model(arguments.model, arguments.layers, work / "model", device)
            arguments.nbytes = sum(tensor.nbytes for tensor in weights.values())
            stack.callback(shutil.rmtree, work / "model", ignore_errors=True)
            (work / "model" / "complete").touch()
            del weights
        while not (work / "model" / "complete").exists():  # there are no process groups yet
            time.sleep(0.2)
        log.info("building the trainer")
        backend = megascend.MegatronBackend(
            work / "model",
            megascend.Parallel(
                **{name: json.loads(size) for name, size in (item.split("=") for item in arguments.parallel)}
            ),
            precision="bf16" if device == "cuda" else "fp32",
            optimizer=megascend.Adam(lr=arguments.lr),
            batching=megascend.Batching(micro_batch_tokens=4096),
            timeout_s=600,
        )
        stack.callback(backend.close)
        log.info("the first step")
        train(backend, 0, arguments.vocabulary, arguments.length)  # all of its memory is allocated
        if device == "cuda":
            torch.cuda.empty_cache()  # vLLM measures free memory
        if main_rank:
            log.info("starting vLLM")
            server = stack.enter_context(Server(work / "model", work, arguments, device))
            engine = server.client()
            load = stack.enter_context(Load(engine, server.process.address, arguments.vocabulary, arguments))
            time.sleep(5.0)
        agree("vLLM's start", backend.groups)
        figures = measure(backend, engine, load, arguments)
    return {
        "vllm": vllm_release(arguments.vllm_python),
        "shape": arguments.model,
        "parallel": arguments.parallel,
        "tensor": arguments.tensor,
        "bytes": arguments.nbytes if main_rank else None,
        "modes": figures,
    }, True
