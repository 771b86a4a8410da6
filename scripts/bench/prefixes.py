"""Measure a group of responses to one prompt: its prefix computed once (``batching.share_prefixes``), and for every response.

    python scripts/bench.py prefixes                                  # Qwen3-1.7B shapes, one GPU
    python scripts/bench.py prefixes --engine fsdp --size 2048x512x8
    python scripts/bench.py prefixes --tiny --platform cpu            # the same program on a CPU: checks it, not speed

Both in turn on one model: forward and backward pass of a policy loss, with the device idle before and after. ``bound`` is the
ratio of the FLOPs, in which every micro batch of a group computes the prompt. The exit code is 1 if losses or norms differ by
more than rounding.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.lora import precision_of
from bench.models import add_model, random_tokens, shape_of, write_checkpoint
from bench.runner import peak_gib, timed

COMMON = ("platform", "tiny", "warmup", "steps", "seed")
DEFAULTS = {"model": "1.7b", "size": ["2048x512x8", "8192x512x16", "16384x512x16"], "warmup": 1, "steps": 3}
TINY = {"model": "tiny", "size": ["40x8x4"], "warmup": 1, "steps": 2}
TOLERANCE = {"bf16": 2e-2, "fp32": 1e-5}
"""Largest relative difference of losses and norms."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--engine", choices=("megatron", "fsdp"), default="megatron")
    parser.add_argument(
        "--size", action="append", metavar="PROMPTxRESPONSExGROUP", help="tokens and responses; repeated"
    )
    parser.add_argument("--micro-batch-tokens", type=int, help="default: what the largest group computes")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    import megascend

    sizes = [tuple(map(int, size.split("x"))) for size in options.size]
    largest = max(prompt + group * response for prompt, response, group in sizes)
    megascend.bootstrap(options.platform, engine=options.engine)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shape_of(options), Path(folder), precision=precision_of(options), seed=options.seed)
        backend = megascend.make_backend(
            options.engine,
            model=folder,
            precision=precision_of(options),
            batching=megascend.Batching(micro_batch_tokens=options.micro_batch_tokens or largest, share_prefixes=16),
            seed=options.seed,
            self_check=False,
        )
    tolerance = TOLERANCE[precision_of(options)]
    rows = {}
    print(f"{'size':>16} {'separate':>20} {'shared':>20} {'times':>6} {'bound':>6} {'of it':>6}")
    for size, (prompt, response, group) in zip(options.size, sizes, strict=True):
        row = rows[size] = compare(backend, prompt, response, group, options)
        one, other = (f"{row[mode]['ms']:8.0f} ms {row[mode]['peak_gib']:5.1f} GiB" for mode in ("separate", "shared"))
        reached = row["times"] / row["bound"]
        print(f"{size:>16} {one:>20} {other:>20} {row['times']:6.2f} {row['bound']:6.2f} {reached:6.0%}", flush=True)
    agree = all(
        abs(row["shared"][figure] / row["separate"][figure] - 1) <= tolerance
        for row in rows.values()
        for figure in ("loss", "norm")
    )
    return {"prefixes": rows}, agree


def compare(backend: Any, prompt: int, response: int, group: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one group in both ways."""
    import torch

    import megascend

    tokens = random_tokens(group, prompt + response, backend.vocab_size, options.seed)
    tokens[:, :prompt] = tokens[0, :prompt]
    logprobs = [-math.log(backend.vocab_size)] * response  # about those of random weights
    samples = [
        megascend.Sample.response(row[:prompt], row[prompt:], logprobs, (-1.0) ** number + 0.5)
        for number, row in enumerate(tokens)
    ]
    row: dict[str, Any] = {}
    for mode in ("separate", "shared"):
        backend.engine.shares_prefixes = mode == "shared"
        ms: list[float] = []
        for number in range(options.warmup + options.steps):
            if options.platform == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken, result = timed(lambda: backend.forward_backward(samples, "importance_sampling"), options.platform)
            peak, loss = peak_gib(options.platform), result.loss
            # Before the first step both ways have the same weights; a learning rate of 0 keeps them.
            norm = backend.optimizer_step(lr=0.0).grad_norm
            ms += [taken] if number >= options.warmup else []
        row[mode] = {"ms": statistics.median(ms), "peak_gib": peak, "loss": loss, "norm": norm}
        row[mode] |= {"micro_batches": result.micro_batches, "shared_tokens": result.shared_tokens}
    length = prompt + response - 1
    separate = group * length * backend.flops_per_token(length)
    # A response's own tokens see a context as long as those of a sequence of twice the prompt and itself.
    own = response * backend.flops_per_token(2 * prompt + response)
    row["times"] = row["separate"]["ms"] / row["shared"]["ms"]
    prompts = row["shared"]["micro_batches"] * prompt * backend.flops_per_token(prompt)
    row["bound"] = separate / (prompts + group * own)
    return row
