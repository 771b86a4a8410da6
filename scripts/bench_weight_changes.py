"""Measure how much of a model changes in a training step, as weight updates of mode delta send it; compare with complete updates.

    python scripts/bench_weight_changes.py             # 50 steps each at lr 1e-6 and 1e-5, Qwen3 of 5 million parameters, bf16
    python scripts/bench_weight_changes.py --lr 3e-6 --steps 20 --json figures.json

One process trains (engine single, AdamW with fp32 originals) on sequences of sorted numbers. After every step two engines in the
same process are updated: one by the changes, one completely. Their weights are compared bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import megascend
from megascend.testing.tiny_models import write_tiny_checkpoint
from weightwire.engine import InferenceEngine
from weightwire.receiver import Receiver

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
}


class Copy(InferenceEngine):
    """An engine that keeps the weights, and computes nothing."""

    def __init__(self, name: str) -> None:
        self.name, self.weights = name, {}
        self._receiver = Receiver(name)

    async def receivers(self) -> int:
        return 1

    async def begin_update(self, offer: Any) -> None:
        self._receiver.open(offer)

    async def verify(self, seal: Any, timeout_s: float) -> None:
        await asyncio.to_thread(self._receiver.verify, seal, timeout_s)

    async def commit(self, update: str) -> None:
        self._receiver.commit(update, self._load, lambda: None)
        self._receiver.settle(update)

    async def drop(self, update: str) -> None:
        self._receiver.drop(update)

    def _load(self, tensors: Any) -> None:
        self.weights = {name: tensor.clone() for name, tensor in tensors}


def samples(generator: random.Random, count: int, length: int) -> list[megascend.Sample]:
    """Build sequences of a number of digits, and the same digits sorted."""
    result = []
    for _ in range(count):
        digits = [generator.randrange(3, 4000) for _ in range(length // 2)]
        result.append(megascend.Sample.causal(digits + sorted(digits)))
    return result


def run(checkpoint: Path, lr: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train at one learning rate; return the share of each step's update and its durations in seconds."""
    backend = megascend.make_backend(
        "single",
        model=str(checkpoint),
        precision="bf16",
        optimizer=megascend.Adam(lr=lr),
        batching=megascend.Batching(micro_batch_tokens=2048),
        platform="cpu",
    )
    generator = random.Random(0)
    changes, complete = Copy("changes"), Copy("complete")
    shares, seconds, unequal = [], {"delta": [], "full": []}, 0
    with (
        megascend.WeightSync(backend, [changes], mode="delta", full_every=arguments.full_every) as by_changes,
        megascend.WeightSync(backend, [complete]) as completely,
    ):
        for version in range(arguments.steps + 1):
            if version:
                backend.forward_backward(samples(generator, 16, 64))
                backend.optimizer_step()
            for sync, name in ((by_changes, "delta"), (completely, "full")):
                start = time.perf_counter()
                pushed = sync.push(version)
                seconds[name].append(time.perf_counter() - start)
                if name == "delta":
                    shares.append((pushed.base, pushed.share))
            exact = changes.weights.keys() == complete.weights.keys() and all(
                torch.equal(tensor.view(torch.uint8), complete.weights[key].view(torch.uint8))
                for key, tensor in changes.weights.items()
            )
            unequal += not exact
    payload = sum(tensor.nbytes for tensor in complete.weights.values())
    backend.close()
    return {"lr": lr, "bytes": payload, "shares": shares, "seconds": seconds, "updates that differ": unequal}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, nargs="*", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--full-every", type=int, default=1000, help="complete updates in between (default: none)")
    parser.add_argument("--json", help="where to write all figures")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_checkpoint(Path(folder) / "model", "qwen3", **MODEL)
        for lr in arguments.lr:
            result = run(checkpoint, lr, arguments)
            results.append(result)
            by_changes = [share for base, share in result["shares"] if base is not None]
            print(
                f"lr {lr:g}: {result['bytes'] / 1e6:.1f} MB; share of the bytes in {len(by_changes)} updates: first "
                f"{by_changes[0]:.2%}, mean {statistics.mean(by_changes):.2%}, smallest {min(by_changes):.2%}, largest "
                f"{max(by_changes):.2%}; {result['updates that differ']} differ from complete ones; an update takes "
                f"{statistics.median(result['seconds']['delta']):.3f} s, a complete one "
                f"{statistics.median(result['seconds']['full']):.3f} s (medians)"
            )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
